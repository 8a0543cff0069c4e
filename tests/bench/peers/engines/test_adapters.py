"""Adapters on the bundled model, each in its own process, as users run them."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvik.config.model_source import BUNDLED
from kvik_bench.peers.adapter_process import run_adapter
from kvik_bench.peers.compare import make_workloads
from kvik_bench.peers.engine_entries import ADAPTERS, EngineEntry
from kvik_bench.peers.engines.protocol import Answer, Job

LIMIT = 120.0  # seconds


def run(adapter: str, form: str) -> Answer:
    options = dict(ADAPTERS[adapter].formats[form])
    entry = EngineEntry(adapter=adapter, format=form, options=options)
    workloads = make_workloads(["prefill", "b3"], 20, 8, 2048, seed=1)
    return run_adapter(entry, Job(str(BUNDLED), 1, time.time(), workloads, options), LIMIT).answer


@pytest.fixture(scope="module")
def kvik_answer() -> Answer:
    return run("kvik", "fp32")


@pytest.mark.full
def test_kvik_answers(kvik_answer: Answer) -> None:
    assert not kvik_answer.failed
    assert kvik_answer.engine.startswith("kvik ")
    assert [len(rates) for rates in kvik_answer.rates.values()] == [5, 3]
    assert [len(row) for row in kvik_answer.tokens["b3"]] == [8, 8, 8]
    assert 0.1 < kvik_answer.start < LIMIT


@pytest.mark.full
@pytest.mark.parametrize(
    "adapter",
    ["transformers", pytest.param("transformers-batching", marks=pytest.mark.nightly)],
)
def test_other_engines_give_the_same_tokens_in_fp32(adapter: str, kvik_answer: Answer) -> None:
    answer = run(adapter, "fp32")
    assert not answer.failed
    assert answer.tokens == kvik_answer.tokens
    assert [len(rates) for rates in answer.rates.values()] == [5, 3]


def test_an_adapter_without_its_engine_is_reported() -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    failed = run("vllm", "bf16").failed
    assert failed.startswith("ModuleNotFoundError: No module named 'vllm'")


def test_llama_batched_bench_needs_its_path() -> None:
    entry = EngineEntry(adapter="llama.cpp-bench", format="int8")
    job = Job("none.gguf", 1, 0.0, make_workloads(["b1"], 4, 4, 100, 0), {})
    assert "options.bench must be the path" in run_adapter(entry, job, LIMIT).answer.failed


def test_the_reason_of_llama_batched_bench_is_reported(tmp_path: Path) -> None:
    bench = tmp_path / "llama-batched-bench"
    bench.write_text("#!/bin/sh\necho failed to open none.gguf >&2\nexit 3\n")
    bench.chmod(0o755)
    entry = EngineEntry(adapter="llama.cpp-bench", format="int8")
    workloads = make_workloads(["b1"], 4, 4, 100, 0)
    failed = run_adapter(
        entry, Job("none.gguf", 1, 0.0, workloads, {"bench": str(bench)}), LIMIT
    ).answer.failed
    assert "failed to open none.gguf" in failed
