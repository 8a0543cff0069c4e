"""The number of threads of the native kernels in each step, and when a step may begin.

While other processes keep the cores busy, the kernels shrink their team themselves
(`csrc/team_size.hpp`). If a cgroup grants less CPU time than the cores have, as a container's limit
does, steps alternate between more and fewer threads, and begin later if even that is too much.
Otherwise the system would stop the whole process until the end of its period.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from math import ceil, floor
from typing import TYPE_CHECKING

from kvik.config.hardware import cpu_quota, used_cpu_time

if TYPE_CHECKING:
    from kvik.kernels.cpu.native import Native

log = logging.getLogger(__name__)

LOG_INTERVAL = 60.0  # seconds
# Seconds of CPU time per granted core. Unused time is kept up to BURST; a step begins later if more
# than AHEAD was used in advance. Both are small compared to a period, which is usually 100 ms.
BURST, AHEAD = 0.01, 0.005
LONGEST_PAUSE = 0.1  # seconds; a caller that aborts a request waits for it


class EvenPace:
    """Spreads the CPU time that a cgroup grants evenly over the steps.

    Args:
        cores: granted CPU time, in cores.
        used: returns the seconds of CPU time used so far.
    """

    def __init__(
        self,
        cores: float,
        used: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cores = cores
        self._fewer, self._more = floor(cores), max(1, ceil(cores))
        self._used, self._clock, self._sleep = used, clock, sleep
        self._seen = clock(), used()
        self._began = clock()  # start of the last step
        self._unused = 0.0  # unused seconds of CPU time; negative: used in advance

    def next_threads(self) -> int:
        """Wait until the next step may begin. Returns the number of threads that it may use."""
        self._look()
        step, threads = self._seen[0] - self._began, self._more
        missing = -self._unused
        # If the wait is short compared to a step, wait and use all threads; else use fewer threads.
        if self._fewer == self._more or (self._fewer and missing > self._cores * step / 2):
            threads = self._fewer
            missing -= AHEAD * self._cores
        if missing > 0:
            self._sleep(min(LONGEST_PAUSE, missing / self._cores))
        self._began = self._clock()
        return threads

    def _look(self) -> None:
        then, before = self._seen
        try:
            self._seen = now, used = self._clock(), self._used()
        except (OSError, ValueError):  # the process was moved to another cgroup
            self._unused = 0.0
            return
        unused = self._unused + self._cores * (now - then) - (used - before)
        self._unused = min(unused, BURST * self._cores)


def pace_of(cores: float | None) -> EvenPace | None:
    """Return the pace for a quota; None: there is none."""
    if cores is None:
        return None
    _, file = cpu_quota()
    return EvenPace(cores, time.process_time if file is None else partial(used_cpu_time, file))


class Team:
    """The threads of the native kernels, as used by a worker.

    Args:
        max_threads: number of threads.
        pace: None: no quota.
        clock: in seconds.
    """

    def __init__(
        self,
        threads: Native,
        max_threads: int,
        pace: EvenPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads = threads
        self._max_threads = max_threads
        self._pace = pace
        self._clock = clock
        self._reported: int | None = None
        self._logged = (max_threads, -LOG_INTERVAL)  # threads, seconds

    def begin_step(self) -> None:
        """Keep to the quota; call this before each step."""
        if self._pace is not None:
            self._threads.limit(self._pace.next_threads())

    def changes(self) -> int | None:
        """Return the number of threads; None: it has not changed since the last call."""
        working = self._threads.working
        self._log(working)
        if working == self._reported:
            return None
        self._reported = working
        return working

    def _log(self, working: int) -> None:
        """Log a change, at most once per LOG_INTERVAL: kernels often try more threads briefly."""
        threads, since = self._logged
        now = self._clock() if working != threads else since
        if working == threads or now - since < LOG_INTERVAL:
            return
        self._logged = working, now
        reason = (
            "other processes keep cores busy"
            if working < self._max_threads
            else "the cores are free"
        )
        log.info("%d of %d threads compute: %s", working, self._max_threads, reason)
