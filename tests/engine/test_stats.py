"""What an engine tells of itself."""

from __future__ import annotations

import pytest

from kvik.core.types import DraftCounts, RequestSpeculation
from kvik.engine.stats import SpeculationStats
from kvik.worker.draft_tree import DraftTree


def test_a_speedup_is_time_without_drafts_over_time_with_them() -> None:
    assert SpeculationStats(DraftCounts(), 1.0, 3.0, 3.75).speedup == 1.25
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


def test_drafts_of_a_tree_have_the_place_of_their_depth() -> None:
    tree = DraftTree((-1, 0, 0, 1, 3, 0), (0, 0, 1, 0, 0, 2))
    assert tree.reach == (0, 1, 1, 2, 3, 3)
    counts = DraftCounts()
    for drafts, accepted in ((5, 2), (2, 1), (3, 0)):
        counts.add(drafts, accepted, tree.reach[drafts])
    assert (counts.rows, counts.drafts, counts.accepted) == (3, 10, 3)
    assert (counts.at, counts.accepted_at) == ([3, 2, 1], [2, 1, 0])


def test_completions_add_up() -> None:
    one, other = RequestSpeculation(seconds=2.0, plain_seconds=3.0), RequestSpeculation()
    one.drafts.add(3, 1)
    other.drafts.add(1, 1)
    for total in (one + other, other + one):
        assert total.drafts == DraftCounts(2, 4, 2, [2, 1, 1], [2, 0, 0])
        assert total.speedup == 1.5
    assert other.speedup is None
