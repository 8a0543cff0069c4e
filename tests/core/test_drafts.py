"""Drafts: their results in a step, and the room they may take."""

from __future__ import annotations

import pytest
from helpers.fake_worker import EOS
from helpers.simulation import Setup, Simulation

from kvik.core.plan import ModelRunnerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import FinishReason, Request, TokenLogprobs

NO_STOP: frozenset[int] = frozenset()


def draft(sim: Simulation, request: Request, count: int) -> None:
    """Let the worker propose `count` tokens for the next step of a request."""
    request.num_draft_tokens = count
    sim.worker.rows[request.slot].drafts = [1] * count


def test_max_tokens_cuts_inside_an_accepted_run() -> None:
    sim = Simulation(Setup())
    sim.add([0, 0], max_tokens=4, stop_ids=NO_STOP)
    request = next(iter(sim.requests.values()))
    sim.answer(sim.planned(), [1])
    draft(sim, request, 5)
    plan = sim.planned()
    assert plan.num_draft_tokens == [2]  # only 1 + 2 tokens may follow
    (delta,) = sim.answer(plan, [1, 1, 1])
    assert (delta.token_ids, delta.finish_reason) == ([1, 1, 1], FinishReason.LENGTH)
    assert len(request.token_ids) == request.max_length


@pytest.mark.parametrize(("min_tokens", "kept"), [(0, [1, EOS]), (4, [1, EOS, 2, 1])])
def test_eos_cuts_inside_an_accepted_run(min_tokens: int, kept: list[int]) -> None:
    sim = Simulation(Setup())
    params = SamplingParams(min_tokens=min_tokens)
    request = sim.add([0, 0], max_tokens=20, params=params)[0]
    sim.answer(sim.planned(), [0])
    draft(sim, request, 3)
    plan = sim.planned()
    assert (plan.num_scheduled_tokens, plan.num_draft_tokens) == ([4], [3])
    logprobs = {0: [TokenLogprobs(token, -1.0, 1) for token in (1, EOS, 2, 1)]}
    sim.in_flight.popleft()
    output = ModelRunnerOutput(plan.step, [[1, EOS, 2, 1]], logprobs=logprobs)
    (delta,) = sim.scheduler.update(output, 0.0)
    assert delta.token_ids == kept
    assert [entry.token_id for entry in delta.logprobs or []] == kept
    assert delta.finish_reason is (None if min_tokens else FinishReason.STOP)
    sim.check()


def test_rejected_drafts_are_computed_again() -> None:
    sim = Simulation(Setup(block_size=2))
    request = sim.add([0, 0], max_tokens=20)[0]
    sim.answer(sim.planned(), [1])
    draft(sim, request, 4)
    plan = sim.planned()
    assert request.num_computed_tokens == 7
    sim.answer(plan, [1, 2])
    assert (len(request.token_ids), request.num_computed_tokens) == (5, 4)
    assert request.num_written_tokens == 4
    assert request.num_committed_blocks == 2
    assert request.num_draft_tokens == 0  # the result has none


def test_blocks_are_reserved_for_tokens_that_a_drafter_writes() -> None:
    sim = Simulation(Setup(block_size=2, lookahead=3))
    request = sim.add([0, 0], max_tokens=6, stop_ids=NO_STOP)[0]
    held = []
    while not request.finished:
        sim.answer(sim.planned(), [1])
        held.append(len(request.block_ids[0]) if request.block_ids else None)
    # The drafter writes up to three positions beyond the step's; a request has at most 8.
    assert held == [3, 3, 4, 4, 4, None]
    plain = sim.add([0, 0], max_tokens=6, params=SamplingParams(speculation=False))[0]
    sim.planned()
    assert len(plain.block_ids[0]) == 1


def test_blocks_for_a_drafter_preempt_no_request() -> None:
    sim = Simulation(Setup(block_size=2, num_blocks=2, lookahead=3))
    request = sim.add([0, 0, 0], max_tokens=1, stop_ids=NO_STOP)[0]
    sim.planned()
    assert len(request.block_ids[0]) == 2
    sim.drain()


@pytest.mark.parametrize(
    ("lengths", "num_blocks", "drafts"),
    [
        pytest.param([2, 2], 2, [1, 1], id="what the held blocks have room for"),
        pytest.param([2, 2], 3, [4, 1], id="one more block goes to the first"),
        pytest.param([2, 4], 3, [1, 3], id="a later row's own token before drafts"),
        pytest.param([2, 2], 4, [4, 4], id="room for all"),
        pytest.param([4, 4], 2, [3], id="preempted for an own token alone"),
    ],
)
def test_drafts_preempt_no_request(lengths: list[int], num_blocks: int, drafts: list[int]) -> None:
    sim = Simulation(Setup(num_blocks=num_blocks))
    requests = [sim.add([i] * n, 12, stop_ids=NO_STOP)[0] for i, n in enumerate(lengths)]
    sim.answer(sim.planned(), *([1] for _ in requests))
    for request in requests:
        draft(sim, request, 4)
    plan = sim.planned()
    assert plan.num_draft_tokens == drafts
    assert plan.num_scheduled_tokens == [1 + count for count in drafts]
    assert sim.scheduler.counters.preemptions == len(requests) - len(drafts)
    sim.deliver()


def test_drafts_take_no_block_that_a_prompt_needs() -> None:
    sim = Simulation(Setup(num_blocks=4, budget=8))
    first = sim.add([0] * 2, 12, stop_ids=NO_STOP)[0]
    sim.add([1] * 12, 2)
    sim.answer(sim.planned(), [1], [])
    draft(sim, first, 4)
    plan = sim.planned()
    assert (plan.num_scheduled_tokens, plan.num_draft_tokens) == ([2, 3], [1, 0])


def test_drafts_take_no_token_budget_from_another_tenant() -> None:
    sim = Simulation(Setup(num_blocks=3))
    requests = [sim.add([i] * 2, 12, stop_ids=NO_STOP, tenant="a")[0] for i in range(2)]
    sim.answer(sim.planned(), [1], [1])
    for request in requests:
        draft(sim, request, 4)
    sim.add([2] * 2, 2, tenant="b")
    plan = sim.planned()
    assert (plan.num_scheduled_tokens, plan.num_draft_tokens) == ([2, 2, 2], [1, 1, 0])
    assert sim.scheduler.counters.preemptions == 0


def test_drafts_are_not_scheduled_after_drafts_in_flight() -> None:
    sim = Simulation(Setup(depth=2))
    request = sim.add([0, 0], max_tokens=20)[0]
    sim.answer(sim.planned(), [1])
    draft(sim, request, 2)
    plan = sim.planned()
    assert sim.plan() is None
    sim.answer(plan, [2])
    assert sim.plan() is not None


def test_tokens_accepted_after_the_end_are_not_cached() -> None:
    sim = Simulation(Setup(block_size=2))
    request = sim.add([0, 0], max_tokens=20)[0]
    sim.answer(sim.planned(), [1])
    draft(sim, request, 3)
    sim.answer(sim.planned(), [EOS, 1, 1, 1])
    assert request.token_ids == [0, 0, 1, EOS]
    assert sim.scheduler.kv.pool.num_cached == 2
