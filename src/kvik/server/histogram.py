"""Counts of values by size, as Prometheus reads them: cheap to add to, and never reset."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Of tokens in a request or a step; of seconds between tokens, to the first one, and of requests.
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
)
SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
FEW = (1, 2, 5, 10, 20, 50, 100)


class Histogram:
    """Args:
    bounds: upper bounds of the buckets, growing; one more takes what is larger than all.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, how many values are not larger)."""
        found, below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found
