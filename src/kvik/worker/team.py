"""How many threads of the native kernels compute in each step, and when a step may begin.

While other processes keep the cores busy the kernels shrink their team themselves
(`csrc/team_size.hpp`). Where a cgroup grants less CPU time than the cores have, as a container's
limit does, steps take turns on more and on fewer threads, and begin later where even that is too
much: the system would stop the whole process until the end of its period.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from math import ceil, floor
from typing import Protocol

from kvik.config.hardware import cpu_quota, used_cpu_time

log = logging.getLogger(__name__)

LOG_INTERVAL = 60.0  # seconds
# Seconds of CPU time for each core granted. Unused time is kept up to BURST; a step begins later if
# more than AHEAD was used in advance. Both are small beside a period, which is mostly 100 ms.
BURST, AHEAD = 0.01, 0.005
LONGEST_PAUSE = 0.1  # seconds; who aborts a request waits for it


class EvenPace:
    """Spreads the CPU time that a cgroup grants evenly over the steps.

    Args:
        cores: cores' worth of time that is granted.
        used: returns the seconds of CPU time that were used.
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
        self._began = clock()  # the step before
        self._left = 0.0  # seconds of CPU time

    def next_threads(self) -> int:
        """Wait until the next step may begin. Returns the threads that it may have."""
        self._look()
        step, threads = self._seen[0] - self._began, self._more
        missing = -self._left
        # A wait is worth all threads if it is short beside a step; else fewer of them catch up.
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
            self._left = 0.0
            return
        left = self._left + self._cores * (now - then) - (used - before)
        self._left = min(left, BURST * self._cores)


def pace_of(cores: float | None) -> EvenPace | None:
    """Return the pace for a quota; None: there is none."""
    if cores is None:
        return None
    _, file = cpu_quota()
    return EvenPace(cores, time.process_time if file is None else partial(used_cpu_time, file))


class Threads(Protocol):
    """What of the native kernels a `Team` watches and limits."""

    @property
    def working(self) -> int: ...

    def limit(self, threads: int) -> None: ...


class Team:
    """The threads of the native kernels as a worker sees them.

    Args:
        most: threads that there are.
        pace: None: no quota.
        clock: seconds.
    """

    def __init__(
        self,
        threads: Threads,
        most: int,
        pace: EvenPace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads = threads
        self._most = most
        self._pace = pace
        self._clock = clock
        self._told: int | None = None
        self._logged = (most, -LOG_INTERVAL)  # threads, seconds

    def begin_step(self) -> None:
        """Before each step: keep to the quota."""
        if self._pace is not None:
            self._threads.limit(self._pace.next_threads())

    def changes(self) -> int | None:
        """Return the number of threads, or None if it is as at the last call."""
        working = self._threads.working
        self._log(working)
        if working == self._told:
            return None
        self._told = working
        return working

    def _log(self, working: int) -> None:
        """Trials of more threads come and go: at most one line in LOG_INTERVAL."""
        threads, since = self._logged
        now = self._clock() if working != threads else since
        if working == threads or now - since < LOG_INTERVAL:
            return
        self._logged = working, now
        why = "other processes keep cores busy" if working < self._most else "the cores are free"
        log.info("%d of %d threads compute: %s", working, self._most, why)
