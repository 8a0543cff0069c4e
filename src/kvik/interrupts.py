"""Ctrl-C between steps, never inside one: books that are half written cannot be trusted after."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back until the block has ended; then it arrives as usual. A second one arrives
    at once, so that a block that hangs can still be left.

    Only the main thread receives signals, so elsewhere there is nothing to do.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    caught: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if caught:
            previous(number, frame)
        caught.append(frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        previous(signal.SIGINT, caught[0])
