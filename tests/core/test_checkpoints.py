"""States of requests: when they are copied, which requests continue from a copy, and faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulation import Setup, Simulation
from helpers.windows import Seen, chunks

from kvik.core.block_pool import BlockPool
from kvik.core.plan import SchedulerOutput
from kvik.core.types import Request

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # two blocks of four tokens, and two more


def served(sim: Simulation, prompt: list[int], max_tokens: int = 8, **options: object) -> Request:
    (request,) = sim.add(prompt, max_tokens, stop_ids=frozenset(), **options)
    sim.drain()
    return request


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (chunks(6), None)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_a_second_turn_computes_less_than_a_block_beyond_its_own_tokens(
    max_tokens: int, depth: int, windows: tuple[Seen, ...]
) -> None:
    sim = Simulation(Setup(checkpoints=4, depth=depth, windows=windows))
    first = served(sim, PROMPT, max_tokens)
    computed = len(first.token_ids) - 1
    second = served(sim, [*first.token_ids, 8, 8, 8])
    assert second.num_cached_tokens == computed - computed % 4


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_that_pass_the_end_of_a_block_leave_a_copy_there(depth: int) -> None:
    for first in range(4):
        for max_tokens in range(8, 14):
            sim = Simulation(Setup(checkpoints=4, depth=depth))
            sim.worker.num_drafts = 3
            served(sim, [first, *PROMPT], max_tokens)
            (text,) = (request.token_ids for request in sim.requests.values())
            second = served(sim, [*text, 8, 8, 8])
            assert second.num_cached_tokens == (len(text) - 1) // 4 * 4


def test_a_repeated_prompt_hits_at_its_last_block_boundary() -> None:
    sim = Simulation(Setup(checkpoints=4))
    assert served(sim, PROMPT).num_cached_tokens == 0
    assert served(sim, PROMPT).num_cached_tokens == 8
    assert served(sim, PROMPT[:8]).num_cached_tokens == 0  # no copy was made at 4
    assert served(sim, PROMPT[:8]).num_cached_tokens == 4


def test_a_copy_is_made_where_prefixes_diverge() -> None:
    sim = Simulation(Setup(checkpoints=8))
    shared = PROMPT[:8]
    assert served(sim, [*shared, 7, 7, 7, 7, 7, 7]).num_cached_tokens == 0
    assert served(sim, [*shared, 6, 6, 6, 6, 6, 6]).num_cached_tokens == 0
    assert served(sim, [*shared, 5, 5, 5, 5, 5, 5]).num_cached_tokens == 8


def test_no_step_computes_past_the_end_of_the_prompts_blocks() -> None:
    sim = Simulation(Setup(checkpoints=2, budget=64))
    sim.add(PROMPT)
    sizes = [sim.planned().num_scheduled_tokens]
    sim.deliver()
    plan = sim.planned()
    assert [*sizes, plan.num_scheduled_tokens] == [[8], [2]]
    assert plan.state_copies == [(plan.slots[0], 4)]  # after the rows of four slots
    sim.deliver()
    sim.drain()


@pytest.mark.parametrize("checkpoints", [0, 1, 8])
def test_siblings_continue_from_the_prompt_of_the_first(checkpoints: int) -> None:
    sim = Simulation(Setup(checkpoints=checkpoints))
    siblings = sim.add(PROMPT, n=3)
    sim.drain()
    cached = [request.num_cached_tokens for request in siblings]
    assert cached == [0, 8, 8] if checkpoints > 1 else cached[0] == 0


@pytest.mark.parametrize("checkpoints", [0, 1, 8])
def test_preempted_requests_continue_from_the_nearest_copy(checkpoints: int) -> None:
    sim = Simulation(Setup(checkpoints=checkpoints, num_blocks=9, budget=32))
    requests = [sim.add([i, *PROMPT], 16, stop_ids=frozenset())[0] for i in range(3)]
    sim.drain()
    assert sum(request.num_preemptions for request in requests)


def test_the_least_recently_used_copy_makes_room() -> None:
    sim = Simulation(Setup(checkpoints=2))
    for first in (0, 1, 2):
        served(sim, [first, *PROMPT[1:]], 1)
    assert served(sim, [2, *PROMPT[1:]], 1).num_cached_tokens == 8
    assert served(sim, PROMPT, 1).num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_of_a_failed_step_are_dropped(depth: int) -> None:
    sim = Simulation(Setup(checkpoints=3, depth=depth))
    sim.add(PROMPT)
    sim.step()
    sim.step_fails = True  # that of the copy at the end of the prompt
    sim.step()
    sim.drain()
    assert served(sim, PROMPT).num_cached_tokens == 0
    checkpoints = sim.scheduler.kv.checkpoints
    assert sorted(checkpoints.indices()) == [0, 1, 2]


def test_a_reset_drops_all_copies() -> None:
    sim = Simulation(Setup(checkpoints=3))
    served(sim, PROMPT)
    sim.scheduler.kv.reset()
    sim.check()
    assert served(sim, PROMPT).num_cached_tokens == 0


@pytest.mark.parametrize("aborted", [False, True])
def test_a_copy_after_a_failed_step_is_dropped(aborted: bool) -> None:
    """The step that copies succeeds, but the state was never computed."""
    sim = Simulation(Setup(checkpoints=3, depth=2))
    (request,) = sim.add(PROMPT)
    sim.step_fails = True
    sim.plan()
    assert sim.planned().state_copies
    if aborted:  # before it is known that the step failed
        sim.end(request)
    sim.drain()
    for hit in (0, 8):  # the second continues from the copy of the first
        assert served(sim, PROMPT).num_cached_tokens == hit


def test_a_request_ends_if_the_step_that_copied_its_state_fails() -> None:
    """It started while that step was in flight."""
    sim = Simulation(Setup(checkpoints=3, depth=2))
    first = served(sim, PROMPT, 7)
    sim.add([1])
    sim.step_fails = True
    assert sim.planned().state_copies  # of the state at the end of the first request
    (second,) = sim.add([*first.token_ids, 8])
    sim.planned()
    assert second.num_cached_tokens == 16
    sim.drain()
    assert sim.ended[second.key].error


def test_an_aborted_request_whose_row_failed_leaves_no_copy() -> None:
    sim = Simulation(Setup(checkpoints=6, depth=2))
    (request,) = sim.add(PROMPT, 12, stop_ids=frozenset())
    while request.num_computed_tokens < 11:
        sim.step()
    sim.failing_row = 0  # that of the last token of the third block
    sim.step()
    assert sim.planned().state_copies
    sim.end(request)  # before it is known that the row failed
    sim.drain()
    for hit in (8, 12):  # the second continues from the copy of the first
        assert served(sim, [*request.token_ids, 7]).num_cached_tokens == hit


def test_an_aborted_request_that_continued_from_a_failed_copy_leaves_no_copy() -> None:
    sim = Simulation(Setup(checkpoints=8, depth=3, max_num_seqs=2))
    first = served(sim, PROMPT, 7)
    sim.add([1])
    sim.step_fails = True
    assert sim.planned().state_copies  # of the state at the end of the first request
    text = [*first.token_ids, 8, 8, 8, 8]
    (second,) = sim.add(text)
    sim.planned()
    assert sim.planned().state_copies  # where the blocks of the second one's prompt end
    sim.end(second)
    sim.drain()
    for hit in (8, 20):
        assert served(sim, text).num_cached_tokens == hit


# Tiers.

TIERS = Setup(checkpoints=3, num_blocks=64, tiers=(60, 0))


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("tiers", [(60, 0), (0, 60)])
def test_only_the_state_is_loaded_if_the_blocks_are_cached(
    tiers: tuple[int, int], turn: bool
) -> None:
    sim = Simulation(replace(TIERS, tiers=tiers))
    first = served(sim, PROMPT, 7)
    sim.drain()
    sim.scheduler.kv.checkpoints.clear()
    text = [*first.token_ids, 8, 8] if turn else PROMPT
    assert served(sim, text).num_cached_tokens == (16 if turn else 8)
    (tier,) = sim.scheduler.moves.index.tiers.values()
    assert tier.counters.loaded == 3  # the pages of the state


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_state_with_a_missing_page_is_deleted_and_computed(part: int) -> None:
    sim = Simulation(TIERS)
    served(sim, PROMPT, 1)
    for fails in (True, False):
        sim.scheduler.kv.checkpoints.clear()
        if fails:
            sim.worker.tiers.fail("load", part)
        assert served(sim, PROMPT, 1).num_cached_tokens == (0 if fails else 8)
    states = [key for key in sim.scheduler.moves.index.tiers["memory"].pages if key[0]]
    assert len(states) == 3


def test_a_state_is_made_where_blocks_in_a_tier_end() -> None:
    """The cache has lost the blocks that prompts share, and the tier has no state there."""
    sim = Simulation(TIERS)
    for last, hit in ((7, 0), (6, 0), (5, 8)):
        assert served(sim, [*PROMPT[:8], *[last] * 6], 1).num_cached_tokens == hit
        sim.scheduler.kv.reset()


def test_the_states_of_running_answers_are_not_stored() -> None:
    sim = Simulation(TIERS)
    (request,) = sim.add(PROMPT, 30, stop_ids=frozenset())
    for _ in range(26):
        sim.step()
    states = [key for key in sim.worker.tiers.peer if key[0]]
    assert not request.finished and len(states) == 3  # of the prompt
    sim.drain()
    assert len([key for key in sim.worker.tiers.peer if key[0]]) == 6


@pytest.mark.parametrize("tokens", [10, 12])
def test_a_lent_prompt_has_its_state(tokens: int) -> None:
    setup = replace(TIERS, peers=True)
    sim, target = Simulation(setup), Simulation(replace(setup, tiers=(0, 0)))
    prompt = (PROMPT * 2)[:tokens]
    served(sim, [1], 1)  # the address is known then
    (request,) = sim.add(prompt, 1, lends=True)
    sim.drain()
    (source,) = [delta.page_source for delta in sim.ended.values() if delta.page_source]
    assert request.finished and source.num_tokens == 8
    target.worker.tiers.peer = sim.worker.tiers.peer
    (other,) = target.add(prompt, 3, source=source)
    target.drain()
    assert other.num_cached_tokens == 8


def test_a_state_of_a_failed_step_leaves_the_tiers() -> None:
    """It is stored while the step that copied it is in flight, as its request has ended."""
    for first in range(9):
        sim = Simulation(replace(TIERS, depth=2))
        sim.worker.num_drafts = 3
        (request,) = sim.add([first, *PROMPT], 20, stop_ids=frozenset())
        while not sim.scheduler._state_copies or len(request.token_ids) < 13:
            sim.plan()
            sim.deliver()
        sim.step_fails = True
        sim.plan()
        sim.end(request)
        assert sim.planned().stores
        sim.drain()
        sim.scheduler.kv.checkpoints.clear()
        served(sim, request.token_ids, 4)


def test_a_state_is_not_stored_before_the_plan_that_copies_it() -> None:
    sim = Simulation(TIERS)
    request = served(sim, PROMPT, 1)
    kv, moves = sim.scheduler.kv, sim.scheduler.moves
    moves.index.clear()
    prefix = kv.prefix_key(request, 8)
    row = sim.setup.max_num_seqs + kv.checkpoints.index_of(prefix)
    for copies, stores in (([(0, row)], False), ([], True)):
        kv.checkpoints.for_tiers.append(prefix)
        moves.begin(sim.now, SchedulerOutput(9, [], [], [], [], state_copies=copies))
        assert bool(moves._stores) is stores


def test_a_long_prefix_without_a_state_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulation(replace(TIERS, max_model_len=200))
    (request,) = sim.add([*range(160)], 1)
    sim.drain()
    kv, moves = sim.scheduler.kv, sim.scheduler.moves
    moves.forget_states(request.block_hashes)
    kv.checkpoints.clear()
    match, looks = kv.match(request), list[int]()
    lookup = BlockPool.lookup
    monkeypatch.setattr(BlockPool, "lookup", lambda *of: looks.append(1) or lookup(*of))
    assert moves.num_reachable(request, match) == match.num_tokens == 0
    assert len(looks) <= 2 * 40
