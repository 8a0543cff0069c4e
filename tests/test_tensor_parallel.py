"""What becomes of a group of processes when one is lost, and what is left of it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from helpers.engine_child import ranks_of
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams

pytestmark = needs_native

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM(device="cpu", threads=2, tensor_parallel_size=2, max_model_len=256) as made:
        yield made
    assert not ranks_of(os.getpid()), "a process outlives its engine"


def errors(llm: LLM, count: int = 1) -> set[str]:
    outputs = llm.generate(["Once upon a time"] * count, LONG)
    return {str(completion.error) for output in outputs for completion in output.outputs}


def test_a_lost_process_is_named(llm) -> None:
    assert errors(llm) == {"None"}
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGKILL)
    for _ in range(2):  # and again
        (error,) = errors(llm)
        assert "rank 1 has ended with signal 9" in error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_requests_end_when_a_process_is_lost_under_way(llm, number) -> None:
    (rank,) = ranks_of(os.getpid())
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

    monkeypatch.setattr("kvik.worker.worker.load_share", refuse)
    with pytest.raises(RuntimeError, match="no"):
        LLM(device="cpu", threads=2, tensor_parallel_size=2)
    assert not ranks_of(os.getpid())
