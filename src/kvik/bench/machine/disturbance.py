"""Whether other processes took the cores while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

OTHERS = 0.05  # of the cores' time that other processes may take
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Watch:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()

    def others(self) -> float:
        """The share of all cores' time that other processes have taken since; 0 where the system
        does not tell."""
        elapsed = time.perf_counter() - self._started
        foreign = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        # one tick of the clock may be counted on the wrong side
        return max(0.0, foreign - TICK) / (elapsed * (os.cpu_count() or 1))

    def remarks(self) -> tuple[str, ...]:
        """The same as a warning beside results, if it matters."""
        words = disturbance(self.others())
        return (f"Warning: {words}.",) if words else ()


def disturbance(others: float) -> str:
    """What a reader must know of the share that other processes took; "" if it does not matter."""
    if others <= OTHERS:
        return ""
    return (
        f"other processes took {others:.0%} of the cores meanwhile: measure again when it is quiet"
    )


def undisturbed(seconds: Iterable[float]) -> float:
    """The median of the faster half of some samples: what disturbs only ever makes them longer."""
    ordered = sorted(seconds)
    return median(ordered[: -(-len(ordered) // 2)])


def busy_seconds() -> float:
    """CPU seconds of all processes of the machine, this one included; own ones where unknown."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return own_seconds()
    return (sum(fields[:3]) + sum(fields[5:8])) * TICK  # without idle, waiting and guests


def own_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
