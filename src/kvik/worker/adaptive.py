"""How many drafts each request gets: as many as make the batch fastest, and none if none do.

The choice maximises goodput (Liu et al. 2024, 2406.14066): each draft adds a token to its step with
the probability that it and all before it are accepted, at its measured cost. Estimates may be
wrong, so the measured loss is bounded as well (`LossBudget`), including that of trials and of the
time that deciding takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvik.frozen import frozen
from kvik.worker.draft_estimates import Acceptance, StepCosts

# The budget of drafting, which bounds how much slower it may be than not drafting.
#
# Every second that a step without drafts takes, or would have taken for the same tokens, adds SHARE
# of a second to the budget. Every second that drafting takes beyond that is subtracted: checking
# drafts, making them, finding none, deciding. Time gained is added, up to a limit (`room`). While
# the budget is spent, no drafts are made unless the last ones gained.
#
# So at any time, since the start or since any moment after it,
#
#     time taken <= time without drafts * (1 + SHARE) + the room + what the last trial lost,
#
# however few drafts are accepted and however wrong the estimates are: these only decide what the
# budget is spent on. A trial costs the rest of the budget and one step with drafts that loses, or
# two such steps if one between them gained or if the first included reading a text. Its loss is
# repaid before the next trial, which determines the pause between trials.
#
# Where trials gain little relative to their cost, less than SHARE is added, down to LEAST of it.
#
# The bound is on the time charged. `DraftControl` charges less than was measured for single steps
# that another process seems to have delayed, and at most four steps for making drafts.

SHARE = 0.01  # of the time without drafts, added to the budget
LEAST = 0.25  # lowest factor on SHARE, after many trials without a gain
_FADE = 0.95  # weight of a trial's gain and loss relative to those of the next
_PRIOR = 1.0  # initial gain and loss


class LossBudget:
    """The seconds that drafting may lose."""

    __slots__ = ("_lost", "_won", "balance", "needed", "share")

    def __init__(self) -> None:
        self.balance = 0.0  # seconds; negative while a loss is being repaid
        self.needed = 0.0  # lowest `balance` at which drafts are tried again
        self.share = SHARE  # of the time without drafts, added now
        # Gains and losses of trials, relative to the time without drafts.
        self._won = self._lost = _PRIOR

    def passed(self, seconds: float) -> bool:
        """Add the time of steps without drafts; return whether drafts may be tried after them."""
        self.balance += self.share * seconds
        return self.balance > 0 and self.balance >= self.needed

    def spend(self, seconds: float) -> None:
        """Subtract the time of a decision against drafts."""
        self.balance -= seconds

    def settle(self, without: float, seconds: float, limit: float) -> None:
        """Account for a step for which drafts were tried.

        Args:
            without: seconds that its tokens would have taken without drafts.
            seconds: seconds that it took.
            limit: most seconds that gains may accumulate.
        """
        balance = self.balance + without * (1 + self.share) - seconds
        self.balance = min(balance, max(limit, self.balance))
        gain = 1.0 - seconds / without
        self._won = _FADE * self._won + max(0.0, gain)
        self._lost = _FADE * self._lost + max(0.0, -gain)
        self.share = SHARE
        if self._won < self._lost:
            self.share *= max(LEAST, self._won / self._lost)


_Ids = NDArray[np.int64]

# The initial budget and the most that gains accumulate, in steps without drafts. With less, a few
# delayed steps stop drafts that gain.
FIRST, ROOM = 3.0, 12.0
_WORTH, _KEEP = 1.04, 1.02  # speed-up at which drafts start, and continue
_LEARN = 6  # steps without drafts at first
_OFTEN, _LONGEST = 3, 32  # steps with drafts until one without is measured again, least and most
_STANDS = 4  # steps for which a choice is kept, while drafts gain and the requests are the same
_REST = 8  # steps between two checks of a spent budget
_PROBE = 2  # drafts of one request in a trial
_SAME = 8  # trials in a row with the same request, as a drafter may have to read its text first
_SURPRISE = 2.0  # a step this many times longer or shorter than expected is examined
_MOST = 4.0  # steps: most that making drafts, or deciding on them, counts as
_HELD_UP = 0.25  # of a step: allowed extra time for making drafts, beyond the usual
_FOLLOW = 0.2  # weight of a new measurement of the time of deciding


@frozen
class StepFigures:
    """Measurements of a step, and of making the drafts that it checked."""

    # slots, drafts, accepted: [rows], of all requests that sampled; drafts checked and accepted.
    slots: _Ids
    drafts: _Ids
    accepted: _Ids
    seconds: float  # of the step, without making drafts
    making: float  # seconds of deciding on the drafts and making them, even if none were found
    requested: int  # most drafts requested for a request; 0: the drafter was not called
    pure: bool  # no request was reading its prompt, so only decoding requests caused the time
    # [rows, most drafts of a request], which drafts were accepted if they form a tree; None: the
    # first ones.
    paths: NDArray[np.bool_] | None = None
    # [rows], whose drafts were guesses; drafts of other rows were certain, so they say nothing
    # about later ones. None: all.
    guessed: NDArray[np.bool_] | None = None


class DraftControl:
    """Decides how many drafts each request gets."""

    def __init__(self, max_num_seqs: int, max_drafts: int, max_draft_rows: int) -> None:
        """
        Args:
            max_drafts: per request. max_draft_rows: of all requests in one step.
        """
        self.budget = LossBudget()  # of the time that drafts may lose
        self._acceptance = Acceptance(max_num_seqs, range(-1, max_drafts))
        self._max_num_seqs = max_num_seqs
        self._costs = StepCosts(max_drafts, max_draft_rows)
        self._max_draft_rows = max_draft_rows
        self._numbers = np.arange(max_drafts)
        self._opened = False  # the budget has its initial value
        self._drafting = False  # the last step had drafts
        self._gained = False  # the last step with drafts gained, and the next may draft again
        self._hoped = False  # `_gained` was set once despite a loss, since the budget was spent
        self._weighed = False  # `limits` has compared the possible choices
        # Steps without drafts since the last one that `passed` accounted for, and their seconds.
        self._rested, self._time = 0, 0.0
        self._rest = 0  # steps that `passed` only counts
        self._without = 0  # steps with drafts since the last one without
        self._longest = _OFTEN  # limit of `_without`
        self._deciding = 0.0  # seconds that deciding takes
        self._ceiling = math.inf  # upper bound of the seconds counted for a step without drafts
        # Slots for which drafts were requested.
        self._requested_before = np.zeros(max_num_seqs, np.bool_)
        self._reading = False  # the last choice included slots without drafts until then
        self._turn = 0  # number of trials, which selects the request
        # The last choice from a comparison, its requests, and for how many more steps it is kept.
        self._choice, self._chosen_for, self._stands = np.zeros(0, np.int64), b"", 0

    def follow(self, parents: Sequence[int]) -> None:
        """Control drafts that form a tree, of which requests get the first nodes.

        Args:
            parents: of all nodes, -1 for the root; at most as many drafts as a request gets.
        """
        self._acceptance = Acceptance(self._max_num_seqs, parents)
        self._numbers = np.arange(len(parents) - 1)

    def enter(self, slot: int) -> None:
        """Reset a slot for a new request, and decide again as soon as the budget allows: drafts may
        pay off for it."""
        self._acceptance.forget(slot)
        self._requested_before[slot] = False
        self._stands = self._rest = 0
        self.budget.needed = 0.0

    def passed(self, requests: int, seconds: float, *, pure: bool) -> bool:
        """Record a step without drafts for which the drafter was not called.

        If drafts do not pay off, nearly all steps are like this, so it is cheap.

        Args:
            requests: number that sampled. seconds, pure: see `StepFigures`.

        Returns:
            Whether to call `limits`; else no request gets drafts.
        """
        self._rested += 1
        self._time += min(seconds, self._ceiling)
        if self._rested < self._rest:
            return False
        self._drafting = False
        self._acceptance.passed(self._rested)
        if pure:
            self._costs.observe_plain(requests, seconds, self._rested)
            self._without = 0
        may = self.budget.passed(self._time) or self._gained
        self._rest = 0 if may else _REST
        self._rested, self._time = 0, 0.0
        return may and self._costs.num_plain(requests) >= _LEARN

    def decided(self, seconds: float) -> None:
        """Record how long it took to decide that no request gets drafts."""
        # If it takes much longer than before, something else delayed it.
        seconds = min(seconds, 2 * self._deciding or self._ceiling / _MOST)
        if self._weighed:
            rate = _FOLLOW if self._deciding else 1.0
            self._deciding += rate * (seconds - self._deciding)
        self.budget.spend(seconds)

    def observe(self, step: StepFigures) -> None:
        """Record a step that had drafts, or for which the drafter found none."""
        drafts = sum(step.drafts.tolist())
        if not drafts and not step.requested:
            self.passed(len(step.slots), step.seconds, pure=step.pure)
            return
        self._drafting = drafts > 0
        self._gained = False
        if drafts:
            paths = step.paths
            if paths is None:
                paths = self._numbers < step.accepted[:, None]
            if step.guessed is None:
                self._acceptance.observe(step.slots, step.drafts, paths)
            elif step.guessed.any():
                some = step.guessed
                self._acceptance.observe(step.slots[some], step.drafts[some], paths[some])
            else:
                self._acceptance.passed()
        else:
            self._acceptance.passed()
            if step.pure:
                self._costs.observe_plain(len(step.slots), step.seconds)
                self._without = 0
        self._account(step, drafts)

    def _account(self, step: StepFigures, drafts: int) -> None:
        """Add the gain or loss of drafts to the budget."""
        requests = len(step.slots)
        plain = self._costs.plain(requests)
        if plain is None:  # only the time for making drafts is known
            self.budget.spend(step.making)
            return
        making = min(step.making / plain, _MOST)
        if not drafts:
            if not self._reading:
                self._costs.making(requests).observe(step.requested, making)
                usual = self._costs.making(requests).at(step.requested)
                making = min(making, _SURPRISE * usual + _HELD_UP)
            # The first time for a request usually takes longer, as caches are cold.
            self.budget.settle(plain, plain * (1 + min(making, 1.0)), ROOM * plain)
            return
        expected = self._costs.judging(requests).at(drafts)
        tokens = 1.0 + sum(step.accepted.tolist()) / requests
        has_plain_time = self._costs.num_plain(requests) > 0
        if step.pure and has_plain_time:
            ratio = step.seconds / plain
            time = self._costs.observe_drafts(requests, drafts, ratio, step.requested, making)
            self._without += 1
            if not expected / _SURPRISE < ratio < expected * _SURPRISE:
                self._without = self._longest  # steps without drafts may have changed as well
        else:  # prompts took part of its time, or its time without drafts is unknown
            time, tokens = expected, tokens if has_plain_time else 1.0
        usual = self._costs.making(requests).at(step.requested)
        if not self._reading:  # a much longer time means that something else caused a delay
            making = min(making, _SURPRISE * usual + _HELD_UP)
        self.budget.settle(tokens * plain, (time + making) * plain, ROOM * plain)
        self._gained = tokens > time + making
        # If reading a text caused the loss, the next drafts show whether they pay off.
        if self._reading and not self._hoped:
            self._gained = self._hoped = tokens > time + min(making, usual)
        if self.budget.balance > 0:
            self._hoped = False

    def plain_seconds(self, requests: int) -> float | None:
        """Return the seconds of a step without drafts; None before any measurement."""
        return self._costs.plain(requests)

    def limits(self, slots: _Ids, caps: _Ids) -> _Ids:
        """Return how many drafts each request gets for its next step.

        Args:
            slots: [rows], all requests that decode in it.
            caps: [rows], most drafts each may get, 0 for none.
        """
        requests = len(slots)
        none = np.zeros(requests, np.int64)
        self._weighed = False
        plain = self._costs.plain(requests)
        if plain is None or self._costs.num_plain(requests) < (1 if self._drafting else _LEARN):
            return none
        self._ceiling = _MOST * plain
        if not self._opened:
            self._opened = True
            self.budget.balance += FIRST * plain
        if self._without >= self._longest:
            return none
        if self.budget.balance <= 0 and not self._gained:
            self.budget.needed = self._deciding
            return none
        if self._stands and self._gained and slots.tobytes() == self._chosen_for:
            self._stands -= 1
            self._reading = False
            return np.minimum(self._choice, caps)
        self._weighed = True
        self.budget.needed = 0.0
        caps = np.minimum(caps, len(self._numbers))
        limits, speed_up = self._best(slots, caps)
        # The smaller the speed-up, the sooner a step without drafts is measured again.
        self._longest = min(_OFTEN + int(_LONGEST * max(0.0, speed_up - 1.0)), _LONGEST)
        if speed_up > (_KEEP if self._drafting else _WORTH):
            self._choice, self._chosen_for, self._stands = limits, slots.tobytes(), _STANDS - 1
            return self._noted(slots, limits)
        self._gained = False
        return self._noted(slots, self._probe(caps, plain))

    def _noted(self, slots: _Ids, limits: _Ids) -> _Ids:
        """Return the limits, and note whether the drafter must read the text of a new request,
        which takes time."""
        some = slots[limits > 0]
        self._reading = bool(np.count_nonzero(self._requested_before[some]) < len(some))
        if self._reading:
            self._requested_before[some] = True
        return limits

    def _best(self, slots: _Ids, caps: _Ids) -> tuple[_Ids, float]:
        """For each number of drafts, consider the best ones; return the fastest choice and its
        speedup."""
        requests, deepest = len(slots), int(caps.max())
        places = int(caps.sum())
        num_candidates = min(places, self._max_draft_rows, self._costs.reach(requests))
        if num_candidates == 0:
            return caps, 0.0
        gains = self._acceptance.gains(slots)[:, :deepest]
        if places < requests * deepest:
            gains *= self._numbers[:deepest] < caps[:, None]
        gains = gains.ravel()  # [rows x drafts]
        order = (-gains).argsort(kind="stable")[:num_candidates]
        tokens = 1.0 + gains[order].cumsum() / requests
        time = self._costs.judging(requests).upto(num_candidates)[1:]
        making = self._costs.making(requests).upto(deepest)[1:]
        time += making[np.maximum.accumulate(order % deepest)]
        speed_ups = tokens / time
        best = int(speed_ups.argmax())
        chosen = order[: best + 1] // deepest  # rows
        return np.bincount(chosen, minlength=requests), float(speed_ups[best])

    def _probe(self, caps: _Ids, plain: float) -> _Ids:
        """Choose a few drafts for one request, if the budget covers the case that all are wrong."""
        limits = np.zeros_like(caps)
        able = caps.nonzero()[0]
        if not len(able):
            self.budget.needed = self.budget.balance  # the time of deciding must be earned first
            return limits
        requests = len(caps)
        time = self._costs.judging(requests).at(_PROBE) + self._costs.making(requests).at(_PROBE)
        loss = (time - 1.0) * plain
        if self.budget.balance < loss:
            self.budget.needed = loss + self._deciding
            return limits
        row = able[self._turn // _SAME % len(able)]
        self._turn += 1
        limits[row] = min(_PROBE, caps[row])
        return limits
