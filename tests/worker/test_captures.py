"""How a CUDA graph is captured, as far as it can be seen without a GPU: what is begun on which
stream, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvik.worker.captures import CudaCapturer

USUAL, ASIDE = "usual", "aside"


class Device:
    """Notes what it is told, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.now = Stream(self, USUAL)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self, ASIDE))
        patch.setattr(torch.cuda, "current_stream", lambda: self.now)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def call(self) -> None:
        self.told.append(f"call on {self.now.name}")


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.told.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, device: Device) -> None:
        self.told = device.told

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        self.told.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.told.append("end")

    def replay(self) -> None:
        self.told.append("replay")


def test_what_warms_up_runs_where_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps memory for each stream by itself: on another one the first call would
    take as much again as a step, which the memory plan does not count. Only what is captured, in
    its own pool, is called there."""
    device = Device(monkeypatch)
    replay = CudaCapturer(torch.device("cuda")).capture(device.call)
    begin = "begin in pool, thread_local"
    aside = ["aside waits for usual", begin, "call on aside", "end", "usual waits for aside"]
    assert device.told == ["call on usual", *aside]
    replay()
    assert device.told[-1] == "replay"


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one may begin."""
    device = Device(monkeypatch)
    capturer = CudaCapturer(torch.device("cuda"))

    def call() -> None:
        device.call()
        if device.now.name == ASIDE:
            raise RuntimeError("it waits for the device")

    with pytest.raises(RuntimeError, match="it waits"):
        capturer.capture(call)
    assert device.told[-2:] == ["call on aside", "end"] and device.now.name == USUAL
    capturer.capture(device.call)
    assert device.told[-1] == "usual waits for aside"
