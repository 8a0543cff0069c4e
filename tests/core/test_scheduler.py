"""Guarantees of the scheduler, one per test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulation import Setup, Simulation
from helpers.windows import Seen, chunks

from kvik.core.config import POLICIES
from kvik.core.kv_manager import KVCacheManager
from kvik.core.plan import ModelRunnerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import FinishReason, Pin, Request, RequestStatus, TokenLogprobs

NO_STOP: frozenset[int] = frozenset()


def test_a_prompt_is_computed_in_chunks_within_the_budget() -> None:
    sim = Simulation(Setup(budget=6))
    sim.add([0] * 14, max_tokens=2)
    sim.add([1] * 3, max_tokens=1)
    plans = [sim.step() for _ in range(4)]
    rows = [plan and (plan.num_scheduled_tokens, plan.samples) for plan in plans]
    assert rows[:3] == [([6], [False]), ([6], [False]), ([2, 3], [True, True])]
    assert rows[3] == ([1], [True])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_whole_prompts_are_never_cut(policy: str, depth: int) -> None:
    """A step takes prompts that fit; one that does not fit is not overtaken, and none is cached."""
    setup = Setup(
        budget=16,
        max_num_seqs=4,
        whole_prompts=True,
        caching=False,
        policy=policy,
        depth=depth,
        max_wait=0.0,
        more_expected=False,
    )
    sim = Simulation(setup)
    lengths = [16, 5, 7, 6, 1, 1, 1, 1, 2, 15, 3]
    for length in lengths:
        sim.add([7] * length, pooling="mean")
    steps = []
    while sim.scheduler.has_requests:
        plan = sim.step()
        if plan is not None:
            steps.append(plan.num_scheduled_tokens)
    assert sorted(n for step in steps for n in step) == sorted(lengths)
    if policy == "fcfs" and depth == 1:  # steps in flight hold rows
        assert steps == [[16], [5, 7], [6, 1, 1, 1], [1, 2], [15], [3]]
    assert sim.scheduler.kv.pool.num_free == sim.scheduler.kv.pool.num_blocks


def test_decodes_go_before_prefill_chunks() -> None:
    sim = Simulation(Setup(budget=5))
    late = sim.add([1] * 12, max_tokens=3, priority=0)[0]
    sim.step()
    early = sim.add([0], max_tokens=30, stop_ids=NO_STOP)[0]
    while early.first_token is None:
        sim.step()
    sim.add([2] * 12)
    plan = sim.planned()
    assert late.order < early.order
    assert plan.num_scheduled_tokens == [1, 1, 3]
    assert plan.samples == [True, True, False]
    sim.deliver()
    plan = sim.planned()
    assert plan.num_scheduled_tokens == [1, 1, 3]


def test_the_stages_of_a_pipeline_have_different_requests() -> None:
    """No row continues before its token is known. Decodes are spread over the steps in flight,
    chunks of prompts are not."""
    sim = Simulation(Setup(depth=2, stages=2, max_num_seqs=5, budget=16, max_model_len=128))
    requests = [sim.add([i, i, i], 40, stop_ids=NO_STOP)[0] for i in range(4)]
    first = sim.planned()
    assert len(first.slots) == 4 and sim.plan() is None  # no token is known yet
    sim.deliver()
    for _ in range(6):
        plans = [sim.planned(), sim.planned()]
        assert [len(plan.slots) for plan in plans] == [2, 2]
        assert set(plans[0].slots).isdisjoint(plans[1].slots)
        assert sim.plan() is None
        sim.deliver()
        sim.deliver()
    late = sim.add([9] * 20, 4)[0]
    plans = [sim.planned(), sim.planned()]
    assert [plan.num_scheduled_tokens for plan in plans] == [[1, 1, 14], [1, 1, 6]]
    assert {len(request.token_ids) for request in requests} == {3 + 7} and late.slot is not None


def test_a_decode_row_costs_a_few_integers() -> None:
    sim = Simulation(Setup(block_size=4, max_model_len=64))
    request = sim.add([0] * 5, max_tokens=30, stop_ids=NO_STOP)[0]
    sim.step()
    new_blocks = []
    for _ in range(12):
        plan = sim.planned()
        assert (plan.slots, plan.num_scheduled_tokens) == ([request.slot], [1])
        assert not (plan.new_requests or plan.freed_slots or plan.block_copies)
        new_blocks.append([len(ids) for _, _, ids in plan.new_blocks])
        sim.answer(plan, [1])
    # Tokens 6... are computed: a block is added when a token crosses its boundary, at 8, 12, 16.
    assert new_blocks == [[1] if fed % 4 == 0 else [] for fed in range(5, 17)]


def test_a_full_prefix_hit_computes_one_token() -> None:
    sim = Simulation(Setup(block_size=4))
    sim.add([0] * 8, max_tokens=1)
    sim.drain()
    again = sim.add([0] * 8, max_tokens=1)[0]
    plan = sim.planned()
    assert again.num_cached_tokens == 4
    assert plan.num_scheduled_tokens == [4]
    longer = sim.add([0] * 9, max_tokens=1)[0]
    plan = sim.planned()
    assert plan.num_scheduled_tokens == [1]
    assert longer.num_cached_tokens == 8
    sim.drain()
    counters = sim.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (8 + 8 + 9, 12)


def test_outputs_are_cached_too() -> None:
    sim = Simulation(Setup(block_size=2))
    tokens = sim.add([0, 1, 1], max_tokens=6)[0].token_ids
    sim.drain()
    turn = sim.add([*tokens, 0], max_tokens=1)[0]
    sim.planned()
    assert len(tokens) == 9
    assert turn.num_cached_tokens == 8  # the ninth token was sampled, but its K/V never computed


def test_a_token_in_flight_does_not_delay_the_next_step() -> None:
    sim = Simulation(Setup(depth=2))
    request = sim.add([0, 0], max_tokens=3, stop_ids=NO_STOP)[0]
    plans = [sim.planned(), sim.planned(), sim.planned()]
    assert request.num_pending_tokens == 3
    assert sim.plan() is None  # all requests are in flight
    for plan in plans:
        sim.answer(plan, [1])
    assert request.finish_reason is FinishReason.LENGTH


def test_tokens_in_flight_of_an_ended_request_are_dropped() -> None:
    sim = Simulation(Setup(depth=2))
    request = sim.add([0, 0], max_tokens=9)[0]
    plans = [sim.planned(), sim.planned()]
    sim.end(request)
    assert sim.scheduler.kv.pool.num_free == sim.scheduler.kv.pool.num_blocks
    assert [sim.answer(plan, [1]) for plan in plans] == [[], []]
    assert request.token_ids == [0, 0]


def test_freed_slots_are_announced_before_they_are_used_again() -> None:
    sim = Simulation(Setup(max_num_seqs=1))
    first, second = sim.add([0])[0], sim.add([1])[0]
    sim.planned()
    sim.end(first)
    sim.deliver()
    plan = sim.planned()
    assert plan.freed_slots == [0]
    assert [new.slot for new in plan.new_requests] == [0] == [second.slot]
    sim.deliver()
    assert sim.planned().freed_slots == []


def test_a_preempted_request_resumes_with_prefix_hits() -> None:
    sim = Simulation(Setup(block_size=2, num_blocks=7))  # 7 blocks
    first = sim.add([0] * 5, max_tokens=8, stop_ids=NO_STOP)[0]
    second = sim.add([1] * 4, max_tokens=2, stop_ids=NO_STOP)[0]
    third = sim.add([2] * 3, max_tokens=6, stop_ids=NO_STOP)[0]
    while not third.num_preemptions:
        plan = sim.planned()
        sim.answer(plan, *[[1]] * len(plan.slots))
    assert third.status is RequestStatus.PREEMPTED
    assert not first.num_preemptions
    known = len(third.token_ids)
    while third.status is not RequestStatus.RUNNING:
        plan = sim.planned()
        if third.status is not RequestStatus.RUNNING:
            sim.answer(plan, *[[1]] * len(plan.slots))
    (new,) = plan.new_requests
    assert new.token_ids == third.token_ids
    assert new.num_prompt_tokens == 3
    assert 0 < new.num_computed_tokens < known
    assert third.num_cached_tokens == 0  # at its first scheduling; its own blocks are no hit
    assert second.finished


def test_siblings_wait_for_their_leader_and_share_its_blocks() -> None:
    sim = Simulation(Setup(block_size=4))
    siblings = sim.add([0] * 7, max_tokens=6, n=3, stop_ids=NO_STOP)
    sim.answer(sim.planned(), [1])
    plan = sim.planned()
    assert plan.num_scheduled_tokens == [1, 1, 1]
    source, full = siblings[0].block_ids[0][1], siblings[0].block_ids[0][0]
    assert [copy[0] for copy in plan.block_copies] == [source, source]
    assert len({r.block_ids[0][1] for r in siblings}) == 3
    assert {r.block_ids[0][0] for r in siblings} == {full}
    assert [r.num_cached_tokens for r in siblings] == [0, 6, 6]


SHARED = [1, 2, 3, 1, 2, 2, 3, 3]  # two blocks


def first_chunks(sim: Simulation) -> list[dict[str, int]]:
    """Return the prompt tokens of each step by request, until all have begun to decode."""
    steps = []
    while any(r.first_token is None and not r.finished for r in sim.requests.values()):
        plan = sim.planned()
        by_slot = {r.slot: r for r in sim.scheduler.running}
        rows = [
            (by_slot[slot].request_id, tokens)
            for slot, tokens in zip(plan.slots, plan.num_scheduled_tokens, strict=True)
            if by_slot[slot].first_token is None
        ]
        steps.append(dict(rows))
        sim.deliver()
    return steps


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    sim = Simulation(Setup(budget=64))
    requests = [sim.add([*SHARED, i], stop_ids=NO_STOP)[0] for i in range(4)]
    assert first_chunks(sim) == [{"r0": 9}, {"r1": 1, "r2": 1, "r3": 1}]
    assert [r.num_cached_tokens for r in requests] == [0, 8, 8, 8]
    kv = sim.scheduler.kv
    assert kv.pool.num_blocks - kv.pool.num_free == 2 + 4


@pytest.mark.parametrize(
    ("setup", "second", "steps"),
    [
        # it follows the other request chunk by chunk, as far as they agree
        (Setup(budget=4), [*SHARED, 0], [{"r0": 4}, {"r0": 4}, {"r0": 1, "r1": 1}]),
        (Setup(budget=6), [*SHARED[:4], *SHARED], [{"r0": 6}, {"r0": 3, "r1": 3}, {"r1": 5}]),
        # no common full block, another salt, no cache: nothing to wait for
        (Setup(budget=32), [*SHARED[:3], 0, 0, 0], [{"r0": 9, "r1": 6}]),
        (Setup(budget=32, caching=False), [*SHARED, 0], [{"r0": 9, "r1": 9}]),
    ],
)
def test_a_request_waits_only_for_blocks_that_are_being_computed(
    setup: Setup, second: list[int], steps: list[dict[str, int]]
) -> None:
    sim = Simulation(setup)
    sim.add([*SHARED, 0], stop_ids=NO_STOP)
    sim.add(second, stop_ids=NO_STOP)
    assert first_chunks(sim) == steps


def test_prefixes_with_different_salts_are_computed_separately() -> None:
    sim = Simulation(Setup(budget=32))
    for salt in ("a", "b"):
        sim.add([*SHARED, 0], salt=salt, stop_ids=NO_STOP)
    assert first_chunks(sim) == [{"r0": 9, "r1": 9}]


def test_a_request_waits_at_most_the_time_of_its_prefix() -> None:
    def steps(seconds_per_step: float) -> list[dict[str, int]]:
        sim = Simulation(Setup(budget=32))
        for i in range(40):  # each prompt token takes 10 ms more
            for tokens, start in ((1, 10.0 * i), (16, 10.0 * i + 5)):
                seconds = seconds_per_step + 0.01 * (tokens if tokens > 1 else 0)
                sim.scheduler.clock.note(start, start + seconds, tokens, prefill=tokens > 1)
        for i in range(2):
            sim.add([*SHARED, i], stop_ids=NO_STOP)
        return first_chunks(sim)

    assert steps(0.001) == [{"r0": 9}, {"r1": 1}]
    assert steps(1.0) == [{"r0": 9, "r1": 9}]


def test_later_prompts_do_not_delay_a_waiting_one() -> None:
    sim = Simulation(Setup(budget=24, max_num_seqs=8))
    for i in range(2):
        sim.add([*SHARED, i], stop_ids=NO_STOP)
    long = sim.add([3, *range(1, 5)] * 8, stop_ids=NO_STOP)[0]
    sim.add([2] * 6, stop_ids=NO_STOP)  # fits in the room that the second leaves
    sim.add([3] * 6, stop_ids=NO_STOP)  # does not fit
    steps = first_chunks(sim)
    assert steps[:2] == [{"r0": 9, "r3": 6}, {"r1": 1, "r2": 21}]
    assert long.num_output_tokens


@pytest.mark.parametrize("end", ["row", "step", "abort"])
def test_a_request_computes_a_shared_prefix_whose_owner_ended(end: str) -> None:
    sim = Simulation(Setup(budget=32))
    first, second = (sim.add([*SHARED, i], stop_ids=NO_STOP)[0] for i in range(2))
    sim.failing_row = 0 if end == "row" else None
    sim.step_fails = end == "step"
    sim.planned()
    if end == "abort":
        sim.scheduler.end(first, FinishReason.ABORT, sim.now)
    sim.deliver()
    assert first.finished
    assert first_chunks(sim) == [{"r1": 9}]
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_request_that_waits_for_a_prefix_joins_its_batch(policy: str) -> None:
    sim = Simulation(Setup(policy=policy, batch_size=3, budget=32))
    for i in range(3):
        sim.add([*SHARED, i], stop_ids=NO_STOP)
    other = sim.add([3, 3], stop_ids=NO_STOP)[0]
    sim.step()
    assert sim.step() is not None
    assert len(sim.scheduler.running) == 3
    assert other.first_scheduled is None


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    sim = Simulation(Setup(max_num_seqs=1))
    running = sim.add([0], max_tokens=60, deadline=1.0, stop_ids=NO_STOP)[0]
    waiting = sim.add([1], deadline=2.0)[0]
    sim.plan()
    assert sim.scheduler.wakeup(0.0) == 1.0
    sim.now = 1.0
    sim.scheduler.schedule(sim.now)
    assert running.finish_reason is FinishReason.DEADLINE
    assert waiting.status is RequestStatus.RUNNING  # it took the slot
    (delta,) = sim.scheduler.take_finished()
    assert (delta.report.arrival, delta.report.finished) == (0.0, 1.0)
    assert sim.scheduler.take_finished() == []


def test_a_row_that_fails_ends_its_request_alone_and_leaves_nothing_cached() -> None:
    sim = Simulation(Setup(block_size=2))
    bad, good = sim.add([0] * 4)[0], sim.add([1] * 4)[0]
    sim.planned()
    sim.deliver()
    cached = sim.scheduler.kv.pool.num_cached
    sim.failing_row = 0
    plan = sim.planned()
    assert plan.slots[0] == bad.slot
    deltas = sim.deliver()
    assert [(d.finish_reason, d.error) for d in deltas if d.finish_reason] == [
        (FinishReason.ERROR, "sampling failed")
    ]
    assert sim.scheduler.kv.pool.num_cached < cached
    assert good.status is RequestStatus.RUNNING
    sim.drain()


def test_an_exception_ends_its_request_alone() -> None:
    sim = Simulation(Setup())
    bad, good = sim.add([0] * 4)[0], sim.add([1] * 4)[0]
    plan = sim.planned()
    sim.in_flight.popleft()
    output = ModelRunnerOutput(plan.step, [[["not a token"]], [1]])
    deltas = sim.scheduler.update(output, 0.0)
    sim.check()
    assert [d.finish_reason for d in deltas] == [FinishReason.ERROR, None]
    assert deltas[0].error.startswith("TypeError")
    assert (bad.finished, good.finished) == (True, False)


@pytest.mark.parametrize("name", ["commit", "pin"])
def test_an_error_at_the_last_token_ends_its_request_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulation(Setup())
    bad, good = (sim.add([i] * 4, 1, tenant=t, pins=(Pin(4, 9.0),))[0] for i, t in enumerate("ab"))
    genuine = getattr(KVCacheManager, name)

    def broken(self: KVCacheManager, request: Request, *rest: float) -> None:
        if request is bad:
            raise ZeroDivisionError(name)
        genuine(self, request, *rest)

    sim.planned()
    monkeypatch.setattr(KVCacheManager, name, broken)
    deltas = sim.deliver()  # also runs the audit
    assert [d.finish_reason for d in deltas if d.request_id == bad.request_id] == [
        FinishReason.ERROR
    ]
    assert good.finish_reason is FinishReason.LENGTH
    assert not sim.scheduler.shares.accounts


@pytest.mark.parametrize(("window", "budget", "length"), [(4, 2, 6), (4, 4, 24), (5, 2, 12)])
def test_a_single_request_waits_for_blocks_freed_by_its_steps_in_flight(
    window: int, budget: int, length: int
) -> None:
    """With a window and just enough blocks. It must not preempt itself repeatedly."""
    setup = Setup(
        block_size=1, num_blocks=1, windows=(window,), budget=budget, max_num_seqs=1, depth=3
    )
    needed = Simulation(setup).scheduler.kv.config.max_blocks(length + 20, budget)
    sim = Simulation(replace(setup, num_blocks=needed))
    sim.add([i % 3 for i in range(length)], 20, stop_ids=NO_STOP)
    sim.drain(max_steps=200)
    assert sim.scheduler.counters.preemptions == 0


def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    sim = Simulation(Setup(max_num_seqs=2))
    requests = [sim.add([i % 3] * 3)[0] for i in range(3)]
    sim.step_fails = True
    sim.planned()
    deltas = sim.deliver()
    assert [d.error for d in deltas] == ["the step failed"] * 2
    assert [r.finished for r in requests] == [True, True, False]
    sim.drain()
    assert sim.ended[requests[2].key].error is None


def test_prompt_logprobs_are_delivered_once() -> None:
    sim = Simulation(Setup())
    request = sim.add([0, 1], params=SamplingParams(prompt_logprobs=0))[0]
    plan = sim.planned()
    logprobs = [TokenLogprobs(1, -1.0, 1)]
    sim.in_flight.popleft()
    output = ModelRunnerOutput(plan.step, [[1]], prompt_logprobs={0: logprobs})
    first, second = sim.scheduler.update(output, 0.0)
    assert (first.prompt_logprobs, first.token_ids) == (logprobs, [])
    assert second.token_ids == [1]
    assert request.params.prompt_logprobs is None


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
def test_a_prompt_preempted_with_its_last_chunk_in_flight_ends_once(pooling: str | None) -> None:
    sim = Simulation(Setup(depth=2, num_blocks=2))
    sim.add([0] * 4, max_tokens=4, stop_ids=NO_STOP)
    request = sim.add([1] * 4, max_tokens=0, pooling=pooling)[0]
    sim.planned()
    sim.planned()
    assert request.status is RequestStatus.PREEMPTED
    deltas = [delta for delta in sim.deliver() if delta.request_id == request.request_id]
    reason = FinishReason.LENGTH if pooling is None else FinishReason.STOP
    assert [d.finish_reason for d in deltas if d.finish_reason] == [reason]
    sim.drain()


def test_results_must_come_in_order() -> None:
    sim = Simulation(Setup(depth=2))
    sim.add([0])
    sim.planned()
    late = sim.planned()
    with pytest.raises(RuntimeError, match="result of step 1 while 0 is due"):
        sim.scheduler.update(ModelRunnerOutput(late.step, [[1]]), 0.0)


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (chunks(6),)])
def test_max_request_tokens_is_the_longest_request_that_can_be_served(
    windows: tuple[Seen, ...],
) -> None:
    setup = Setup(windows=windows, block_size=2, budget=4, num_blocks=15, max_model_len=100)
    longest = max(n for n in range(1, 100) if Simulation(setup).fits(n))
    assert longest == 30 if windows == (None,) else longest < 30 if None in windows else 99
    for output in (1, longest - 1):
        sim = Simulation(setup)
        request = sim.add([0] * (longest - output), max_tokens=output, stop_ids=NO_STOP)[0]
        while sim.scheduler.has_requests:
            plan = sim.planned()
            sim.answer(plan, [1] if plan.samples[0] else [])
        assert len(request.token_ids) == longest
        assert request.num_preemptions == 0


def test_a_scheduler_without_work_is_idle() -> None:
    scheduler = Scheduler(Setup().scheduler, Setup().cache)
    assert scheduler.schedule(0.0) is None
    assert scheduler.wakeup(0.0) is None
    assert not scheduler.has_requests


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    """With others running, a prompt is admitted only if all of it fits, not just its first
    chunk."""
    sim = Simulation(Setup(block_size=2, num_blocks=7, budget=4))
    first = sim.add([0] * 4, max_tokens=3, stop_ids=NO_STOP)[0]
    sim.answer(sim.planned(), [1])
    large = sim.add([1] * 12, max_tokens=1)[0]
    while not first.finished:
        sim.answer(sim.planned(), [1])
        assert large.first_scheduled is None
    sim.planned()
    assert large.status is RequestStatus.RUNNING
    assert sim.scheduler.counters.preemptions == 0


def test_a_step_that_preempts_admits_no_request() -> None:
    sim = Simulation(Setup(policy="priority", block_size=2, num_blocks=5, budget=8))
    for token in (0, 1):
        sim.add([token] * 3, max_tokens=9, stop_ids=NO_STOP)
    for _ in range(2):
        sim.answer(sim.planned(), [1], [1])
    urgent = sim.add([2], max_tokens=1, priority=-1)[0]
    plan = sim.planned()  # a third block for the first; the second is preempted
    assert sim.scheduler.counters.preemptions == 1
    assert plan.num_scheduled_tokens == [1]
    sim.answer(plan, [1])
    assert [new.slot for new in sim.planned().new_requests] == [urgent.slot]


def test_distant_deadlines_of_ended_requests_are_dropped() -> None:
    sim = Simulation(Setup())
    for _ in range(300):
        sim.add([0], max_tokens=1, deadline=1e9)
        sim.step()
    assert not sim.scheduler.has_requests
    assert len(sim.scheduler.deadlines) < 70
