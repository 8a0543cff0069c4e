"""Estimates of how likely the drafts of each request are accepted, from its earlier drafts.

A rate is accepted / tried with counts that decay, plus a prior worth a few drafts, so that requests
without drafts yet have the rates of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence

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
