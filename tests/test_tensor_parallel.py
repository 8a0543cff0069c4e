"""What becomes of a group of processes when one is lost, and what is left of it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams

pytestmark = needs_native

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def ranks() -> list[int]:
    """The processes that this one has started as ranks."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    command = file.read()
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if b"kvik.rank_process" in command and parent == os.getpid():
                found.append(int(name))
    return found


@pytest.fixture
def llm():
    with LLM(device="cpu", threads=2, tensor_parallel_size=2, max_model_len=256) as made:
        yield made
    assert not ranks(), "a process outlives its engine"


def errors(llm: LLM, count: int = 1) -> set[str]:
    outputs = llm.generate(["Once upon a time"] * count, LONG)
    return {str(completion.error) for output in outputs for completion in output.outputs}


def test_a_lost_process_is_named(llm) -> None:
    assert errors(llm) == {"None"}
    (rank,) = ranks()
    os.kill(rank, signal.SIGKILL)
    for _ in range(2):  # and again
        (error,) = errors(llm)
        assert "rank 1 has ended with signal 9" in error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_requests_end_when_a_process_is_lost_under_way(llm, number) -> None:
    (rank,) = ranks()
    threading.Timer(0.3, os.kill, (rank, number)).start()
    start = time.monotonic()
    found: set[str] = set()
    while found <= {"None"} and time.monotonic() < start + 10:
        found = errors(llm, 4)
    assert all("rank 1" in error for error in found - {"None"}) and found - {"None"}


def test_what_the_first_process_leaves_undone_is_never_taken_for_something_else(
    llm, monkeypatch
) -> None:
    """The others wait for it in one step: it must not meet them there in the next."""

    def interrupted(*_: object) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr("kvik.kernels.cpu.native.Native.replay", interrupted)
        (error,) = errors(llm)
        assert "interrupted" in error
    (error,) = errors(llm)
    assert "GroupLost" in error and "interrupted in the first" in error


def test_nothing_is_left_of_a_group_that_cannot_load(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("kvik.worker.worker.load_network", refuse)
    with pytest.raises(RuntimeError, match="no"):
        LLM(device="cpu", threads=2, tensor_parallel_size=2)
    assert not ranks()
