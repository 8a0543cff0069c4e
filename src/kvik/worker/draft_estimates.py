"""Estimates for the number of drafts: how likely they are accepted, and what they cost.

An acceptance rate is accepted / tried with counts that decay, plus a prior worth a few drafts, so
that requests without drafts yet have the rates of all requests.

Costs are measured by number of requests, of drafts checked, and of drafts made. Single measurements
are noisy, as other processes delay steps. So the time of a step without drafts is estimated by
about its median, and the cost of drafts by curves that one measurement moves only a little. The
curves are ratios to a step without drafts, so that they stay valid as contexts grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_Ids = NDArray[np.int64]
_Shares = NDArray[np.float64]

START = 0.6  # acceptance rate before any measurement
_SIBLING = 0.5  # rate of a second draft for a position, relative to that of the first
_PRIOR = 2.0  # weight of the rate of other requests, in drafts
_FADE = 0.9  # decay of a request's counts in each step: about ten steps count
_FADE_ALL = 0.95  # decay of the common counts in each step with drafts
_HIGHEST = 0.99
_LONG_AGO = 1000  # steps after which a count has decayed to nothing
_UNREAD = 8  # most steps with drafts that are not counted yet
_FADED = _FADE_ALL ** np.arange(_UNREAD - 1, -1, -1.0)
_HEAVIEST = 1e100  # weight of a count, far below overflow


class Acceptance:
    """Acceptance rates by request and by position among its drafts.

    A draft is tried if the one before it was accepted. The prior of a request's rates are those of
    all requests, and the prior of a deeper draft is the one before it, so few or old counts have
    little effect."""

    def __init__(self, max_num_seqs: int, parents: Sequence[int]) -> None:
        """
        Args:
            parents: of the newest token, -1, and then of each draft: 0 is that token, and draft i
                is i + 1. (-1, 0, 1, 2, ...) is a chain.
        """
        drafts = len(parents) - 1
        self._parents = np.array(parents[1:], np.int64)
        self._is_chain = list(parents) == list(range(-1, drafts))
        self._paths = np.eye(drafts)  # [drafts, drafts]: column i are draft i and those before it
        for i, parent in enumerate(parents[1:]):
            if parent:
                self._paths[:, i] += self._paths[:, parent - 1]
        self._priors = _priors(parents)
        # Newer counts weigh more, which equals a decay of the older ones.
        self._weight = 1.0  # of the newest
        self._passed = 0  # steps for which the counts have not decayed yet
        self._counts = np.zeros((max_num_seqs, 2, drafts))  # by slot: tried, accepted
        self._all = np.zeros((2, drafts))  # of all requests, likewise
        self._common = np.zeros(drafts)
        self._numbers = np.arange(drafts)
        # Steps that were observed and are not counted yet: their requests, and for each step its
        # weight, the number of drafts judged and which were accepted.
        self._slots, self._slot_bytes = np.zeros(0, np.int64), b""
        self._weights: list[float] = []
        self._judged: list[_Ids] = []
        self._right: list[NDArray[np.bool_]] = []
        self._find_common()

    def forget(self, slot: int) -> None:
        self._read()
        self._counts[slot] = 0.0

    def observe(self, slots: _Ids, drafts: _Ids, accepted: NDArray[np.bool_]) -> None:
        """Record a step with drafts.

        Args:
            slots, drafts: [rows], no slot twice; how many drafts were judged, the first ones.
            accepted: [rows, drafts], which of them were accepted.
        """
        self.passed()
        self._fade()
        if slots.tobytes() != self._slot_bytes or len(self._weights) == _UNREAD:
            self._read()
            self._slots, self._slot_bytes = slots, slots.tobytes()
        self._weights.append(self._weight)
        self._judged.append(drafts)
        self._right.append(accepted)

    def _read(self) -> None:
        """Count the observed steps, together: several steps of the same requests take little longer
        than one."""
        steps = len(self._weights)
        if not steps:
            return
        right, judged = np.concatenate(self._right), np.concatenate(self._judged)
        judged_and_right = np.empty((len(right), 2, len(self._numbers)))
        judged_and_right[:, 1] = right
        accepted = np.empty((len(right), 1 + len(self._numbers)), np.bool_)
        accepted[:, 0], accepted[:, 1:] = True, right
        np.logical_and(
            accepted.take(self._parents, axis=1),
            self._numbers < judged[:, None],
            out=judged_and_right[:, 0],
        )
        of_step = judged_and_right.reshape(steps, -1)
        shape = -1, 2, len(self._numbers)  # of the requests of a step
        self._counts[self._slots] += (np.array(self._weights) @ of_step).reshape(shape)
        self._all *= _FADE_ALL**steps
        self._all += (_FADED[-steps:] @ of_step).reshape(shape).sum(axis=0)
        for unread in (self._weights, self._judged, self._right):
            unread.clear()
        self._find_common()

    def passed(self, steps: int = 1) -> None:
        """Record steps without drafts."""
        self._passed += steps

    def _fade(self) -> None:
        """Decay the counts by the steps since the last call."""
        self._weight /= _FADE ** min(self._passed, _LONG_AGO)
        self._passed = 0
        if self._weight > _HEAVIEST:
            self._read()
            self._counts /= self._weight
            self._weight = 1.0

    def gains(self, slots: _Ids) -> _Shares:
        """Return the probability that each draft and all before it are accepted: [rows, drafts].

        It never rises along a row, so the best drafts are always the first ones."""
        self._fade()
        self._read()
        counts = self._counts[slots] / self._weight
        tried, right = counts[:, 0], counts[:, 1]
        # Acceptance of each request relative to the others, over all its drafts.
        better = (right.sum(axis=1) + _PRIOR) / (tried @ self._common + _PRIOR)
        shares = np.minimum(self._common * better[:, None], _HIGHEST)  # as a first guess
        counts += _PRIOR
        right += _PRIOR * (shares - 1.0)
        shares = np.minimum(right / tried, _HIGHEST)
        gains: _Shares
        if self._is_chain:  # the same, faster
            gains = np.multiply.accumulate(shares, axis=1)
        else:
            gains = np.minimum.accumulate(np.exp(np.log(shares) @ self._paths), axis=1)
        return gains

    def _find_common(self) -> None:
        shares: list[float] = [START]  # index -1: the prior of the first draft
        counts = zip(self._priors, *self._all.tolist(), strict=True)
        for (before, factor), tried, right in counts:
            shares.insert(-1, (right + _PRIOR * factor * shares[before]) / (tried + _PRIOR))
        self._common = np.array(shares[:-1])


def _priors(parents: Sequence[int]) -> list[tuple[int, float]]:
    """Return the prior of each draft: the draft whose rate it is (-1: `START`), and a factor."""
    last: dict[int, int] = {}
    priors = []
    for i, parent in enumerate(parents[1:]):
        priors.append((last[parent], _SIBLING) if parent in last else (parent - 1, 1.0))
        last[parent] = i
    return priors


# Costs of steps.


_RECENT = 25  # newest steps without drafts that are kept
_RATE = 0.1  # lowest share of a measurement's error by which a curve is corrected
_GUESS = 1.5  # weight of the initial guess in measurements, the first one included
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
                values[point] += share * error * max(_RATE, 1 / (weights[point] + _GUESS))
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
