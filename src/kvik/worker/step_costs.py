"""Measured costs of steps: by number of requests, of drafts checked, and of drafts made.

Single measurements are noisy, as other processes delay steps. So the time of a step without drafts
is estimated by about its median, and the cost of drafts by curves that one measurement moves only a
little. The curves are ratios to a step without drafts, so that they stay valid as contexts grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_RECENT = 25  # newest steps without drafts that are kept
_RATE = 0.1  # lowest share of a measurement's error by which a curve is corrected
_PRIOR = 1.5  # weight of the initial guess in measurements, the first one included
_FAR = 2.0  # a measurement counts as at most this many times what the curve says
_NEAR = 0.25  # or as at most this much more, where that is larger
_CLIP = 2.0  # the same bound, above and below, for the cost of a whole step
_ACCIDENTS = 3  # outliers in a row that count in full
_FORGET = 0.998  # decay of the curves towards their first value, in each step
_SLOPE = 0.5  # slope beyond the measurements, relative to the last measured one
_SHORTEST = 1e-9  # seconds; a coarse clock may measure 0


class StepCosts:
    """Estimates of the cost of steps with and without drafts."""

    def __init__(self, max_drafts: int, max_draft_rows: int) -> None:
        """
        Args:
            max_drafts: per request and step. max_draft_rows: of all requests in a step.
        """
        self._max_drafts, self._max_draft_rows = max_drafts, max_draft_rows
        self._plain: dict[int, _Plain] = {}  # by requests
        self._judging: dict[int, Curve] = {}  # by size of the batch: ratio by drafts in total
        self._making: dict[int, Curve] = {}  # by size of the batch: ratio by most per request
        self._excused: list[float] = []  # excess of the last steps with drafts that did not count

    def observe_plain(self, requests: int, seconds: float, steps: int = 1) -> None:
        """Record a step without drafts, the last of `steps` of them.

        If drafts do not pay off, nearly all steps are like this, so this only appends."""
        plain = self._plain.get(requests)
        if plain is None:
            plain = _Plain(self.judging(requests), self.making(requests))
            self._plain[requests] = plain
        plain.seconds.append(seconds)
        plain.ordered = None
        plain.judging.forgotten += steps
        plain.making.forgotten += steps

    def observe_drafts(
        self, requests: int, drafts: int, judging: float, requested: int, making: float
    ) -> float:
        """Record a step that checked drafts, after at most `requested` were made per request.

        Args:
            judging, making: times of the step and of making the drafts, relative to a step without
                drafts.

        Returns:
            The cost to charge: at most twice the expected one, as another process may have delayed
            the step. The third such step in a row is charged in full, together with the excess of
            the steps before it.
        """
        curve = self.judging(requests)
        curve.observe(drafts, judging)
        self.making(requests).observe(requested, making)
        expected = curve.at(drafts)
        if judging <= expected * _CLIP:
            self._excused.clear()
            return max(judging, expected / _CLIP)
        self._excused.append(judging - expected * _CLIP)
        if len(self._excused) < _ACCIDENTS:
            return expected * _CLIP
        counted = expected * _CLIP + sum(self._excused)
        self._excused = [0.0] * (_ACCIDENTS - 1)  # so further ones count until one is as expected
        return counted

    def num_plain(self, requests: int) -> int:
        """Return the number of measurements of a step without drafts."""
        measured = self._plain.get(requests)
        return 0 if measured is None else len(measured.seconds)

    def plain(self, requests: int) -> float | None:
        """Return seconds of a step without drafts; None if nothing is known."""
        measured = self._plain.get(requests)
        if measured is not None:
            return measured.middle()
        if not self._plain:
            return None
        sizes = sorted(self._plain)
        seconds = [self._plain[n].middle() for n in sizes]
        return float(np.interp(requests, sizes, seconds))

    def reach(self, requests: int) -> int:
        """Return the most drafts in a step whose cost is sufficiently known: twice the most
        measured, initially one per request."""
        return max(requests, 2 * self.judging(requests).max_drafts)

    def judging(self, requests: int) -> Curve:
        """Return the time of a step relative to one without drafts, by its drafts in total."""
        size = _size_of(requests)
        if size not in self._judging:
            self._judging[size] = Curve(1.0, self._max_draft_rows)
        return self._judging[size]

    def making(self, requests: int) -> Curve:
        """Return the relative time of making drafts, by the most per request."""
        size = _size_of(requests)
        if size not in self._making:
            self._making[size] = Curve(0.0, self._max_drafts)
        return self._making[size]


@dataclass(slots=True)
class _Plain:
    """Times of steps without drafts of one number of requests."""

    # judging, making: the curves of such batches.
    judging: Curve
    making: Curve
    # Of the last few steps.
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    ordered: list[float] | None = None  # the same sorted; None if it changed since

    def middle(self) -> float:
        """Return their 40th percentile: the median of a few may be too long, which would make
        drafts seem faster than they are."""
        if self.ordered is None:
            self.ordered = sorted(self.seconds)
        return max(self.ordered[2 * len(self.ordered) // 5], _SHORTEST)


class Curve:
    """A cost as a function of the number of drafts.

    It is linear between 0, 1, 2, 4, 8, ... drafts and never falls. A measurement moves the two
    points around it, each time by less; points beyond all measurements are extrapolated.
    """

    def __init__(self, first: float, max_drafts: int) -> None:
        """
        Args:
            first: the cost of no drafts, and of any number before the first measurement.
        """
        self._places = [0, *(1 << i for i in range((max_drafts - 1).bit_length() + 1))]
        self._values = [first] * len(self._places)
        self._weights = [0.0] * len(self._places)  # number of measurements
        self._heights = [first] * len(self._places)  # running maximum of the values
        self._axis = np.array(self._places, np.float64)
        self.max_drafts = 0  # largest number of drafts measured
        # Steps since the last decay. In each step the curve returns a little towards its first
        # value; otherwise a cost that looks too high to be tried would never be measured again.
        self.forgotten = 0

    def upto(self, drafts: int) -> NDArray[np.float64]:
        """Return the cost of each number of drafts: [drafts + 1]."""
        self._forget()
        return np.interp(np.arange(drafts + 1), self._axis, self._heights)

    def at(self, drafts: int) -> float:
        """Return the last value of `upto`, faster: most callers need only that one."""
        self._forget()
        return self._read(drafts)[0]

    def observe(self, drafts: int, cost: float) -> None:
        """Record a measurement."""
        self._forget()
        self.max_drafts = max(self.max_drafts, drafts)
        expected, above, part = self._read(drafts)
        values, weights = self._values, self._weights
        limited = min(cost, max(expected * _FAR, expected + _NEAR))
        error = (limited - expected) / ((1 - part) ** 2 + part**2)
        for point, share in ((above - 1, 1 - part), (above, part)):
            if point and share:
                values[point] += share * error * max(_RATE, 1 / (weights[point] + _PRIOR))
                weights[point] += share
        self._fade(above + 1, _FORGET)
        self._draw()

    def _read(self, drafts: int) -> tuple[float, int, float]:
        """Return the cost of a number of drafts, the point at or above it, and how far the number
        is from the point below to that one, 0 to 1."""
        places, heights = self._places, self._heights
        drafts = min(drafts, places[-1])
        above = max(1, bisect_left(places, drafts))
        part = (drafts - places[above - 1]) / (places[above] - places[above - 1])
        return (1 - part) * heights[above - 1] + part * heights[above], above, part

    def _forget(self) -> None:
        if self.max_drafts and self.forgotten:
            self._fade(1, _FORGET**self.forgotten)
            self._draw()
        self.forgotten = 0

    def _fade(self, start: int, factor: float) -> None:
        """Decay the points from `start` on towards the first value."""
        first = self._values[0]
        for i in range(start, len(self._values)):
            self._values[i] = first + (self._values[i] - first) * factor

    def _draw(self) -> None:
        """Extrapolate the points without measurements and update the heights."""
        places, values = self._places, self._values
        for i in range(2, len(places)):
            if not self._weights[i]:
                slope = (values[i - 1] - values[i - 2]) / (places[i - 1] - places[i - 2])
                values[i] = values[i - 1] + _SLOPE * max(0.0, slope) * (places[i] - places[i - 1])
        self._heights = list(accumulate(values, max))


def _size_of(requests: int) -> int:
    """Return the size class of a batch: exact for small batches, then in steps of an eighth."""
    shift = max(0, requests.bit_length() - 4)
    return requests >> shift << shift
