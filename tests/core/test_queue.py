"""The waiting queue, and requests with deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.simulation import Setup, Simulation

from kvik.core.queue import WaitingQueue
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import FinishReason, Request
from kvik.errors import CapacityError


def request(order: float, num_tokens: int = 3) -> Request:
    made = Request("r", 0, SamplingParams(), [1] * num_tokens, num_tokens, 9, frozenset(), 0, 0.0)
    made.order = (order, 0)
    return made


def test_requests_are_ordered_by_their_keys() -> None:
    queue = WaitingQueue(10, 100)
    requests = [request(key) for key in (3.0, 1.0, 2.0)]
    for r in requests:
        queue.add(r)
    assert [r.order[0] for r in queue] == [1.0, 2.0, 3.0]
    queue.remove(requests[2])
    assert queue.snapshot() == [requests[1], requests[0]]
    assert queue.num_tokens == 6
    with pytest.raises(RuntimeError, match="not in the queue"):
        queue.remove(requests[2])


def test_a_full_queue_refuses() -> None:
    queue = WaitingQueue(2, 100)
    queue.check_capacity(2, 6)
    queue.add(request(1.0))
    with pytest.raises(CapacityError, match="^max_queued_requests: .*1 of 2"):
        queue.check_capacity(2, 6)


def test_tokens_are_limited_except_in_an_empty_queue() -> None:
    queue = WaitingQueue(10, 100)
    queue.check_capacity(1, 1000)
    queue.add(request(1.0, 60))
    queue.check_capacity(1, 40)
    with pytest.raises(CapacityError, match="^max_queued_tokens: .*60 of 100"):
        queue.check_capacity(1, 41)


def test_each_tenant_has_its_own_queue() -> None:
    queue = WaitingQueue(10, 100)
    requests = [request(key) for key in (3.0, 1.0, 2.0)]
    for r, tenant in zip(requests, "aba", strict=True):
        r.tenant = tenant
        queue.add(r)
    assert queue.by_tenant == {"a": [requests[2], requests[0]], "b": [requests[1]]}
    queue.remove(requests[1])
    queue.remove(requests[2])
    assert queue.by_tenant == {"a": [requests[0]]}


# Requests that cannot meet their deadline are dropped early, others are not.


NO_STOP: frozenset[int] = frozenset()
SETUP = Setup(block_size=4, num_blocks=800, budget=32, max_num_seqs=4, max_model_len=1200)


def run(sim: Simulation, seconds: float) -> None:
    """Run steps of 0.1 s plus 0.01 s per token, until there is no work or the time is over."""
    end = sim.now + seconds
    while sim.scheduler.has_requests and sim.now < end:
        plan = sim.plan()
        sim._note(sim.scheduler.take_finished())
        if plan is not None:
            sim.now += 0.1 + 0.01 * plan.num_tokens
            sim.deliver()


def warm(setup: Setup = SETUP) -> Simulation:
    """Return a simulation that has measured steps of all sizes."""
    sim = Simulation(setup)
    for i in range(4):
        sim.add([i % 3] * 200, 20, stop_ids=NO_STOP)
    run(sim, 1000.0)
    sim.add([0], 40, stop_ids=NO_STOP)
    run(sim, 1000.0)
    return sim


def seconds_for(length: int, more: int = 0) -> float:
    """Return the time of a prompt alone, and of `more` tokens after the first."""
    full, rest = divmod(length, SETUP.budget)
    return full * 0.42 + (0.1 + 0.01 * rest if rest else 0.0) + more * 0.11


def ask(
    sim: Simulation, length: int, patience: float, min_tokens: int = 0, salt: str = "x"
) -> Request:
    params = SamplingParams(min_tokens=min_tokens)
    deadline = sim.now + patience
    return sim.add(
        [1] * length, 200, deadline=deadline, params=params, salt=salt, stop_ids=NO_STOP
    )[0]


@pytest.mark.parametrize("length", [1, 31, 32, 300, 900])
@pytest.mark.parametrize("min_tokens", [0, 1, 30])
def test_a_request_that_can_meet_its_deadline_is_not_dropped(length: int, min_tokens: int) -> None:
    sim = warm()
    patience = seconds_for(length, max(0, min_tokens - 1)) + 0.001
    request = ask(sim, length, patience, min_tokens)
    run(sim, 1000.0)
    assert request.finish_reason is FinishReason.DEADLINE  # of more tokens than required
    assert request.num_output_tokens >= max(1, min_tokens)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.1])
def test_a_request_that_cannot_meet_its_deadline_is_dropped_early(share: float) -> None:
    sim = warm()
    start = sim.now
    patience = share * seconds_for(900)
    request = ask(sim, 900, patience)
    run(sim, 1000.0)
    assert request.finish_reason is FinishReason.DEADLINE
    assert request.first_token is None
    gone = sim.ended[request.key].report
    # At once if it is hopeless, otherwise when that share of the remaining work is left.
    assert gone.finished - start <= max(0.0, patience - 3 * (seconds_for(900) - patience)) + 0.5


def test_a_request_without_time_for_min_tokens_is_dropped_before_the_first() -> None:
    sim = warm()
    request = ask(sim, 10, 2.0, min_tokens=100)
    run(sim, 0.01)
    assert request.finish_reason is FinishReason.DEADLINE
    assert request.num_output_tokens == 0


def test_a_text_that_falls_behind_is_dropped() -> None:
    sim = warm()
    request = ask(sim, 10, seconds_for(10, 60), min_tokens=60)
    run(sim, 2.0)
    start = sim.now
    for _ in range(3):
        sim.add([2] * 150, 100, stop_ids=NO_STOP)  # other requests slow the steps
    run(sim, 100.0)
    assert request.finish_reason is FinishReason.DEADLINE
    assert 0 < request.num_output_tokens < 60
    report = sim.ended[request.key].report
    assert start < report.finished < request.deadline - 0.3


def test_without_measurements_a_deadline_is_only_a_deadline() -> None:
    sim = Simulation(SETUP)
    request = ask(sim, 900, 5.0)
    run(sim, 1.0)
    assert not request.finished
    run(sim, 100.0)
    report = sim.ended[request.key].report
    assert report.finished >= 5.0


def test_cached_tokens_take_no_time_before_the_deadline() -> None:
    sim = warm()
    sim.add([1] * 900, 1, salt="x")
    run(sim, 1000.0)
    request = ask(sim, 901, 1.0)
    run(sim, 1000.0)
    assert request.first_token is not None


def test_siblings_need_only_the_last_token() -> None:
    sim = warm()
    patience = seconds_for(900) + 3.0
    siblings = sim.add([1] * 900, 3, n=3, deadline=sim.now + patience, stop_ids=NO_STOP)
    run(sim, 1000.0)
    assert {r.finish_reason for r in siblings} == {FinishReason.LENGTH}


def test_early_drops_leave_time_for_others() -> None:
    """In the time of two prompts, of which only the second can meet its deadline."""
    sim = warm(replace(SETUP, max_num_seqs=1))
    patience = seconds_for(600) + 1.0
    hopeless = ask(sim, 900, 0.7 * patience)
    other = ask(sim, 600, patience, salt="y")
    run(sim, 1000.0)
    assert hopeless.first_token is None
    assert other.first_token is not None


def test_drafts_may_yield_several_tokens_per_step() -> None:
    sim = warm()
    sim.scheduler.drafts.add(3, 3)
    request = ask(sim, 10, seconds_for(10, 15), min_tokens=45)  # four per step would suffice
    run(sim, 0.3)
    assert not request.finished


def test_a_prompt_without_output_can_have_a_deadline() -> None:
    sim = warm()
    hopeless = sim.add([1] * 900, 0, deadline=sim.now + 3.0)[0]
    run(sim, 0.01)
    assert hopeless.finish_reason is FinishReason.DEADLINE
