"""What tests of page movers share: a disk tier in memory, and plans that only move pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvik.core.plan import PageKey, PageLease, PageLoad, PageStore, SchedulerOutput
from kvik.core.tier_index import TierIndex
from kvik.worker.page_mover import PageFolder


def load_always(patch: pytest.MonkeyPatch) -> None:
    """Load pages from tiers even if that was slow before on this machine."""
    patch.setattr(TierIndex, "is_faster", lambda *_: True)


class Disk(PageFolder):
    def __init__(self) -> None:
        self.pages: dict[PageKey, np.ndarray] = {}

    def store(self, key: PageKey, parent: bytes, page: np.ndarray) -> bool:
        self.pages[key] = page.copy()
        return True

    def read(self, key: PageKey, page: np.ndarray) -> bool:
        if key in self.pages:
            page[:] = self.pages[key]
        return key in self.pages


def plan(
    step: int, *moves: PageStore | PageLoad, leases: Sequence[PageLease] = ()
) -> SchedulerOutput:
    made = SchedulerOutput(step, [], [], [], [])
    for move in moves:
        (made.stores if isinstance(move, PageStore) else made.loads).append(move)
    made.leases.extend(leases)
    return made


def key(number: int) -> PageKey:
    return 0, bytes([number])
