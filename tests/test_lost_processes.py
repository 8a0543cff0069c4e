"""Failures and cleanup of a group of ranks, or of a pipeline of stages, that loses a process."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from helpers.engine_child import children_of, ranks_of
from helpers.faults import errors_of, raising
from helpers.http_server import until

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik has no native kernels here")

from kvik import LLM, SamplingParams, rank_process, stage_process
from kvik import child_process as watched
from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.core.types import EngineRequest
from kvik.errors import NOTES_LOG, ConfigError, GroupLost
from kvik.kernels import torch_group
from kvik.kernels.cpu.group import Group
from kvik.kernels.torch_group import TorchGroup
from kvik.launch import launch
from kvik.stage_process import start_stage
from kvik.worker.staged_mover import Copied, StagedPageMover

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("forked")]

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = LONG.with_changes(max_tokens=8)
COMMON: dict[str, Any] = {"device": "cpu", "max_model_len": 256}
RANKS = {**COMMON, "threads": 2, "tensor_parallel_size": 2}
STAGES = {**COMMON, "threads": 3, "pipeline_parallel_size": 3}
BY_TORCH = {"kernels": "torch", "dtype": "float32"}
AGAIN = "close this LLM and make a new one"


class Process(NamedTuple):
    """A process that an engine of these options can lose."""

    options: dict[str, Any]
    name: str
    module: str
    number: int = 0  # of the processes of this module

    @property
    def pid(self) -> int:
        return children_of(os.getpid(), self.module)[self.number]


RANK, STAGE = "kvik.rank_process", "kvik.stage_process"
PROCESSES = {
    "rank joined by memory": Process(RANKS, "rank 1", RANK),
    "rank joined by torch": Process({**RANKS, **BY_TORCH}, "rank 1", RANK),
    "first stage": Process(STAGES, "stage 0", STAGE),
    "inner stage with torch's kernels": Process({**STAGES, **BY_TORCH}, "stage 1", STAGE, number=1),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = shared_files()
    yield
    for module in (RANK, STAGE):
        assert not children_of(os.getpid(), module), "a process outlives its engine"
    gc.collect()  # errors, whose frames refer to the memory
    assert shared_files() <= before


def shared_files() -> set[str]:
    """Return the anonymous files and the connections that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue
        if "memfd" in name or "socket" in name:
            found.add(f"{number} {name}")
    return found


@pytest.fixture(params=PROCESSES)
def lost(request: pytest.FixtureRequest) -> Process:
    return PROCESSES[request.param]


@pytest.fixture
def llm(lost: Process) -> Iterator[LLM]:
    with LLM(**lost.options) as made:
        yield made


@pytest.fixture
def pipeline() -> Iterator[LLM]:
    with LLM(**STAGES) as made:
        yield made


def test_a_group_that_may_be_killed_has_no_temporary_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LLM(**RANKS) as llm:
        assert errors_of(llm, SHORT, 3) == {"None"}
        assert not list(tmp_path.iterdir())


def test_a_lost_process_is_named(llm: LLM, lost: Process) -> None:
    assert errors_of(llm, SHORT, 3) == {"None"}
    os.kill(lost.pid, signal.SIGKILL)
    (error,) = errors_of(llm, LONG)
    assert f"{lost.name} has ended with signal 9" in error
    for _ in range(2):
        with pytest.raises(GroupLost, match=f"{lost.name} has ended with signal 9: {AGAIN}"):
            llm.generate("Once", LONG)


def test_a_process_that_is_stopped_is_lost(
    llm: LLM, lost: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "SILENT_SECONDS", 1.0)
    time.sleep(1.5)
    assert errors_of(llm, SHORT) == {"None"}, "one that has nothing to do is not silent"
    os.kill(lost.pid, signal.SIGSTOP)
    assert errors_of(llm, LONG, 3) == {f"GroupLost: {lost.name} has been silent for 1 s"}
    assert not children_of(os.getpid(), lost.module)
    with pytest.raises(GroupLost, match=f"{lost.name} has been silent for 1 s"):
        llm.generate("Once", LONG)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_requests_end_when_a_process_is_lost_under_way(
    llm: LLM, lost: Process, number: int
) -> None:
    threading.Timer(0.3, os.kill, (lost.pid, number)).start()
    start = time.monotonic()
    found: set[str] = set()
    while found <= {"None"} and time.monotonic() < start + 10:
        found = errors_of(llm, LONG, 4)
    assert all(lost.name in error for error in found - {"None"}) and found - {"None"}


@pytest.mark.parametrize("joined", [{}, BY_TORCH])
def test_an_interrupted_step_is_never_taken_for_the_next(
    joined: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in one step, which must not be confused with the next."""
    interrupted = raising(RuntimeError("interrupted"))
    with LLM(**RANKS, **joined) as llm:
        with monkeypatch.context() as patch:
            patch.setattr("kvik.kernels.cpu.native.Native.replay", interrupted)
            patch.setattr("kvik.worker.graphs.Eager.forward", interrupted)
            (error,) = errors_of(llm, LONG)
            assert "interrupted" in error
        with pytest.raises(GroupLost, match="rank 0 was interrupted"):
            llm.generate("Once", LONG)


def test_results_are_never_taken_for_those_of_other_steps() -> None:
    """An interruption in the last stage leaves the others a step ahead."""
    with closing(launch(EngineConfig(**STAGES)).loop) as loop:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        loop.add(EngineRequest("a", [1, 2, 3], params))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("kvik.worker.pipeline.StageSteps.run", raising(KeyboardInterrupt()))
            while True:
                loop.poll()
        found = []
        for name in "bc":  # the interrupted request ends with the first of these
            loop.add(EngineRequest(name, [1, 2, 3], params))
            while loop.has_work:
                found += loop.poll()
        assert all("interrupted" in delta.error for delta in found) and len(found) == 3
        assert "interrupted in the last" in found[-1].error


def test_a_failed_step_of_the_last_stage_is_one_error(
    pipeline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvik.worker.pipeline.StageSteps.run", raising(MemoryError("no room")))
        (error,) = errors_of(pipeline, LONG)
        assert "no room" in error
    assert errors_of(pipeline, LONG) == {"None"}


@pytest.mark.parametrize("load", [False, True], ids=["stored", "loaded"])
@pytest.mark.parametrize("tiers", ["memory:64MiB", "disk:{folder}:1GiB"])
def test_a_process_that_is_lost_while_pages_move_leaves_nothing(
    tiers: str, load: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5 + i] * 100 for i in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    kv_tiers = tiers.format(folder=tmp_path / "kv")
    copy, killed = StagedPageMover._copy, []

    def lose(mover: StagedPageMover, *args: Any, **options: Any) -> Copied:
        if options["load"] == load and not killed:
            killed.extend(ranks_of(os.getpid()))
            os.kill(killed[0], signal.SIGKILL)
        return copy(mover, *args, **options)

    threads = set(threading.enumerate())
    with LLM(**RANKS, num_blocks=18, kv_tiers=kv_tiers) as made:
        if load:
            for prompt in prompts:
                made.generate([prompt], sampling)
        monkeypatch.setattr(StagedPageMover, "_copy", lose)
        try:
            for prompt in prompts:
                (output,) = made.generate([prompt], sampling)
                if output.outputs[0].error:
                    assert "rank 1 has ended with signal 9" in output.outputs[0].error
                    break
            else:
                made.generate([prompts[0]], sampling)
        except GroupLost:
            pass
        with pytest.raises(GroupLost, match=f"rank 1 has ended with signal 9: {AGAIN}"):
            made.generate([prompts[0]], sampling)
        assert killed
    until(lambda: not set(threading.enumerate()) - threads, 10)
    for page in (tmp_path / "kv").glob("*/*/*.kv"):
        assert page.name[0] != "."
    with LLM(**{**RANKS, "tensor_parallel_size": 1}, num_blocks=18, kv_tiers=kv_tiers) as again:
        found = [again.generate([prompt], sampling)[0].outputs[0] for prompt in prompts]
    with LLM(**{**RANKS, "tensor_parallel_size": 1}) as alone:
        right = [alone.generate([prompt], sampling)[0].outputs[0] for prompt in prompts]
    assert [each.token_ids for each in found] == [each.token_ids for each in right]


# During loading


@pytest.mark.parametrize("options", [RANKS, STAGES])
@pytest.mark.parametrize("part", ["worker.worker.load_share", "launch.load_tokenizer"])
def test_nothing_is_left_of_a_group_that_cannot_load(
    part: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"kvik.{part}", raising(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        LLM(**options)


def send_soon(number: int) -> None:
    """Send a signal to the next process that is started."""

    def send() -> None:
        os.kill(until(lambda: ranks_of(os.getpid()))[0], number)

    threading.Thread(target=send).start()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("joined", [{}, BY_TORCH])
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "has ended with signal 9"),
        (signal.SIGSTOP, "has been silent for 1 s"),
    ],
)
def test_a_process_that_is_lost_while_it_loads_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, number: int, how: str, joined: dict[str, Any]
) -> None:
    monkeypatch.setattr(watched, "BEGIN_SECONDS", 1.0)
    send_soon(number)
    with pytest.raises(GroupLost, match=f"^rank 1 {how} while it loaded$") as caught:
        LLM(**RANKS, **joined)
    # The error must not keep file descriptors that may be reused by now.
    others = [socket.socket() for _ in range(8)]
    del caught
    gc.collect()
    for other in others:
        other.close()


LOADS_AND_BEATS = """
import sys, time
from mmap import mmap
from multiprocessing.connection import Connection
import msgspec, numpy as np
from kvik.kernels.cpu.barrier import Barrier
from kvik.rank_process import RankReady
beating = Barrier(np.frombuffer(mmap(int(sys.argv[2]), 0), np.uint8)).beat(1)
line = Connection(int(sys.argv[1]))
line.recv_bytes(), line.recv_bytes()
{connect}
line.send_bytes(msgspec.msgpack.encode(RankReady("the same", "")))
time.sleep(1000)
"""
CONNECTS = """
import torch
from kvik.kernels.torch_group import connect
group = connect(torch.device("cpu"), sys.argv[4], 1, 2, lambda: False)
"""


@pytest.mark.parametrize(
    ("kernels", "connect", "message"),
    [
        ("native", "", "rank 1 has not come to an exchange within 2 s"),
        ("torch", CONNECTS, "an exchange between ranks failed.*imed out"),
    ],
)
def test_a_process_that_misses_an_exchange_is_lost(
    monkeypatch: pytest.MonkeyPatch, kernels: str, connect: str, message: str
) -> None:
    """It sends heartbeats, so that only the limit of the exchange ends the wait."""
    program = LOADS_AND_BEATS.format(connect=connect)
    monkeypatch.setattr(
        rank_process,
        "python_command",
        lambda _, *numbers: (sys.executable, "-c", program, *numbers),
    )
    monkeypatch.setattr(TorchGroup, "digest", "the same")
    monkeypatch.setattr(Group, "digest", "the same")
    monkeypatch.setattr(torch_group, "EXCHANGE_SECONDS", 2.0)
    monkeypatch.setattr(rank_process, "EXCHANGE_SECONDS", 2.0)
    monkeypatch.setattr(rank_process, "END_SECONDS", 0.5)
    with LLM(**RANKS, kernels=kernels) as made:
        (error,) = errors_of(made, LONG)
        assert re.search(message, error)
        with pytest.raises(GroupLost, match=message):
            made.generate("Once", LONG)


# Programs in the place of a rank and of a stage, which send heartbeats and nothing else.
RANK_BEATS = """
import sys, time
from mmap import mmap
import numpy as np
from kvik.kernels.cpu.barrier import Barrier
beating = Barrier(np.frombuffer(mmap(int(sys.argv[2]), 0), np.uint8)).beat(1)
time.sleep(1000)
"""
STAGE_BEATS = """
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


@pytest.mark.parametrize(
    ("module", "options", "program", "message"),
    [
        (rank_process, RANKS, RANK_BEATS, r"^rank 1 has not loaded in \d+ s, and rank 0 in \d+ s$"),
        (
            stage_process,
            STAGES,
            STAGE_BEATS,
            r"stage 0 has not loaded in \d+ s, and the last one in",
        ),
    ],
)
def test_a_process_without_progress_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    options: dict[str, Any],
    program: str,
    message: str,
) -> None:
    monkeypatch.setattr(
        module, "python_command", lambda _, *args: (sys.executable, "-c", program, *args)
    )
    monkeypatch.setattr(module, "END_SECONDS", 0.5)
    monkeypatch.setattr(module, "MIN_LOAD_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOAD_TIMES", 1.0)
    with pytest.raises((GroupLost, ConfigError), match=message):
        LLM(**options)
    assert not children_of(os.getpid(), "beating = ")


@pytest.mark.parametrize(
    ("replaced", "value", "message"),
    [
        ("stage_process.cores_of", lambda size: [[1 << 20]] * size, "stage 0 cannot load: OSError"),
        (
            "worker.engine_cache.fingerprints",
            lambda runner: "other",
            "stage 0 has other files of the model",
        ),
        (
            "stage_process.detect",
            lambda: replace(detect(), isa=frozenset()),
            "pipeline_parallel_size: .* the engine for portable: results would differ",
        ),
        (  # as when a firewall blocks the connection
            "stage_process.start_stage",
            lambda args, token: start_stage(args, "00" * 32),
            r"stage . cannot connect to the engine at 127\.0\.0\.1:",
        ),
        (
            "stage_process.start_stage",
            lambda args, token: start_stage(args, "no token"),
            "stage . has ended with code 1 before it could load",
        ),
    ],
    ids=["cannot load", "other files", "other kernels", "another token", "ends at once"],
)
def test_a_stage_that_cannot_be_used_is_one_error(
    monkeypatch: pytest.MonkeyPatch, replaced: str, value: Callable[..., Any], message: str
) -> None:
    monkeypatch.setattr(f"kvik.{replaced}", value)
    with pytest.raises(ConfigError, match=message):
        LLM(**STAGES)


@pytest.mark.usefixtures("fresh")
def test_the_start_logs_where_each_process_runs(caplog: pytest.LogCaptureFixture) -> None:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    sizes = {"threads": 4, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    with caplog.at_level(logging.INFO, NOTES_LOG), LLM(**COMMON, **sizes):
        lines = sorted(one.getMessage() for one in caplog.records if one.name == NOTES_LOG)
    assert [line.partition(",")[0] for line in lines] == [
        *("rank 0 of 2: cpu", "rank 1 of 2: cpu", "stage 0 of 2: layers 0 to 2")
    ]
    assert "at 127.0.0.1" in lines[2] and ("cores" in lines[2]) == (cores >= 2)
