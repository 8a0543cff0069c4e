"""Ctrl-C is deferred, then delivered."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from kvik.interrupts import deferred_interrupt

pytestmark = pytest.mark.usefixtures("default_sigint")


def test_the_block_is_finished_first():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # time enough for a handler to run
            pass
        done.append(True)
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_not_deferred():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            reached.append(True)
    assert reached == [True]


def test_nothing_happens_without_an_interrupt():
    with deferred_interrupt():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_takes_precedence_over_an_interrupt():
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_are_not_affected():
    seen = []

    def work() -> None:
        with deferred_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
