"""Every job of the benchmark for GPUs, once, without one: in Triton's interpreter, at tiny sizes.

Its results are meaningless, but no job may fail.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from kvik.attention.triton import TritonAttention
from kvik.worker import platforms
from kvik.worker.captures import NotCaptured

pytestmark = [INTERPRETED_ONLY, pytest.mark.filterwarnings("ignore")]

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
# A job for each function, with the relevant variants of its arguments.
CHOSEN = (
    *("ceilings", "cases 0", "attention 0", "tokens", "tests", "warm fp8, tokens too"),
    "tiers",
    *("warm attention", "warm others", "attention kernels", "products", "other kernels"),
    *(
        "prompts",
        "8b bf16",
        "1b drafts",
        "soak",
        "transformers compiled",
        "transformers in batches",
        "first answer",
        "served",
        "invariance capped variants",
    ),
)
LEFT_OUT = {("warm", "engine")}  # `measure` of models.py again


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the script and its modules anew, for a rehearsal."""
    monkeypatch.setenv("KVIK_GPU_REHEARSAL", "1")
    monkeypatch.syspath_prepend(str(FOLDER))
    # Undo the replacements of the rehearsal.
    monkeypatch.setattr(TritonAttention, "caps", TritonAttention.caps)
    monkeypatch.setattr(platforms, "CudaCapturer", platforms.CudaCapturer)
    own = {path.stem for path in FOLDER.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    yield importlib.import_module("run")
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_every_function_is_rehearsed(run: ModuleType) -> None:
    every = {(job.module, job.function) for job in run.JOBS}
    assert {(j.module, j.function) for j in run.JOBS if j.name in CHOSEN} == every - LEFT_OUT
    assert {job.name for job in run.JOBS} >= set(CHOSEN)
    warmed = {job.arguments[0] for job in run.JOBS if job.function == "products"}
    assert warmed == set(importlib.import_module("kernels_linear").FORMATS)


def test_what_cannot_be_captured_is_timed_without_a_graph(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Callable[[], None]) -> None:
        raise NotCaptured("an operation cannot be captured")

    clock = importlib.import_module("clock")
    monkeypatch.setattr(clock, "REHEARSED", False)
    monkeypatch.setattr(clock, "CudaCapturer", lambda device: SimpleNamespace(capture=refuse))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert not clock.timed([lambda: None]).captured


@pytest.mark.full
@pytest.mark.parametrize("name", CHOSEN)
def test_a_job(
    name: str, run: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if "transformers" in name:
        pytest.importorskip("transformers")
    (job,) = (job for job in run.JOBS if job.name == name)
    notes = importlib.import_module("notes")
    file = tmp_path / "notes.jsonl"
    function = getattr(importlib.import_module(job.module), job.function)
    function(notes.Notes(file, name, 250.0), *job.arguments)
    records = notes.read_notes(file)
    assert records
    assert not [r for r in caplog.records if r.exc_info]  # `job.py` notes these as failures
    assert not [r for r in records if r["kind"] == "failure"]
    assert not [r for r in records if r["kind"] == "check" and not r["passed"]]
    if job.module != "ceilings":  # it lists missing packages
        assert not [r for r in records if r["kind"] == "missed"]
