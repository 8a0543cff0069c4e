"""How likely the drafts of each request are to be accepted, from how it went so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Ids = NDArray[np.int64]
_Shares = NDArray[np.float64]

START = 0.6  # acceptance of a draft before anything is known
_SIBLING = 0.5  # likewise of another draft for the same place, over that of the one before it
_PRIOR = 2.0  # drafts that what is known of others counts for
_FADE = 0.9  # of a request's counts in each step: some ten steps count
_FADE_ALL = 0.95  # of the common counts in each step with drafts
_HIGHEST = 0.99
_LONG_AGO = 1000  # steps after which nothing is left of a count
_HEAVIEST = 1e100  # weight of a count: far from what a float cannot hold


class Acceptance:
    """Counts by draft: one is tried if the draft before it was accepted. A request's shares lean on
    those of all requests, the deeper of them on the one before: where little is known, or was known
    long ago, acceptance goes on as it does before."""

    def __init__(self, max_num_seqs: int, parents: Sequence[int]) -> None:
        """
        Args:
            parents: of the newest token, -1, and then of each draft: 0 is that token, and draft i
                is i + 1. (-1, 0, 1, 2, ...) is a chain.
        """
        drafts = len(parents) - 1
        self._parents = np.array(parents[1:], np.int64)
        self._paths = np.eye(drafts)  # [drafts, drafts]: column i are draft i and those before it
        for i, parent in enumerate(parents[1:]):
            if parent:
                self._paths[:, i] += self._paths[:, parent - 1]
        self._leans = _leans(parents)
        # Newer counts weigh more, which is as if the older ones faded.
        self._weight = 1.0  # of the newest
        self._passed = 0  # steps that have not faded the counts yet
        self._tried = np.zeros((max_num_seqs, drafts))
        self._right = np.zeros((max_num_seqs, drafts))
        self._all_tried = np.zeros(drafts)
        self._all_right = np.zeros(drafts)
        self._common = np.zeros(drafts)
        self._numbers = np.arange(drafts)
        self._find_common()

    def forget(self, slot: int) -> None:
        self._tried[slot] = self._right[slot] = 0.0

    def observe(self, slots: _Ids, drafts: _Ids, accepted: NDArray[np.bool_]) -> None:
        """A step with drafts.

        Args:
            slots, drafts: [rows], no slot twice; how many drafts were judged, the first ones.
            accepted: [rows, drafts], which of them were accepted.
        """
        self.passed()
        self._fade()
        known = np.ones((len(slots), 1 + len(self._numbers)), np.bool_)
        known[:, 1:] = accepted
        tried = known.take(self._parents, axis=1)
        tried &= self._numbers < drafts[:, None]
        self._tried[slots] += tried * self._weight
        self._right[slots] += accepted * self._weight
        self._all_tried = self._all_tried * _FADE_ALL + tried.sum(axis=0)
        self._all_right = self._all_right * _FADE_ALL + accepted.sum(axis=0)
        self._find_common()

    def passed(self) -> None:
        """A step without drafts."""
        self._passed += 1

    def _fade(self) -> None:
        """What the steps since the last one that was looked at did to older counts."""
        self._weight /= _FADE ** min(self._passed, _LONG_AGO)
        self._passed = 0
        if self._weight > _HEAVIEST:
            self._tried /= self._weight
            self._right /= self._weight
            self._weight = 1.0

    def gains(self, slots: _Ids) -> _Shares:
        """[rows, drafts], how likely each draft is accepted, with all before it. Never rising, so
        that the best drafts are always the first ones."""
        self._fade()
        tried, right = self._tried[slots] / self._weight, self._right[slots] / self._weight
        # How much better than others it fares, with all its drafts together.
        better = (right.sum(axis=1) + _PRIOR) / (tried @ self._common + _PRIOR)
        prior = np.minimum(self._common * better[:, None], _HIGHEST)
        shares = np.minimum((right + _PRIOR * prior) / (tried + _PRIOR), _HIGHEST)
        found: _Shares = np.minimum.accumulate(np.exp(np.log(shares) @ self._paths), axis=1)
        return found

    def _find_common(self) -> None:
        shares: list[float] = [START]  # behind all others: what the first draft leans on
        counts = zip(self._leans, self._all_tried.tolist(), self._all_right.tolist(), strict=True)
        for (before, factor), tried, right in counts:
            shares.insert(-1, (right + _PRIOR * factor * shares[before]) / (tried + _PRIOR))
        self._common = np.array(shares[:-1])


def _leans(parents: Sequence[int]) -> list[tuple[int, float]]:
    """For each draft, the draft whose share is the first guess at its own, and a factor; -1: none,
    it begins with `START`."""
    last: dict[int, int] = {}
    found = []
    for i, parent in enumerate(parents[1:]):
        found.append((last[parent], _SIBLING) if parent in last else (parent - 1, 1.0))
        last[parent] = i
    return found
