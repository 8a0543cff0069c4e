"""Failures and cleanup of a group that loses a process."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_child import ranks_of
from helpers.faults import errors_of, raising

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik has no native kernels here")

from kvik import LLM, SamplingParams
from kvik import child_process as watched
from kvik import rank_process as module
from kvik.errors import GroupLost
from kvik.kernels import torch_group
from kvik.kernels.cpu.group import Group
from kvik.kernels.torch_group import TorchGroup
from kvik.worker.group_pages import GroupPageMover

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("forked")]

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = LONG.with_changes(max_tokens=8)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "threads": 2,
    "tensor_parallel_size": 2,
    "max_model_len": 256,
}
AGAIN = "close this LLM and make a new one"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = shared_files()
    yield
    assert not ranks_of(os.getpid()), "a process outlives its engine"
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


JOINED = [  # by memory, and by torch
    {},
    {"kernels": "torch", "dtype": "float32"},
]
JOINED_NAMES = ["native", "torch"]


@pytest.fixture(params=JOINED, ids=JOINED_NAMES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**OPTIONS, **request.param) as made:
        yield made


def test_a_lost_process_is_named(llm: LLM) -> None:
    assert errors_of(llm, SHORT) == {"None"}
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    (error,) = errors_of(llm, LONG)
    assert "rank 1 has ended with signal 9" in error
    for _ in range(2):
        with pytest.raises(GroupLost, match=f"rank 1 has ended with signal 9: {AGAIN}"):
            llm.generate("Once", LONG)


def test_a_process_that_is_stopped_is_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "SILENT_SECONDS", 1.0)
    time.sleep(1.5)
    assert errors_of(llm, SHORT) == {"None"}, "one that has nothing to do is not silent"
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGSTOP)
    assert errors_of(llm, LONG, 3) == {"GroupLost: rank 1 has been silent for 1 s"}
    assert not ranks_of(os.getpid())
    with pytest.raises(GroupLost, match="rank 1 has been silent for 1 s"):
        llm.generate("Once", LONG)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_requests_end_when_a_process_is_lost_under_way(llm: LLM, number: int) -> None:
    (rank,) = ranks_of(os.getpid())
    threading.Timer(0.3, os.kill, (rank, number)).start()
    start = time.monotonic()
    found: set[str] = set()
    while found <= {"None"} and time.monotonic() < start + 10:
        found = errors_of(llm, LONG, 4)
    assert all("rank 1" in error for error in found - {"None"}) and found - {"None"}


def test_an_interrupted_step_is_never_taken_for_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in one step, which must not be confused with the next."""
    interrupted = raising(RuntimeError("interrupted"))
    with monkeypatch.context() as patch:
        patch.setattr("kvik.kernels.cpu.native.Native.replay", interrupted)
        patch.setattr("kvik.worker.graphs.Eager.run", interrupted)
        (error,) = errors_of(llm, LONG)
        assert "interrupted" in error
    with pytest.raises(GroupLost, match="rank 0 was interrupted"):
        llm.generate("Once", LONG)


@pytest.mark.full
@pytest.mark.parametrize("load", [False, True], ids=["stored", "loaded"])
@pytest.mark.parametrize("tiers", ["memory:64MiB", "disk:{folder}:1GiB"])
def test_a_process_that_is_lost_while_pages_move_leaves_nothing(
    tiers: str, load: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[5 + i] * 100 for i in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    kv_tiers = tiers.format(folder=tmp_path / "kv")
    copy, killed = GroupPageMover._copy, []

    def lose(mover: GroupPageMover, *args: Any, **options: Any) -> int:
        if options["load"] == load and not killed:
            killed.extend(ranks_of(os.getpid()))
            os.kill(killed[0], signal.SIGKILL)
        return copy(mover, *args, **options)

    threads = set(threading.enumerate())
    with LLM(**OPTIONS, num_blocks=18, kv_tiers=kv_tiers) as made:
        if load:
            for prompt in prompts:
                made.generate([prompt], sampling)
        monkeypatch.setattr(GroupPageMover, "_copy", lose)
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
    until = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads
    for page in (tmp_path / "kv").glob("*/*/*.kv"):
        assert page.name[0] != "."
    with LLM(**{**OPTIONS, "tensor_parallel_size": 1}, num_blocks=18, kv_tiers=kv_tiers) as again:
        found = [again.generate([prompt], sampling)[0].outputs[0] for prompt in prompts]
    with LLM(**{**OPTIONS, "tensor_parallel_size": 1}) as alone:
        right = [alone.generate([prompt], sampling)[0].outputs[0] for prompt in prompts]
    assert [each.token_ids for each in found] == [each.token_ids for each in right]


# During loading


@pytest.mark.parametrize("part", ["worker.worker.load_share", "launch.load_tokenizer"])
def test_nothing_is_left_of_a_group_that_cannot_load(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"kvik.{part}", raising(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        LLM(**OPTIONS)


def send_soon(number: int) -> None:
    """Send a signal to the next process that is started."""

    def send() -> None:
        while not (ranks := ranks_of(os.getpid())):
            time.sleep(0.001)
        os.kill(ranks[0], number)

    threading.Thread(target=send).start()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("joined", JOINED, ids=JOINED_NAMES)
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
        LLM(**OPTIONS, **joined)
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
        module, "python_command", lambda _, *numbers: (sys.executable, "-c", program, *numbers)
    )
    monkeypatch.setattr(TorchGroup, "digest", "the same")
    monkeypatch.setattr(Group, "digest", "the same")
    monkeypatch.setattr(torch_group, "EXCHANGE_SECONDS", 2.0)
    monkeypatch.setattr(module, "EXCHANGE_SECONDS", 2.0)
    monkeypatch.setattr(module, "END_SECONDS", 0.5)
    with LLM(**OPTIONS, kernels=kernels) as made:
        (error,) = errors_of(made, LONG)
        assert re.search(message, error)
        with pytest.raises(GroupLost, match=message):
            made.generate("Once", LONG)


BEATS_ALONE = """
import sys, time
from mmap import mmap
import numpy as np
from kvik.kernels.cpu.barrier import Barrier
beating = Barrier(np.frombuffer(mmap(int(sys.argv[2]), 0), np.uint8)).beat(1)
time.sleep(1000)
"""


def test_a_process_without_progress_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "python_command", lambda _, *numbers: (sys.executable, "-c", BEATS_ALONE, *numbers)
    )
    monkeypatch.setattr(module, "MIN_LOAD_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOAD_TIMES", 1.0)
    with pytest.raises(GroupLost, match=r"^rank 1 has not loaded in \d+ s, and rank 0 in \d+ s$"):
        LLM(**OPTIONS)
