"""Ctrl-C caught between steps."""

from __future__ import annotations

import signal
import threading

import pytest

from kvik.cli.interrupt import CatchInterrupt


def test_the_first_one_is_noted_and_the_second_one_raises() -> None:
    with CatchInterrupt() as interrupt:
        assert not interrupt.seen
        signal.raise_signal(signal.SIGINT)
        assert interrupt.seen
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handler_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CatchInterrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_catches_nothing() -> None:
    seen: list[object] = []

    def work() -> None:
        with CatchInterrupt() as interrupt:
            seen.append(interrupt.seen)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGINT) is before
