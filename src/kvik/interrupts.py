"""Handles Ctrl-C between steps, never inside one, where it would leave inconsistent state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Delay SIGINT until the end of the block. A second SIGINT arrives at once, so that a hanging
    block can be interrupted.

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
