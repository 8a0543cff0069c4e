"""Ctrl-C between steps, never inside one: books that are half written cannot be trusted after. And
other ways to be ended, which are to lose no more than it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Treat every request to end the process, also with its terminal, like Ctrl-C: what was
    started is cleaned up, what was measured is printed. A signal that is ignored (`nohup`) stays
    so."""
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
    """A job in the background ignores Ctrl-C, which is not for it. But an event loop ends its tasks
    in order only where Ctrl-C has its usual handler. So it has, and what the terminal sends is kept
    from it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this also forgets what was sent
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # an event loop's own, perhaps
    assert callable(handler)
    handler(signal.SIGINT, frame)
