"""How a CUDA graph is captured, as far as it can be seen without a GPU: what is begun on which
stream and when, and what torch believes after a capture that failed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvik.worker.captures import CapturePeers, CudaCapturer, NotCaptured

USUAL, ASIDE = "usual", "aside"
GPU = torch.device("cuda", 1)
Pool = tuple[int, int]


class Device:
    """Notes what it is told, in order, and counts as torch's allocator does (its `PrivatePool` and
    `captures_underway`).

    Attributes:
        breaks: what fails in a capture: "call", "invalid" (what cannot be captured was called, so
            that the stream's capture ends with an error), "begin", "instantiate" or "replay".
        pools: graphs of each, and captures into it.
        free: bytes.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.breaks = ""
        self.now = Stream(self, USUAL)
        self.pools: dict[Pool, int] = {}
        self.underway: set[Pool] = set()
        self.drawing = True  # random numbers, outside captures
        self.free = 1000
        self.handles = 0
        for name, value in {
            "Stream": lambda device: Stream(self, ASIDE),
            "current_stream": lambda: self.now,
            "stream": self.stream,
            "graph_pool_handle": self.handle,
            "CUDAGraph": lambda: Graph(self),
            "mem_get_info": lambda device: (self.free, 9999),
            "default_generators": (None, Numbers(self)),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def handle(self) -> Pool:
        self.handles += 1
        return (0, self.handles)

    def begin(self, pool: Pool) -> None:
        if self.pools.get(pool) == 0 or pool in self.underway:
            raise RuntimeError("INTERNAL ASSERT FAILED")
        self.pools[pool] = self.pools.get(pool, 0) + 1
        self.underway.add(pool)

    def end(self, index: int, pool: Pool) -> None:
        if index != GPU.index or pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, index: int, pool: Pool) -> None:
        self.pools[pool] -= 1
        assert index == GPU.index and self.pools[pool] >= 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def call(self) -> None:
        self.told.append(f"call on {self.now.name}")
        if self.now.name == ASIDE and self.breaks in ("call", "invalid"):
            raise ValueError("it waits for the device")


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.told.append(f"{self.name} waits for {other.name}")


class Numbers:
    def __init__(self, device: Device) -> None:
        self.device = device

    def clone_state(self) -> Numbers:
        return Numbers(self.device)

    def graphsafe_set_state(self, state: Numbers) -> None:
        self.device.drawing = True


class Graph:
    """As torch's, in the order in which it tells its allocator and generators."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ended = False

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        self.device.told.append(f"begin in {pool[1]}, {capture_error_mode}")
        self.pool, self.device.drawing = pool, False
        self.device.begin(pool)
        if self.device.breaks == "begin":
            raise RuntimeError("operation not permitted")

    def capture_end(self) -> None:
        self.device.told.append("end")
        if self.device.breaks == "invalid":
            raise RuntimeError("operation failed due to a previous error during capture")
        self.device.end(1, self.pool)
        self.device.drawing = self.ended = True
        if self.device.breaks == "instantiate":
            raise RuntimeError("out of memory")
        self.device.free -= 30

    def replay(self) -> None:
        self.device.told.append("replay")
        if self.device.breaks == "replay":
            raise RuntimeError("out of memory")
        self.device.free -= 4

    def reset(self) -> None:
        if self.ended:
            self.device.release(1, self.pool)
            self.ended = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_the_warm_up_call_runs_on_the_stream_of_steps(device: Device) -> None:
    """The allocator keeps memory for each stream by itself: on another one the first call would
    take as much again as a step, which the memory plan does not count. Only what is captured, in
    its own pool, is called there. The first launch, which takes memory too, is made at once."""
    captured = CudaCapturer(GPU).capture(device.call)
    aside = ["aside waits for usual", "begin in 1, thread_local", "call on aside", "end"]
    assert device.told == ["call on usual", *aside, "usual waits for aside", "replay"]
    assert (captured.size, captured.free) == (34, 966)  # the launch included
    captured.replay()
    assert device.told[-1] == "replay"


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("breaks", ["call", "invalid", "begin", "instantiate", "replay"])
def test_a_capture_that_fails_leaves_nothing_behind(
    device: Device, breaks: str, before: int
) -> None:
    """Wherever it fails: memory can be given back, the next one may begin, and graphs that were
    captured before keep their pool."""
    capturer = CudaCapturer(GPU)
    kept = [capturer.capture(device.call) for _ in range(before)]
    device.breaks = breaks
    with pytest.raises((NotCaptured, RuntimeError)) as error:
        capturer.capture(device.call)
    if breaks == "replay":
        assert type(error.value) is RuntimeError
    else:
        wanted = ValueError if breaks in ("call", "invalid") else RuntimeError
        assert type(error.value.__cause__) is wanted, "the cause, not its consequences"
    assert device.underway == set() and device.drawing and device.now.name == USUAL
    assert list(device.pools.values()) == [before]
    device.breaks = ""
    kept.append(capturer.capture(device.call))
    assert sum(device.pools.values()) == len(kept) and device.underway == set()


def test_nothing_is_replayed_if_another_process_cannot_capture(device: Device) -> None:
    class Peers(CapturePeers):
        def agree(self, done: bool) -> bool:
            device.told.append(f"agree {done}")
            return False

    with pytest.raises(NotCaptured, match="another process"):
        CudaCapturer(GPU).capture(device.call, Peers())
    assert device.told[-2:] == ["usual waits for aside", "agree True"]
    assert device.underway == set() and list(device.pools.values()) == [0]
    device.breaks = "call"
    with pytest.raises(NotCaptured):
        CudaCapturer(GPU).capture(device.call, Peers())
    assert device.told[-1] == "agree False"


def test_an_interrupt_is_not_taken_for_a_failure(device: Device) -> None:
    def interrupted() -> None:
        device.call()
        if device.now.name == ASIDE:
            device.breaks = "invalid"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaCapturer(GPU).capture(interrupted)
    assert device.underway == set()


def test_no_garbage_is_collected_within_a_capture(device: Device) -> None:
    """A graph in it, of an engine that was closed, would be destroyed there."""
    seen: list[tuple[str, bool]] = []

    def call() -> None:
        seen.append((device.now.name, gc.isenabled()))

    assert gc.isenabled()
    CudaCapturer(GPU).capture(call)
    assert seen == [(USUAL, True), (ASIDE, False)] and gc.isenabled()
    gc.disable()
    try:
        CudaCapturer(GPU).capture(call)
        assert not gc.isenabled()  # as its caller wished
    finally:
        gc.enable()


def test_all_of_an_engine_share_a_pool(device: Device) -> None:
    capturer = CudaCapturer(GPU)
    kept: list[Any] = [capturer.capture(device.call) for _ in range(3)]
    assert device.pools == {(0, 1): len(kept)}


def test_other_processes_do_not_make_a_capture_free(device: Device) -> None:
    def call() -> None:
        device.free += 500

    assert CudaCapturer(GPU).capture(call).size == 0
