"""Counts of drafts: of a completion, of the engine, and how they add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from helpers.drafting import CHECK, DRAFTS, MAKING, PLAIN, DraftingExecutor, drafting_config
from helpers.served_engine import FakeExecutor, tiny_config

from kvik.core.moves import MoveCounters
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import DraftCounts, EngineRequest, Request, RequestDelta, RequestSpeculation
from kvik.engine.core import EngineCore
from kvik.engine.stats import MoveStats, SpeculationStats, TierStats, counters_of, sum_stats
from kvik.worker.draft_tree import DraftTree

Reports = dict[tuple[str, int], RequestSpeculation | None]

SCRIPTS: dict[str, tuple[Callable[[int], int], DraftCounts]] = {
    # The first of 16 tokens comes with the prompt. As many drafts are checked as fit.
    "right": (lambda row: DRAFTS, DraftCounts(3, 12, 12, [3, 3, 3, 3], [3, 3, 3, 3])),
    "wrong": (lambda row: 0, DraftCounts(14, 50, 0, [14, 13, 12, 11], [0, 0, 0, 0])),
    "two are": (lambda row: 2, DraftCounts(5, 18, 10, [5, 5, 4, 4], [5, 5, 0, 0])),
}


def add(core: EngineCore, name: str, tokens: int = 16, n: int = 1, **params: bool) -> None:
    wish = SamplingParams(max_tokens=tokens, n=n, ignore_eos=True, **params)
    core.add(EngineRequest(name, [1, 2, 3], wish), 0.0)


def steps(core: EngineCore, executor: FakeExecutor) -> Iterator[list[RequestDelta]]:
    while (plan := core.plan(0.0)) is not None:
        yield core.finish_step(executor.result(executor.submit(plan)), 0.0)


def reports(core: EngineCore, executor: FakeExecutor) -> Reports:
    found: Reports = {}
    for deltas in steps(core, executor):
        for delta in deltas:
            if delta.report is not None:
                found[delta.request_id, delta.index] = delta.report.speculation
    assert not core.has_requests
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_counts_by_place(name):
    right, expected = SCRIPTS[name]
    core = EngineCore(drafting_config())
    add(core, "a")
    found = reports(core, DraftingExecutor(right=right))["a", 0]
    assert found.drafts == expected == core.stats().speculation.drafts
    assert found.drafts.mean_length == 1 + expected.accepted / expected.rows
    assert found.drafts.acceptance == expected.accepted / expected.drafts
    without = 15 - expected.accepted - expected.rows  # steps without drafts
    assert without == (name == "wrong")
    assert found.seconds == expected.rows * (MAKING + CHECK) + without * PLAIN
    assert found.plain_seconds == 15 * PLAIN
    assert found.speedup == found.plain_seconds / found.seconds == core.stats().speculation.speedup


def test_nodes_of_a_tree_count_by_depth():
    core = EngineCore(drafting_config())
    add(core, "a", tokens=6)
    executor = DraftingExecutor(right=lambda row: 1, places=(0, 1, 1, 2, 2))
    found = reports(core, executor)["a", 0]
    # With 5, 3 and 1 tokens left: 4 drafts, then 2 of depth 1, then none.
    assert found.drafts == DraftCounts(2, 6, 2, [2, 1], [2, 0])


def test_speculation_figures_are_per_request_and_averaged_for_the_engine():
    core = EngineCore(drafting_config())
    add(core, "a", tokens=60)
    add(core, "b", tokens=60)
    requests: list[Request] = []
    for count, _ in enumerate(steps(core, DraftingExecutor(right=lambda row: 4 * (row == 0)))):
        requests = requests or core.scheduler.running[:]
        if count == 8:
            break
    one, other = (request.speculation for request in requests)
    assert (one.drafts.mean_length, other.drafts.mean_length) == (5.0, 1.0)
    assert one.speedup == pytest.approx(5 * PLAIN / (MAKING + CHECK))
    assert other.speedup == pytest.approx(PLAIN / (MAKING + CHECK))
    assert (one + other).speedup == pytest.approx(core.stats().speculation.speedup)


def test_siblings_and_preemption_keep_counts():
    config = drafting_config()
    core = EngineCore(replace(config, cache=replace(config.cache, num_blocks=128)))
    for name in "abc":
        add(core, name, tokens=200, n=2)
    add(core, "without", speculation=False)
    found = reports(core, DraftingExecutor(right=lambda row: row % 4))
    assert core.stats().preemptions > 0
    assert found.pop(("without", 0)) is None
    assert len(found) == 6
    total = sum((one.drafts for one in found.values()), DraftCounts())
    assert total == core.stats().speculation.drafts
    for one in found.values():
        counts = one.drafts
        assert (sum(counts.at), sum(counts.accepted_at)) == (counts.drafts, counts.accepted)
        assert counts.at[0] == counts.rows > 10
        assert one.seconds > 0


def test_unknown_figures_of_speculation_are_none():
    core = EngineCore(drafting_config())
    add(core, "a", tokens=6)
    found = reports(core, DraftingExecutor(known=False))["a", 0]
    assert (found.drafts.rows, found.seconds, found.speedup) == (1, 0.0, None)


def test_an_engine_without_speculation_reports_nothing():
    core = EngineCore(tiny_config())
    add(core, "a", tokens=6)
    assert reports(core, FakeExecutor()) == {("a", 0): None}


# -- the counts themselves -----------------------------------------------------------------------


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


def test_stats_of_several_engines_are_merged():
    """Engines share the pages of a folder on disk, and have separate memory tiers."""
    core = EngineCore(drafting_config())
    add(core, "a")
    reports(core, DraftingExecutor(right=lambda row: DRAFTS))
    one = core.stats()
    memory = TierStats("memory", 3, 300, 1000, 5, 2, 0, 2, 4.0)
    disk = TierStats("disk", 9, 900, 5000, 9, 1, 1, 0, None)
    first = replace(one, kv_usage=0.5, moves=MoveStats((memory, disk), MoveCounters(10, 2)))
    later = replace(
        one,
        kv_usage=0.1,
        moves=MoveStats(
            (replace(memory, pages=1, bytes=100, bytes_per_second=2.0), replace(disk, pages=8)),
            MoveCounters(1, 0, swapped_in=4),
            "no space is left",
        ),
    )
    both = sum_stats([first, later])
    assert (both.steps, both.num_blocks) == (2 * one.steps, 2 * one.num_blocks)
    assert both.kv_usage == pytest.approx(0.3)
    assert both.speculation.drafts == one.speculation.drafts + one.speculation.drafts
    assert both.moves == MoveStats(
        (
            TierStats("memory", 4, 400, 2000, 10, 4, 0, 4, 3.0),
            TierStats("disk", 9, 900, 5000, 18, 2, 2, 0, None),
        ),
        MoveCounters(11, 2, swapped_in=4),
        "no space is left",
    )
    assert sum_stats([first]) is first and sum_stats([one, one]).moves is None
    rest = sum_stats([first, counters_of(later)])  # the second has ended
    assert (rest.steps, rest.num_running) == (2 * one.steps, one.num_running)
    assert (rest.kv_usage, rest.num_blocks, rest.speed) == (0.5, one.num_blocks, first.speed)
    assert rest.moves == MoveStats(
        (
            TierStats("memory", 3, 300, 1000, 10, 4, 0, 4, 4.0),
            TierStats("disk", 9, 900, 5000, 18, 2, 2, 0, None),
        ),
        MoveCounters(11, 2, swapped_in=4),
    )
