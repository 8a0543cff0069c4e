"""How many drafts each request gets: as many as make the batch fastest, and none if none do.

The choice is that of the largest goodput (Liu et al. 2024, 2406.14066): each draft adds, with the
likelihood that it and all before it are accepted, a token to its step, and it costs what was
measured. Estimates may be wrong, so there is an account beside them, in steps without drafts. It
is paid what drafts gained in fact, but for what may have held a step up, and a small allowance for
every step; as long as it is empty there are no drafts at all. Trying again after drafts failed is
paid from it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvik.worker.acceptance import Acceptance
from kvik.worker.step_costs import StepCosts

_Ids = NDArray[np.int64]

ALLOWANCE = 0.008  # share of all steps that drafts may cost
_START, _MOST, _LEAST = 1.0, 3.0, -1.5  # of the account
_WORTH, _KEEP = 1.04, 1.02  # speed-up for which drafts begin, and go on
_LEARN = 6  # steps without drafts at first
_OFTEN, _LONGEST = 3, 32  # steps with drafts until one without is measured again, least and most
_PROBE = 2  # drafts for one request, to see how they fare
_SAME = 8  # times in a row that it is the same request: a drafter may have to read its text first
_PAUSE, _LONGEST_PAUSE = 8, 64  # steps until it is considered again whether drafts are worth it
_SURPRISE = 2.0  # a step so many times longer than expected, or shorter, is looked into


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step, and the making of the drafts that it judged.

    Attributes:
        slots, drafts, accepted: [rows], of all requests that sampled; drafts judged and accepted.
        seconds: of the step, without making drafts.
        making: seconds of making the drafts, also if there were none to be found.
        asked: most drafts of a request that were asked for; 0: the drafter was left alone.
        pure: no request was reading its prompt, so the time is the decoding requests' own.
        paths: [rows, most drafts of a request], which drafts were accepted if they form a tree;
            None: the first ones.
    """

    slots: _Ids
    drafts: _Ids
    accepted: _Ids
    seconds: float
    making: float
    asked: int
    pure: bool
    paths: NDArray[np.bool_] | None = None


class DraftControl:
    """Attributes:
    account: what drafts have gained, in steps without drafts; bounded both ways.
    """

    def __init__(self, max_num_seqs: int, max_drafts: int, max_draft_rows: int) -> None:
        """
        Args:
            max_drafts: of a request. max_draft_rows: of all requests, in one step.
        """
        self.account = _START
        self._acceptance = Acceptance(max_num_seqs, range(-1, max_drafts))
        self._max_num_seqs = max_num_seqs
        self._costs = StepCosts(max_drafts, max_draft_rows)
        self._max_draft_rows = max_draft_rows
        self._numbers = np.arange(max_drafts)
        self._drafting = False  # so did the last step
        self._without = 0  # steps with drafts since the last one without
        self._longest = _OFTEN  # of those until the next one without
        self._pause = 0  # steps until drafts are considered again
        self._next_pause = _PAUSE
        self._turn = 0  # whose turn it is to try

    def follow(self, parents: Sequence[int]) -> None:
        """Drafts form a tree, of which requests get the first nodes.

        Args:
            parents: of all nodes, -1 for the root; at most as many drafts as a request gets.
        """
        self._acceptance = Acceptance(self._max_num_seqs, parents)
        self._numbers = np.arange(len(parents) - 1)

    def enter(self, slot: int) -> None:
        """A request of which nothing is known. It may be a better one to guess at: a long pause
        becomes a short one, not none, as many short requests would leave no rest at all."""
        self._acceptance.forget(slot)
        self._pause = min(self._pause, _PAUSE)

    def rest(self) -> bool:
        """Whether nobody gets drafts after the step that was just computed, whatever it tells, so
        that it need not be observed: a small model takes less time than that. It had none."""
        if self._drafting or not (self._pause or self.account <= 0):
            return False
        self._pause = max(0, self._pause - 1)
        self._acceptance.passed()
        self.account = min(self.account + ALLOWANCE, _MOST)
        return True

    def observe(self, step: StepFigures) -> None:
        drafts = int(step.drafts.sum())
        self._drafting = drafts > 0
        if drafts:
            paths = step.paths
            if paths is None:
                paths = self._numbers < step.accepted[:, None]
            self._acceptance.observe(step.slots, step.drafts, paths)
        else:
            self._acceptance.passed()
        gain = ALLOWANCE
        if step.pure:
            gain += self._gain(step, drafts) if drafts else -self._in_vain(step)
        self.account = min(max(self.account + gain, _LEAST), _MOST)

    def _gain(self, step: StepFigures, drafts: int) -> float:
        """What drafts brought, in steps without."""
        requests = len(step.slots)
        plain = self._costs.plain(requests)
        if plain is None:
            return 0.0
        ratio = step.seconds / plain
        time = self._costs.observe_drafts(requests, drafts, ratio, step.asked, step.making / plain)
        self._without += 1
        expected = float(self._costs.judging(requests, drafts)[-1])
        if not expected / _SURPRISE < ratio < expected * _SURPRISE:
            self._without = self._longest  # perhaps a step without drafts has changed as well
        return 1.0 + int(step.accepted.sum()) / requests - time

    def _in_vain(self, step: StepFigures) -> float:
        """What it took to find no drafts, if any were asked for."""
        requests = len(step.slots)
        self._costs.observe_plain(requests, step.seconds)
        self._without = 0
        plain = self._costs.plain(requests)
        assert plain is not None
        return min(1.0, step.making / plain)

    def plain_seconds(self, requests: int) -> float | None:
        """Of a step without drafts; None if nothing is known."""
        return self._costs.plain(requests)

    def limits(self, slots: _Ids, room: _Ids) -> _Ids:
        """How many drafts each request gets for its next step.

        Args:
            slots: [rows], all requests that decode in it.
            room: [rows], most drafts each may get, 0 for none.
        """
        requests = len(slots)
        none = np.zeros(requests, np.int64)
        if self._costs.num_plain(requests) < _LEARN and not self._drafting:
            return none
        if self.account <= 0 or self._without >= self._longest:
            return none
        if self._pause:
            self._pause -= 1
            return none
        room = np.minimum(room, len(self._numbers))
        limits, speed_up = self._best(slots, room)
        # What hardly pays might not pay at all.
        self._longest = min(_OFTEN + int(_LONGEST * max(0.0, speed_up - 1.0)), _LONGEST)
        if speed_up > (_KEEP if self._drafting else _WORTH):
            self._next_pause = _PAUSE
            return limits
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return self._probe(room)

    def _best(self, slots: _Ids, room: _Ids) -> tuple[_Ids, float]:
        """The fastest choice among the best drafts of each number, and its speed-up."""
        requests, deepest = len(slots), int(room.max())
        most = min(int(room.sum()), self._max_draft_rows, self._costs.reach(requests))
        if most == 0:
            return room, 0.0
        gains = self._acceptance.gains(slots)[:, :deepest]
        gains *= self._numbers[:deepest] < room[:, None]
        gains = gains.ravel()  # [rows x drafts]
        order = (-gains).argsort(kind="stable")[:most]
        rows, depths = np.divmod(order, deepest)
        tokens = 1.0 + gains[order].cumsum() / requests
        time = self._costs.judging(requests, most)[1:]
        time += self._costs.making(requests, deepest)[1:][np.maximum.accumulate(depths)]
        speed_ups = tokens / time
        best = int(speed_ups.argmax())
        return np.bincount(rows[: best + 1], minlength=requests), float(speed_ups[best])

    def _probe(self, room: _Ids) -> _Ids:
        """A few drafts for one request, if the account can pay for them all being wrong."""
        limits = np.zeros_like(room)
        able = room.nonzero()[0]
        if not len(able):
            return limits
        requests = len(room)
        time = self._costs.judging(requests, _PROBE)[-1] + self._costs.making(requests, _PROBE)[-1]
        if self.account > time - 1.0 + ALLOWANCE:
            row = able[self._turn // _SAME % len(able)]
            self._turn += 1
            limits[row] = min(_PROBE, room[row])
        return limits
