"""How kvik starts a Python process of its own, and how such a process lives."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time

GRACE_SECONDS = 2.0  # between the parent's end and ours, whatever we are at
# What a poll reports of a socket whose other end has gone; on one machine it is reported anyway.
HANG_UP = getattr(select, "POLLRDHUP", 0)
LOOK_SECONDS = 0.25  # between two looks at a process
# A process beats five times a second, whatever it computes. At half of this a machine that swaps
# would lose healthy ones; at twice, callers wait longer for what will not come.
SILENT_SECONDS = 10.0
BEGIN_SECONDS = 30.0  # until its first beat: some tenths of one, unless the disk is slow
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of kvik in a new Python process.

    With -P, so that files of the current folder, which anyone may have written, are not imported.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def live_with_parent(fd: int) -> None:
    """Of the child: ignore what ends the programs of a terminal, log to the standard error, and end
    after the socket `fd` to the parent has closed."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()


def die_with_parent() -> None:
    """Of the child: be killed when the thread that started it ends, where the system can do so,
    also while it is stopped and does not see that its socket has closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Stillness:
    """For how long a number has not changed, as one sees who looks every `LOOK_SECONDS`.

    Time counts only while somebody looks: not what passes while the machine sleeps, or while the
    process that looks is stopped or late itself.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._last = self._seconds = 0.0

    def look(self, number: int, now: float, *, expected: bool = True) -> float:
        """Return the seconds since the number changed.

        Args:
            expected: whether it is expected to; else nothing counts.
        """
        if number != self._number or not expected:
            self._number, self._seconds = number, 0.0
        else:
            self._seconds += min(now - self._last, 2 * LOOK_SECONDS)
        self._last = now
        return self._seconds


class Pulse:
    """Whether a process beats, as one sees who looks every `LOOK_SECONDS`."""

    def __init__(self, *, begins: bool = True) -> None:
        """
        Args:
            begins: whether it is known to beat at all.
        """
        self._begins = begins
        self._still = Stillness()

    def look(self, beats: int, now: float) -> str:
        """Return for how long it has been silent, in words, if that is too long; else ""."""
        seconds = self._still.look(beats, now)
        if not beats and not self._begins:
            return ""
        limit = SILENT_SECONDS if beats else BEGIN_SECONDS
        return f"has been silent for {seconds:.0f} s" if seconds >= limit else ""


def _end_with_parent(fd: int) -> None:
    """Loading takes minutes and a kernel can hang: neither may outlive the parent."""
    poll = select.poll()
    poll.register(fd, HANG_UP)
    poll.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)
