"""What steps cost, as measured: by requests, by drafts that are judged, by drafts that are made.

Any single step may take any time, as a machine has other things to do. So steps without drafts are
known by about their median, and what drafts cost by curves that no measurement moves far. Those are
kept as ratios to a step without drafts, so that both may change together as the texts grow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_RECENT = 25  # steps without drafts that count
_RATE = 0.1  # of a curve, at least: how far it follows a measurement
_PRIOR = 1.5  # measurements that the guess before the first counts for, the first one included
_FAR = 2.0  # a measurement counts as at most this many times what the curve says
_NEAR = 0.25  # or as so much more
_CLIP = 2.0  # the same bound, above and below, for a whole step
_ACCIDENTS = 3  # in a row are none
_FORGET = 0.998  # of what is known of drafts, in each step
_SLOPE = 0.5  # more drafts cost half of what the last ones did, until they are measured
_SHORTEST = 1e-9  # seconds, if a clock says that there were none


class StepCosts:
    def __init__(self, max_drafts: int, max_draft_rows: int) -> None:
        """
        Args:
            max_drafts: of a request in a step. max_draft_rows: of all requests.
        """
        self._max_drafts, self._max_draft_rows = max_drafts, max_draft_rows
        self._plain: dict[int, _Plain] = {}  # by requests
        self._judging: dict[int, _Curve] = {}  # by size of the batch: ratios by drafts in all
        self._making: dict[int, _Curve] = {}  # likewise, by most drafts of a request
        self._excused: list[float] = []  # of the last steps with drafts, what did not count

    def observe_plain(self, requests: int, seconds: float, steps: int = 1) -> None:
        """A step without drafts, the last of `steps`. Nearly all are, where drafts do not pay: it
        is only noted."""
        found = self._plain.get(requests)
        if found is None:
            found = _Plain(self._judging_of(requests), self._making_of(requests))
            self._plain[requests] = found
        found.seconds.append(seconds)
        found.ordered = None
        found.judging.forgotten += steps
        found.making.forgotten += steps

    def observe_drafts(
        self, requests: int, drafts: int, judging: float, asked: int, making: float
    ) -> float:
        """A step that judged drafts, after at most `asked` were made for a request.

        Args:
            judging, making: times of the step and of making the drafts, over a step without.

        Returns:
            What the step counts as: at most twice what was expected then, as something else may
            have held it up. The third such step in a row was no accident: it counts in full, with
            what did not count before.
        """
        curve = self._judging_of(requests)
        curve.observe(drafts, judging)
        self._making_of(requests).observe(asked, making)
        expected = curve.at(drafts)
        if judging <= expected * _CLIP:
            self._excused.clear()
            return max(judging, expected / _CLIP)
        self._excused.append(judging - expected * _CLIP)
        if len(self._excused) < _ACCIDENTS:
            return expected * _CLIP
        counted = expected * _CLIP + sum(self._excused)
        self._excused = [0.0] * (_ACCIDENTS - 1)  # this goes on until one is as expected
        return counted

    def observe_making(self, requests: int, asked: int, making: float) -> None:
        """Likewise, but no drafts were found."""
        self._making_of(requests).observe(asked, making)

    def num_plain(self, requests: int) -> int:
        """Measurements of a step without drafts."""
        measured = self._plain.get(requests)
        return 0 if measured is None else len(measured.seconds)

    def plain(self, requests: int) -> float | None:
        """Return seconds of a step without drafts; None if nothing is known."""
        measured = self._plain.get(requests)
        if measured is not None:
            return measured.middle()
        if not self._plain:
            return None
        known = sorted(self._plain)
        seconds = [self._plain[n].middle() for n in known]
        return float(np.interp(requests, known, seconds))

    def judging(self, requests: int, drafts: int) -> NDArray[np.float64]:
        """Of a step over one without drafts: [drafts + 1], for each number of them up to it."""
        return self._judging_of(requests).upto(drafts)

    def making(self, requests: int, drafts: int) -> NDArray[np.float64]:
        """Of making at most this many drafts for a request, likewise."""
        return self._making_of(requests).upto(drafts)

    def judging_at(self, requests: int, drafts: int) -> float:
        """Return the last of `judging`."""
        return self._judging_of(requests).at(drafts)

    def making_at(self, requests: int, drafts: int) -> float:
        """Return the last of `making`."""
        return self._making_of(requests).at(drafts)

    def reach(self, requests: int) -> int:
        """Most drafts in a step whose cost is more than a guess: twice what was measured, at first
        as many as there are requests."""
        return max(requests, 2 * self._judging_of(requests).most)

    def _judging_of(self, requests: int) -> _Curve:
        size = _size_of(requests)
        if size not in self._judging:
            self._judging[size] = _Curve(1.0, self._max_draft_rows)
        return self._judging[size]

    def _making_of(self, requests: int) -> _Curve:
        size = _size_of(requests)
        if size not in self._making:
            self._making[size] = _Curve(0.0, self._max_drafts)
        return self._making[size]


@dataclass(slots=True)
class _Plain:
    """Steps without drafts of one number of requests.

    Attributes:
        judging, making: the curves of such batches.
        seconds: of the last few steps.
        ordered: the same in order, where anybody asked for it since.
    """

    judging: _Curve
    making: _Curve
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    ordered: list[float] | None = None

    def middle(self) -> float:
        """About their median: a little below, as that of a few may be too long, and drafts would
        seem to gain what they do not."""
        if self.ordered is None:
            self.ordered = sorted(self.seconds)
        return max(self.ordered[2 * len(self.ordered) // 5], _SHORTEST)


class _Curve:
    """A cost by a number of drafts: straight between 0, 1, 2, 4, 8, ... drafts, and never falling.
    A measurement moves the two points around it, less and less; points beyond all measurements
    are guessed.

    Attributes:
        most: drafts that were measured.
        forgotten: steps since, in each of which what is known gives way a little to the first
            guess: a cost that looks too high to be tried would never be measured again.
    """

    def __init__(self, first: float, most: int) -> None:
        """
        Args:
            first: the cost of no drafts, and of any as long as nothing was measured.
        """
        self._places = [0, *(1 << i for i in range((most - 1).bit_length() + 1))]
        self._values = [first] * len(self._places)
        self._weights = [0.0] * len(self._places)  # measurements
        self._heights = [first] * len(self._places)  # what the values say
        self._axis = np.array(self._places, np.float64)
        self.most = 0
        self.forgotten = 0

    def upto(self, drafts: int) -> NDArray[np.float64]:
        """[drafts + 1], what each number of them costs."""
        self._forget()
        return np.interp(np.arange(drafts + 1), self._axis, self._heights)

    def at(self, drafts: int) -> float:
        """Return the last of `upto`: most of what is asked is one number."""
        self._forget()
        return self._read(drafts)[0]

    def observe(self, drafts: int, cost: float) -> None:
        self._forget()
        self.most = max(self.most, drafts)
        expected, above, part = self._read(drafts)
        values, weights = self._values, self._weights
        near = min(cost, max(expected * _FAR, expected + _NEAR))
        error = (near - expected) / ((1 - part) ** 2 + part**2)
        for point, share in ((above - 1, 1 - part), (above, part)):
            if point and share:
                values[point] += share * error * max(_RATE, 1 / (weights[point] + _PRIOR))
                weights[point] += share
        self._fade(above + 1, _FORGET)
        self._draw()

    def _read(self, drafts: int) -> tuple[float, int, float]:
        """Return what a number of drafts costs; the point at or above it; the share of the way to
        it from the one below."""
        places, heights = self._places, self._heights
        drafts = min(drafts, places[-1])
        above = max(1, bisect_left(places, drafts))
        part = (drafts - places[above - 1]) / (places[above] - places[above - 1])
        return (1 - part) * heights[above - 1] + part * heights[above], above, part

    def _forget(self) -> None:
        if self.most and self.forgotten:
            self._fade(1, _FORGET**self.forgotten)
            self._draw()
        self.forgotten = 0

    def _fade(self, start: int, factor: float) -> None:
        """Of points that were not measured now."""
        first = self._values[0]
        for i in range(start, len(self._values)):
            self._values[i] = first + (self._values[i] - first) * factor

    def _draw(self) -> None:
        places, values = self._places, self._values
        for i in range(2, len(places)):
            if not self._weights[i]:
                slope = (values[i - 1] - values[i - 2]) / (places[i - 1] - places[i - 2])
                values[i] = values[i - 1] + _SLOPE * max(0.0, slope) * (places[i] - places[i - 1])
        self._heights = list(accumulate(values, max))


def _size_of(requests: int) -> int:
    """Batches that are distinguished: all small ones, then in steps of an eighth."""
    shift = max(0, requests.bit_length() - 4)
    return requests >> shift << shift
