"""`kvik replay` of recordings of a real model."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import Command
from helpers.engine_child import ranks_of
from helpers.optional_native import needs_native
from helpers.recorded import record_flight, written

from kvik.config.model_source import BUNDLED
from kvik.engine.recorder import Failed, Finished, RecordReader, open_recording
from kvik.engine.replay import Replay

pytestmark = pytest.mark.usefixtures("forked")

DRAFTS = {"spec_method": "draft_model", "spec_model": str(BUNDLED.parent / "stories-draft")}


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("flight") / "flight.kvik"
    stats = record_flight(path, dtype="float32")
    assert stats.preemptions > 0 and stats.prefix_hits > 0
    return path


@pytest.mark.full
def test_a_replay_is_equal(flight, command: Command):
    out = command("replay", str(flight)).out.splitlines()
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
        pytest.param({"policy": "priority"}, id="priority"),
    ],
)
def test_a_replay_is_equal_for_all_configurations(tmp_path, command: Command, config):
    stats = record_flight(tmp_path / "flight", seed=1, **config)
    assert stats.preemptions > 0
    if stats.speculation is not None:
        assert stats.speculation.drafts.drafts > 0
    assert command("replay", str(tmp_path / "flight")).out.startswith("equal: ")


def lose_a_rank() -> None:
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)


@needs_native
@pytest.mark.full
def test_an_engine_that_has_lost_a_process(tmp_path, command: Command):
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
        outputs.add(command("replay", str(path), *options).out)
    (out,) = outputs
    first, *rest = out.splitlines()
    assert first.startswith("equal: ") and " requests, " in first
    assert rest == [
        "1 steps had failed, and were not compared",
        "the recording ends there: rank 1 has ended with signal 9",
    ]


@needs_native
@pytest.mark.full
def test_a_process_that_is_lost_during_a_replay(flight, tmp_path, monkeypatch, command: Command):
    path = tmp_path / "flight"
    record_flight(path, threads=2, tensor_parallel_size=2)
    play = Replay.run
    monkeypatch.setattr(Replay, "run", lambda *args: (lose_a_rank(), play(*args))[1])
    assert "rank 1 has ended with signal 9" in command("replay", str(path), code=2).err


@needs_native
def test_impossible_numbers_of_processes(tmp_path, command: Command):
    path = tmp_path / "flight"
    record_flight(path, requests=1)
    for ranks, why in (("0", "at least 1, not 0"), ("99", "at most 8")):
        err = command.refusal("replay", str(path), "--tensor-parallel-size", ranks)
        assert "tensor_parallel_size" in err.replace("-", "_") and why in err


@pytest.mark.full
def test_a_changed_token_is_detected(flight, tmp_path, command: Command):
    with open_recording(flight) as file:
        reader = RecordReader(file, "")
        header, events = reader.header, list(reader.events())
    finished = next(e for e in events if isinstance(e, Finished) and e.step == 20)
    row = next(i for i, tokens in enumerate(finished.token_ids) if tokens)
    finished.token_ids[row][0] += 1
    changed = tmp_path / "changed"
    changed.write_bytes(written(header, events))
    out = command("replay", str(changed), code=1).out.splitlines()
    assert out[0].startswith("different after 20 steps, ")
    assert out[1].startswith("step 20, request r") and "the tokens are [" in out[1]


@pytest.mark.full
def test_a_truncated_recording(flight, tmp_path, command: Command):
    cut = tmp_path / "cut"
    cut.write_bytes(flight.read_bytes()[:-1000])
    out = command("replay", str(cut)).out.splitlines()
    assert out[0].startswith("equal: ")
    assert out[1].startswith("the recording breaks off there")


@pytest.mark.full
def test_the_model_may_have_moved_but_not_changed(flight, tmp_path, command: Command):
    moved = tmp_path / "stories"
    shutil.copytree(BUNDLED, moved)
    command("replay", str(flight), "--model", str(moved))
    error = command.refusal("replay", str(flight), "--model", str(BUNDLED.parent / "stories-draft"))
    assert "is another model than the one of the recording" in error


def test_invalid_recordings(tmp_path, command: Command):
    assert "cannot be read" in command.refusal("replay", str(tmp_path / "none"))
    (tmp_path / "text").write_text("hello")
    assert "is not a recording" in command.refusal("replay", str(tmp_path / "text"))
