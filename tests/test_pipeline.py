"""Failures and cleanup of a pipeline that loses a stage."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
from helpers.engine_child import children_of
from helpers.faults import errors_of, raising

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik has no native kernels here")

from kvik import LLM, SamplingParams, stage_process
from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.core.types import EngineRequest
from kvik.errors import NOTES_LOG, ConfigError
from kvik.launch import launch

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("forked")]

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
COMMON = {"device": "cpu", "threads": 3, "pipeline_parallel_size": 3, "max_model_len": 256}


@pytest.fixture
def llm():
    with LLM(**COMMON) as made:
        yield made
    assert not stages(), "a process outlives its engine"


def stages() -> list[int]:
    return children_of(os.getpid(), "kvik.stage_process")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_lost_stage_is_named(llm, stage: int) -> None:
    assert errors_of(llm, LONG, 3) == {"None"}
    os.kill(stages()[stage], signal.SIGKILL)
    for _ in range(2):  # also later calls
        (error,) = errors_of(llm, LONG)
        assert f"stage {stage} has ended with signal 9" in error


def test_a_silent_stage_is_lost(llm, monkeypatch) -> None:
    monkeypatch.setattr("kvik.child_process.SILENT_SECONDS", 1.0)
    os.kill(stages()[1], signal.SIGSTOP)
    (error,) = errors_of(llm, LONG)
    assert "stage 1 has been silent for 1 s" in error


def test_requests_end_when_a_stage_is_lost_under_way(llm) -> None:
    threading.Timer(0.3, os.kill, (stages()[0], signal.SIGABRT)).start()
    start = time.monotonic()
    found: set[str] = set()
    while found <= {"None"} and time.monotonic() < start + 10:
        found = errors_of(llm, LONG, 4)
    assert found - {"None"} and all("stage 0" in error for error in found - {"None"})


def test_results_are_never_taken_for_those_of_other_steps() -> None:
    """An interruption in the last stage leaves the others a step ahead."""
    with closing(launch(EngineConfig(**COMMON)).loop) as loop:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        loop.add(EngineRequest("a", [1, 2, 3], params))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("kvik.worker.pipeline.StageTape.run", raising(KeyboardInterrupt()))
            while True:
                loop.poll()
        found = []
        for name in "bc":  # the interrupted request ends with the first of these
            loop.add(EngineRequest(name, [1, 2, 3], params))
            while loop.has_work:
                found += loop.poll()
        assert all("interrupted" in delta.error for delta in found) and len(found) == 3
        assert "interrupted in the last" in found[-1].error
    assert not stages()


def test_a_failed_step_of_the_last_stage_is_one_error(llm, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvik.worker.pipeline.StageTape.run", raising(MemoryError("no room")))
        (error,) = errors_of(llm, LONG)
        assert "no room" in error
    assert errors_of(llm, LONG) == {"None"}


def test_nothing_is_left_of_a_pipeline_that_cannot_load(monkeypatch) -> None:
    monkeypatch.setattr("kvik.worker.worker.load_share", raising(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        LLM(**COMMON)
    assert not stages()


def test_a_stage_that_cannot_load_reports_why(monkeypatch) -> None:
    monkeypatch.setattr("kvik.stage_process.cores_of", lambda size: [[1 << 20]] * size)
    with pytest.raises(ConfigError, match="stage 0 cannot load: OSError"):
        LLM(**COMMON)
    assert not stages()


def test_a_stage_with_other_files_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("kvik.worker.engine_cache.fingerprints", lambda runner: "other")
    with pytest.raises(ConfigError, match="stage 0 has other files of the model"):
        LLM(**COMMON)
    assert not stages()


def test_a_stage_with_other_kernels_is_refused(monkeypatch) -> None:
    here = replace(detect(), isa=frozenset())
    monkeypatch.setattr(stage_process, "detect", lambda: here)
    with pytest.raises(ConfigError, match="the engine for portable: results would differ") as info:
        LLM(**COMMON)
    assert info.value.field == "pipeline_parallel_size" and not stages()


BEATS_ALONE = """
import sys, time
from kvik.kernels.cpu._native import Heartbeat
from kvik.links import Address, Handshake, LinkListener, connect
host, port, number, own = sys.argv[1:]
token = bytes.fromhex(sys.stdin.read())
waiting = LinkListener(own, token)
line, beat = (
    connect(Address(host, int(port)), token, Handshake(role, int(number), waiting.address))
    for role in ("line", "beat")
)
beating = Heartbeat(beat.fileno())
time.sleep(1000)
"""


def test_a_stage_without_progress_ends_the_start(monkeypatch) -> None:
    monkeypatch.setattr(
        stage_process, "python_command", lambda _, *args: (sys.executable, "-c", BEATS_ALONE, *args)
    )
    monkeypatch.setattr(stage_process, "END_SECONDS", 0.5)
    monkeypatch.setattr(stage_process, "MIN_LOAD_SECONDS", 0.0)
    monkeypatch.setattr(stage_process, "LOAD_TIMES", 1.0)
    with pytest.raises(ConfigError, match=r"stage 0 has not loaded in \d+ s, and the last one in"):
        LLM(**COMMON)
    assert not children_of(os.getpid(), "Heartbeat")


def test_an_engine_that_cannot_be_reached_is_one_error(monkeypatch) -> None:
    """Because a stage has another token, or a firewall blocks the connection."""
    start = stage_process.start_stage
    monkeypatch.setattr(stage_process, "start_stage", lambda args, token: start(args, "00" * 32))
    with pytest.raises(ConfigError, match=r"stage . cannot connect to the engine at 127\.0\.0\.1:"):
        LLM(**COMMON)
    assert not stages()


@pytest.mark.usefixtures("fresh")
def test_the_start_logs_where_each_process_runs(caplog) -> None:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    options = {"threads": 4, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    with caplog.at_level(logging.INFO, NOTES_LOG), LLM(**{**COMMON, **options}):
        lines = sorted(one.getMessage() for one in caplog.records if one.name == NOTES_LOG)
    assert [line.partition(",")[0] for line in lines] == [
        *("rank 0 of 2: cpu", "rank 1 of 2: cpu", "stage 0 of 2: layers 0 to 2")
    ]
    assert "at 127.0.0.1" in lines[2] and ("cores" in lines[2]) == (cores >= 2)


def test_a_stage_that_ends_at_once_is_one_error(monkeypatch) -> None:
    start = stage_process.start_stage
    monkeypatch.setattr(stage_process, "start_stage", lambda args, token: start(args, "no token"))
    with pytest.raises(ConfigError, match="stage . has ended with code 1 before it could load"):
        LLM(**COMMON)
    assert not stages()
