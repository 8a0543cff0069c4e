"""Moves between the cache and its tiers: stores, loads, and when they are avoided."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from helpers.fake_worker import PAGE
from helpers.simulation import Setup, Simulation
from helpers.tiers import examples

from kvik.core import moves, tier_index
from kvik.core.block_pool import BlockPool
from kvik.core.config import TierSizes
from kvik.core.moves import LOAD_SECONDS, MAX_LOADS
from kvik.core.plan import DISK, MEMORY, Moved, SchedulerOutput
from kvik.core.tier_index import TierIndex
from kvik.core.types import FinishReason, PageSource, RequestStatus

SETUP = Setup(num_blocks=12, budget=64, max_model_len=48, tiers=(64, 0))
PROMPT = [0, 1, 2] * 11 + [0]  # 8 full blocks and two tokens


def served(setup: Setup = SETUP) -> Simulation:
    """Return a simulation with a prompt that left the cache and is in a tier."""
    sim = Simulation(setup)
    sim.add(PROMPT, 3)
    sim.drain()
    sim.add([2, 2, 1] * 15, 3)  # takes all blocks
    sim.drain()
    return sim


STATES = [None, 4]  # checkpoints, if layers keep states


@pytest.mark.parametrize("checkpoints", STATES)
@pytest.mark.parametrize("tiers", [(64, 0), (0, 64), (4, 64)])
def test_a_prefix_that_left_the_cache_is_loaded(
    tiers: tuple[int, int], checkpoints: int | None
) -> None:
    sim = served(replace(SETUP, tiers=tiers, checkpoints=checkpoints))
    if checkpoints is not None:
        sim.scheduler.kv.checkpoints.clear()
    (request,) = sim.add(PROMPT, 3)
    sim.drain()
    assert request.num_cached_tokens == 32
    assert sim.scheduler.moves.counters.loaded_tokens > 0


def test_a_loading_request_holds_blocks_and_no_row_while_others_compute() -> None:
    sim = served()
    sim.worker.tiers.at_once = False
    (request,) = sim.add(PROMPT, 3)
    (other,) = sim.add([1, 2, 0, 1], 6)
    plan = sim.planned()
    assert [len(load.pages) for load in plan.loads] == [8]
    assert request.status is RequestStatus.LOADING and not request.block_ids
    assert len(plan.slots) == 1 and other.status is RequestStatus.RUNNING
    assert sim.scheduler.kv.pool.num_free == 12 - 8 - 1
    sim.deliver()
    assert request.status is RequestStatus.LOADING
    sim.worker.tiers.at_once = True
    sim.drain()
    assert request.num_cached_tokens == 32


@pytest.mark.parametrize("failing", [0, 3, 7])
def test_what_fails_to_load_is_computed(failing: int) -> None:
    sim = served()
    for number in range(3):  # also the second attempt
        sim.worker.tiers.fail("load", failing + number * (8 - failing))
    (request,) = sim.add(PROMPT, 3)
    sim.drain()
    assert request.num_cached_tokens == failing * 4
    assert sim.scheduler.moves.index.tiers[MEMORY].counters.failed > 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
def test_the_end_of_a_request_does_not_wait_for_its_load(reason: FinishReason) -> None:
    sim = served()
    sim.worker.tiers.at_once = False
    deadline = sim.now + 1.0 if reason is FinishReason.DEADLINE else None
    (request,) = sim.add(PROMPT, 3, deadline=deadline)
    (other,) = sim.add([1, 2, 0, 1], 20)
    sim.plan()
    if reason is FinishReason.ABORT:
        sim.end(request)
    else:
        sim.now += 2.0
        sim.deliver()
        sim.worker.tiers.under_way, kept = [], sim.worker.tiers.under_way
        sim.step()
        sim.worker.tiers.under_way = kept
    assert request.finish_reason is reason
    assert sum(sim.scheduler.kv.pool.ref_counts) >= 8  # until the load is done
    sim.worker.tiers.at_once = True
    sim.drain()
    assert other.finished


def test_plans_that_only_wait_for_a_load_are_no_steps() -> None:
    sim = served()
    sim.worker.tiers.at_once = False
    (request,) = sim.add(PROMPT, 3)
    steps = sim.scheduler.counters.steps
    plans = [plan for _ in range(5) if (plan := sim.step()) is not None]
    with_rows = sum(bool(plan.slots) for plan in plans)
    assert sim.scheduler.counters.steps == steps + with_rows < steps + len(plans)
    sim.worker.tiers.at_once = True
    sim.drain()
    assert request.finished


def test_a_slow_load_is_abandoned_and_its_blocks_stay() -> None:
    sim = served()
    sim.worker.tiers.at_once = False
    (request,) = sim.add(PROMPT, 3)
    (other,) = sim.add([1, 2, 0, 1], 12, stop_ids=frozenset())
    sim.step()
    sim.now += LOAD_SECONDS + 1
    sim.step()
    assert request.status is RequestStatus.WAITING
    assert sim.scheduler.moves.counters.given_up == 1
    assert sim.scheduler.kv.pool.num_free <= 12 - 8 - 1
    sim.worker.tiers.at_once = True
    sim.drain()
    assert request.finished and other.finished


@pytest.mark.parametrize("checkpoints", STATES)
@pytest.mark.parametrize("steps", [1, 2, 4, 7])
@pytest.mark.parametrize("failing", [None, 0, 5, 8])
def test_a_request_handed_over_repeats_no_work(
    steps: int, failing: int | None, checkpoints: int | None
) -> None:
    setup = replace(SETUP, num_blocks=24, peers=True, checkpoints=checkpoints)
    sim, target = Simulation(setup), Simulation(replace(setup, tiers=(0, 0)))
    (request,) = sim.add(PROMPT, 12, stop_ids=frozenset())
    sim.step()
    if checkpoints is not None:  # no step passes the end of the prompt's blocks
        sim.step()
    for _ in range(steps - 1):
        sim.step()
    other = sim.hand_over(request, target)
    tokens = other.source.num_tokens
    assert tokens == len(PROMPT) + steps - 1
    sim.drain()
    target.worker.tiers.peer = sim.worker.tiers.peer
    if failing is not None:
        target.worker.tiers.fail("load", failing)
    target.drain()
    again = 0
    if failing is not None:  # a state fits only the place where it was
        again = tokens - min(4 * failing, tokens // 4 * 4) * (checkpoints is None)
    assert target.scheduler.counters.scheduled_tokens == 12 - steps + again
    assert other.num_output_tokens == 12


def test_two_requests_wait_for_one_load() -> None:
    sim = served()
    sim.worker.tiers.at_once = False
    requests = sim.add(PROMPT, 3) + sim.add([*PROMPT, 1], 3)
    plan = sim.planned()
    assert len(plan.loads) == 1
    assert {r.status for r in requests} == {RequestStatus.LOADING}
    sim.worker.tiers.at_once = True
    sim.drain()
    assert [r.num_cached_tokens for r in requests] == [32, 32]


def test_a_slow_tier_is_not_used_until_its_estimate_is_old() -> None:
    sim = served()
    moves = sim.scheduler.moves
    sim.scheduler.clock.note(0.0, 1.0, 100, prefill=True)
    moves.index.tiers[MEMORY].rate.note(1, 1e4)
    (request,) = sim.add(PROMPT, 1)
    sim.drain()
    assert request.num_cached_tokens == 0 and moves.counters.compute_choices == 1
    size = Counter({MEMORY: 1000})
    tries = next(n for n in range(2000) if moves.index.is_faster(size, 10, 100.0))
    assert tries > 100


@pytest.mark.parametrize(("tokens", "loads"), [(90, False), (105, False), (115, True)])
def test_loading_must_be_faster_by_a_tenth(tokens: int, loads: bool) -> None:
    index = TierIndex(TierSizes((100,), 4))
    index.tiers[MEMORY].rate.note(100, 1.0)
    assert index.is_faster(Counter({MEMORY: 100}), tokens, 100.0) is loads


@pytest.mark.parametrize("checkpoints", STATES)
def test_a_preempted_request_resumes_from_its_partial_last_block(checkpoints: int | None) -> None:
    sim = Simulation(replace(SETUP, num_blocks=8, tiers=(64, 0), checkpoints=checkpoints))
    first, second = (
        sim.add([i, 1, 2, 0, 1, 0, 0][: 7 - 2 * i], 20, stop_ids=frozenset())[0] for i in (0, 1)
    )
    for _ in range(60):
        sim.step()
        if second.num_preemptions:
            break
    written = second.num_kept_tokens
    assert written == len(second.token_ids) - 1 and written % 4
    assert sim.scheduler.moves.counters.swapped_out == 1
    for _ in range(60):
        sim.step()
        if second.status is RequestStatus.RUNNING:
            break
    assert sim.scheduler.meter.read([]).recomputed_tokens <= 1
    sim.drain()
    assert first.finished and second.finished


def test_salted_and_reset_contents_are_never_loaded() -> None:
    sim = served()
    (other,) = sim.add(PROMPT, 3, salt="b")
    sim.drain()
    assert other.num_cached_tokens == 0
    sim.scheduler.reset_cache()
    (same,) = sim.add(PROMPT, 3)
    sim.drain()
    assert same.num_cached_tokens == 0


def test_loads_in_flight_at_a_reset_are_not_published() -> None:
    sim = served()
    sim.worker.tiers.at_once = False
    (request,) = sim.add(PROMPT, 3)
    assert sim.planned().loads
    sim.scheduler.reset_cache()
    sim.worker.tiers.at_once = True
    sim.drain()
    assert request.finished and request.num_cached_tokens == 0


def test_pages_of_a_plan_that_failed_are_deleted() -> None:
    """Some may be on the disk, with uncertain content."""
    sim = Simulation(replace(SETUP, tiers=(0, 64)))
    sim.add(PROMPT, 3)
    sim.step()
    sim.step_fails = True
    failed = sim.planned()
    assert failed.stores
    sim.deliver()
    sim.add([1, 2], 1)
    assert {store.key for store in failed.stores} <= set(sim.planned().drops)
    sim.deliver()
    sim.drain()


def test_no_page_is_loaded_into_a_block_that_the_plan_copies() -> None:
    """It may be free already, and the load might precede the copy."""
    sim = served()
    (request,) = sim.add(PROMPT, 3)
    kv, moves = sim.scheduler.kv, sim.scheduler.moves
    match, free = kv.match(request), kv.pool.num_free
    plan = SchedulerOutput(9, [], [], [], [])
    plan.block_copies.extend((block, 0) for block in range(kv.pool.num_blocks + 1))
    assert not moves.waits(request, match, None, sim.now, plan, fits=True)
    assert kv.pool.num_free == free and not moves.loads
    plan.block_copies.clear()
    assert moves.waits(request, match, None, sim.now, plan, fits=True)
    sim.drain()
    assert request.num_cached_tokens == 32


def test_loads_of_a_failed_plan_are_repeated() -> None:
    sim = served()
    (request,) = sim.add(PROMPT, 3)
    sim.step_fails = True
    sim.step()
    sim.drain()
    assert request.num_cached_tokens == 32


def test_a_source_of_a_failed_plan_is_left_if_its_request_has_ended() -> None:
    """Else its lease would be renewed for ever."""
    sim = Simulation(replace(SETUP, peers=True, depth=2))
    sim.add([1, 2], 20, stop_ids=frozenset())
    sim.plan()
    sim.deliver()
    source = PageSource("peer", 1, "lease", 8)
    (request,) = sim.add(PROMPT, 3, source=source)
    sim.step_fails = True
    assert sim.planned().sources == [source]
    sim.end(request)
    assert sim.planned().left_sources == [source]
    sim.deliver()
    again = sim.planned()
    assert again.sources == again.left_sources == [source]
    sim.drain()


def test_concurrent_loads_are_bounded() -> None:
    setup = replace(SETUP, num_blocks=200, max_num_seqs=40, tiers=(1000, 0))
    sim = Simulation(setup)
    prompts = [[i % 3, i // 3 % 3, i // 9 % 3, 1] * 2 + [0] for i in range(20)]
    for prompt in prompts:
        sim.add(prompt, 1)
    sim.drain()
    moves = sim.scheduler.moves
    sim.scheduler.kv.reset()
    sim.worker.tiers.at_once = False
    for prompt in prompts:
        sim.add(prompt, 1)
    sim.plan()
    assert len(moves.loads) == MAX_LOADS
    sim.worker.tiers.at_once = True
    sim.drain()


# Longer than the state machine: few blocks and slow loads for many requests.
@pytest.mark.parametrize("part", range(5))
def test_random_runs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(part, examples(150), 5):
        run(random.Random(seed), monkeypatch)


def run(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index, "MAX_WRITING", rng.choice([2 * PAGE, 100 * PAGE]))
    monkeypatch.setattr(moves, "MIN_BACKLOG", 2)
    setup = Setup(
        num_blocks=rng.choice([12, 16, 20]),
        windows=rng.choice([(None,), (None, 3), (5, None, 8)]),
        budget=rng.choice([8, 16]),
        depth=rng.choice([1, 2]),
        tiers=rng.choice([(40, 0), (0, 100), (8, 30)]),
        max_model_len=40,
        checkpoints=rng.choice([None, None, 5]),
    )
    while not Simulation(setup).fits(24):
        setup = replace(setup, num_blocks=setup.num_blocks + 6)
    sim = Simulation(setup)
    for _ in range(40):
        if rng.random() < 0.5:
            sim.add([rng.randrange(2)] * rng.randrange(1, 14) + [rng.randrange(3)], 8)
        sim.worker.tiers.at_once = rng.random() < 0.3
        if rng.random() < 0.1:
            sim.worker.tiers.fail("load", 1)
        for _ in range(rng.randrange(3)):
            sim.step()
            sim.now += 0.05
    sim.worker.tiers.at_once = True
    sim.drain()


def test_pages_wait_in_the_cache_for_a_busy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index, "MAX_WRITING", 2 * PAGE)
    sim = Simulation(replace(SETUP, tiers=(0, 64)))
    sim.add(PROMPT, 3)
    steps = [sim.step() for _ in range(8)]
    assert max(len(plan.stores) for plan in steps if plan is not None) == 2
    assert len(sim.worker.tiers.disk) >= 8 and not sim.scheduler.has_moves
    sim.drain()


def test_a_step_does_not_look_at_all_blocks_that_wait_for_a_busy_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_index, "MAX_WRITING", PAGE)
    sim, looks = Simulation(replace(SETUP, num_blocks=128, tiers=(0, 256))), list[int]()
    for i in range(12):
        sim.add([i, *PROMPT], 1)
    while sim.scheduler.has_requests:
        sim.step()
    has = BlockPool.has
    monkeypatch.setattr(BlockPool, "has", lambda *of: looks.append(1) or has(*of))
    sim.add([1], 2)
    sim.step()  # stores one block, and notes the 8 of the last prompt
    assert sim.scheduler.has_moves and len(looks) <= 10
    sim.drain()
    assert len(sim.worker.tiers.disk) == 12 * 8


def test_the_start_of_a_prefix_is_evicted_last() -> None:
    index = TierIndex(TierSizes((10,), memory=0, disk=30))
    keys = [(0, bytes([i])) for i in range(4)]
    for key in keys[:3]:
        index.store(key, on_disk=True)
        index.finish(key, DISK)
    index.use(keys[:3])
    assert index.store(keys[3], on_disk=True) == (-1, True)
    assert index.drops == [keys[2]]


def test_pages_beyond_the_quota_are_deleted_oldest_first() -> None:
    index = TierIndex(TierSizes((10,), memory=0, disk=30))
    keys = [(0, bytes([i])) for i in range(5)]
    index.find([*keys, (7, b"of another group")])
    assert index.drops == keys[:2] and [*index.tiers[DISK].pages] == keys[2:]


def test_a_tier_that_is_off_is_not_used() -> None:
    sim = served(replace(SETUP, tiers=(0, 64)))
    sim.worker.tiers.fail("off", 0)
    sim.add([1], 1)
    sim.drain()
    (request,) = sim.add(PROMPT, 3)
    sim.drain()
    assert request.num_cached_tokens == 0 and sim.scheduler.moves.index.off
    assert not sim.scheduler.has_moves


def test_results_about_unknown_pages_change_nothing() -> None:
    sim = served()
    moved = Moved(loaded=[(99, [0])], stored=[(0, b"x")], lost=[(0, b"y")])
    sim.scheduler.moves._take(moved)
    sim.check()
