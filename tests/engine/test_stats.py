"""What an engine tells of itself."""

from __future__ import annotations

import pytest

from kvik.core.counters import DraftCounts
from kvik.core.plan import DraftTimes
from kvik.engine.stats import SpeculationStats


def test_times_of_drafts_add_up() -> None:
    total = DraftTimes(0.5) + DraftTimes(0.25, 2.0, 3.0) + DraftTimes(0.25, 1.0, 0.75)
    assert total == DraftTimes(1.0, 3.0, 3.75)
    stats = SpeculationStats(DraftCounts(), total.proposing, total.checking, total.plain)
    assert stats.speedup == 1.25
    assert SpeculationStats(DraftCounts()).speedup is None


def test_drafts_are_counted_by_place() -> None:
    counts = DraftCounts()
    assert (counts.mean_length, counts.acceptance) == (0.0, 0.0)
    for drafts, accepted in ((3, 1), (1, 1), (4, 4), (2, 0)):
        counts.add(drafts, accepted)
    assert counts.at == [4, 3, 2, 1]
    assert counts.accepted_at == [3, 1, 1, 1]
    assert counts.mean_length == pytest.approx((6 + 4) / 4)
    assert counts.acceptance == 0.6
    copied = counts.copy()
    counts.add(1, 1)
    assert copied.at == [4, 3, 2, 1]
