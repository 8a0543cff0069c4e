"""Handles Ctrl-C between steps, never inside one, where it would leave inconsistent state; and
handles other ways to end the process like Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Treat every signal that ends the process or its terminal like Ctrl-C: resources are cleaned
    up, and measurements so far are printed. An ignored signal (`nohup`) stays ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _as_ctrl_c)
    try:
        with _blocked_interrupt() if ignored else nullcontext():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _blocked_interrupt() -> Iterator[None]:
    """Block Ctrl-C for a background job, which ignores it. An event loop ends its tasks in order
    only if SIGINT has its usual handler; so the handler is set, and SIGINT is blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this also discards pending signals
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # possibly an event loop's
    assert callable(handler)
    handler(signal.SIGINT, frame)
