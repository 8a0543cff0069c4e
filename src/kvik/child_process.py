"""How kvik starts child Python processes, and how long these live."""

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
from collections.abc import Sequence

GRACE_SECONDS = 2.0  # between the end of the parent and the end of the child, even a busy one
# Poll event of a socket whose peer has closed; without it, a local peer's end is still reported.
HANG_UP = getattr(select, "POLLRDHUP", 0)
LOOK_SECONDS = 0.25  # between two checks of a process
# A process sends five heartbeats a second, whatever it computes. At half this limit a machine that
# swaps would lose healthy processes; at twice, callers wait longer for a process that hangs.
SILENT_SECONDS = 10.0
BEGIN_SECONDS = 30.0  # until the first heartbeat: some tenths of a second, unless the disk is slow
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of kvik in a new Python process.

    The command has -P: nothing is imported from the current folder, which anyone may have written.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def live_with_parent(fd: int) -> None:
    """In the child: ignore the signals of a terminal, log to standard error, and exit after the
    socket `fd` to the parent has closed. A current folder that was deleted since the parent
    started is left, since torch's library MKL aborts there."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        os.getcwd()
    except OSError:
        os.chdir("/")
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()


def die_with_parent() -> None:
    """In the child, on Linux: have the system kill it when the thread that started it ends, even
    while it is stopped and cannot see that its socket has closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class StallTimer:
    """Measures for how long a number has not changed, from a look every `LOOK_SECONDS`.

    Only the time between regular looks counts, not the time in which the machine sleeps or the
    process that looks is stopped or late.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._last = self._seconds = 0.0

    def look(self, number: int, now: float, *, expected: bool = True) -> float:
        """Return the seconds since the number changed.

        Args:
            expected: whether the number should change now; if not, the count restarts.
        """
        if number != self._number or not expected:
            self._number, self._seconds = number, 0.0
        else:
            self._seconds += min(now - self._last, 2 * LOOK_SECONDS)
        self._last = now
        return self._seconds


class HeartbeatWatch:
    """Detects a process without heartbeats, from a look every `LOOK_SECONDS`."""

    def __init__(self, *, begins: bool = True) -> None:
        """
        Args:
            begins: whether the process is known to send heartbeats at all.
        """
        self._begins = begins
        self._still = StallTimer()

    def look(self, beats: int, now: float) -> str:
        """Return for how long the process has been silent, in words; "" within the limit."""
        seconds = self._still.look(beats, now)
        if not beats and not self._begins:
            return ""
        limit = SILENT_SECONDS if beats else BEGIN_SECONDS
        return f"has been silent for {seconds:.0f} s" if seconds >= limit else ""


def _end_with_parent(fd: int) -> None:
    """Exit after the parent: loading takes minutes and a kernel can hang, and both must end."""
    poll = select.poll()
    poll.register(fd, HANG_UP)
    poll.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def cores_of(size: int, among: Sequence[int] = ()) -> list[list[int]]:
    """Divide cores among `size` processes; [] each if there are too few, or the system does not
    say.

    Args:
        among: the cores to divide; (): those that this process may use.
    """
    cores = sorted(among or os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cores) < size:
        return [[] for _ in range(size)]
    return [cores[len(cores) * r // size : len(cores) * (r + 1) // size] for r in range(size)]
