"""`kvik replay` of recordings of a real model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.engine_child import ranks_of
from helpers.optional_native import needs_native
from helpers.recorded import record_flight, written

from kvik.cli.main import main
from kvik.config.model_source import BUNDLED
from kvik.engine.recorder import Failed, Finished, RecordReader, open_recording
from kvik.engine.replay import Replay

pytestmark = pytest.mark.usefixtures("forked")

DRAFTS = {"spec_method": "draft_model", "spec_model": str(BUNDLED.parent / "stories-draft")}


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("flight") / "flight.kvik"
    stats = record_flight(path, kernels="torch", dtype="float32")
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    return path


@pytest.mark.full
def test_a_replay_is_equal(flight, capsys):
    assert main(["replay", str(flight)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("equal: ") and ", 24 requests, " in out[0]
    assert out[1] == "the recording ends there: the engine was closed"


@pytest.mark.full
def test_a_replay_is_equal_in_another_process(flight):
    """With other hashes of strings, so that sets have another order."""
    command = [sys.executable, "-m", "kvik", "replay", str(flight)]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"kernels": "native"}, marks=needs_native, id="native"),
        pytest.param({"kernels": "native", **DRAFTS}, marks=needs_native, id="native with drafts"),
        pytest.param({"kernels": "torch", "spec_method": "ngram"}, id="torch with ngrams"),
        pytest.param({"kernels": "torch", "policy": "priority"}, id="priority"),
    ],
)
def test_a_replay_is_equal_for_all_configurations(tmp_path, capsys, config):
    stats = record_flight(tmp_path / "flight", seed=1, **config)
    assert stats.preemptions > 0
    if stats.speculation is not None:
        assert stats.speculation.drafts.drafts > 0
    assert main(["replay", str(tmp_path / "flight")]) == 0
    assert capsys.readouterr().out.startswith("equal: ")


def lose_a_rank() -> None:
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)


@needs_native
@pytest.mark.full
def test_an_engine_that_has_lost_a_process(tmp_path, capsys):
    """Up to the loss, with any number of processes, and with the same end of each request."""
    path = tmp_path / "flight"
    record_flight(path, lose=lose_a_rank, threads=2, tensor_parallel_size=2)
    assert not ranks_of(os.getpid())
    with open_recording(path) as file:
        events = list(RecordReader(file, "").events())
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.error for event in failed] == ["GroupLost: rank 1 has ended with signal 9"]
    outputs = set()
    for ranks in ([], ["1"], ["2"], ["4"]):
        options = ["--tensor-parallel-size", *ranks] if ranks else []
        assert main(["replay", str(path), *options]) == 0
        outputs.add(capsys.readouterr().out)
    (out,) = outputs
    first, *rest = out.splitlines()
    assert first.startswith("equal: ") and " requests, " in first
    assert rest == [
        "1 steps had failed, and were not compared",
        "the recording ends there: rank 1 has ended with signal 9",
    ]


@needs_native
@pytest.mark.full
def test_a_process_that_is_lost_during_a_replay(flight, tmp_path, monkeypatch, capsys):
    path = tmp_path / "flight"
    record_flight(path, threads=2, tensor_parallel_size=2)
    play = Replay.run
    monkeypatch.setattr(Replay, "run", lambda *args: (lose_a_rank(), play(*args))[1])
    assert main(["replay", str(path)]) == 2
    assert "rank 1 has ended with signal 9" in capsys.readouterr().err


@needs_native
def test_impossible_numbers_of_processes(tmp_path, capsys):
    path = tmp_path / "flight"
    record_flight(path, requests=1)
    for ranks, why in (("0", "at least 1, not 0"), ("99", "at most 8")):
        assert main(["replay", str(path), "--tensor-parallel-size", ranks]) == 2
        err = capsys.readouterr().err
        assert "tensor_parallel_size" in err.replace("-", "_") and why in err


@pytest.mark.full
def test_a_changed_token_is_detected(flight, tmp_path, capsys):
    with open_recording(flight) as file:
        reader = RecordReader(file, "")
        header, events = reader.header, list(reader.events())
    finished = next(e for e in events if isinstance(e, Finished) and e.step == 20)
    row = next(i for i, tokens in enumerate(finished.token_ids) if tokens)
    finished.token_ids[row][0] += 1
    changed = tmp_path / "changed"
    changed.write_bytes(written(header, events))
    assert main(["replay", str(changed)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("different after 20 steps, ")
    assert out[1].startswith("step 20, request r") and "the tokens are [" in out[1]


@pytest.mark.full
def test_a_truncated_recording(flight, tmp_path, capsys):
    cut = tmp_path / "cut"
    cut.write_bytes(flight.read_bytes()[:-1000])
    assert main(["replay", str(cut)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("equal: ")
    assert out[1].startswith("the recording breaks off there")


@pytest.mark.full
def test_the_model_may_have_moved_but_not_changed(flight, tmp_path, capsys):
    moved = tmp_path / "stories"
    shutil.copytree(BUNDLED, moved)
    assert main(["replay", str(flight), "--model", str(moved)]) == 0
    capsys.readouterr()
    assert main(["replay", str(flight), "--model", str(BUNDLED.parent / "stories-draft")]) == 2
    assert "is another model than the one of the recording" in capsys.readouterr().err


def test_invalid_recordings(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "text").write_text("hello")
    assert main(["replay", str(tmp_path / "text")]) == 2
    assert "is not a recording" in capsys.readouterr().err
