"""Admission: limits of the queue, deadlines, and shorter answers under pressure."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.tiers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvik.core.sampling_params import SamplingParams
from kvik.errors import CapacityError, OverloadError
from kvik.server.admission import (
    FREE_MULTIPLE,
    Admission,
    Reservation,
    StartRate,
    pressure,
    shortened,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(requests=10, tokens=1000, *, shared=True) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(requests, tokens, shared=shared, clock=clock), clock


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_the_bounds_of_the_queue_hold_for_all_tenants(tenant):
    queue, _ = admission(shared=False)
    queue.admit("a", 10, 10)
    with pytest.raises(OverloadError) as caught:
        queue.admit(tenant, 1, 1)
    assert not caught.value.of_caller
    tokens, _ = admission(shared=False)
    tokens.admit("a", 1, 999)
    with pytest.raises(OverloadError):
        tokens.admit(tenant, 1, 2)
    tokens.admit(tenant, 1, 1)


def test_a_single_tenant_may_use_everything():
    queue, _ = admission(100, shared=False)
    for _ in range(100):
        queue.admit("", 1, 1)
    assert queue.fill == 1.0


def test_a_flood_leaves_places_for_new_tenants():
    queue, _ = admission(90, 1 << 30)
    flooded = 0
    with pytest.raises(OverloadError) as caught:
        while True:
            queue.admit("flood", 1, 1)
            flooded += 1
    assert caught.value.of_caller
    assert flooded == 90 * FREE_MULTIPLE // (1 + FREE_MULTIPLE)
    for _ in range(8):  # requests of another tenant are still accepted
        queue.admit("newcomer", 1, 1)
    with pytest.raises(OverloadError) as caught:
        queue.admit("flood", 1, 1)
    assert caught.value.of_caller


def test_a_flood_of_tokens_leaves_places_for_new_tenants():
    queue, _ = admission(1000, 9000)
    with pytest.raises(OverloadError) as caught:
        for _ in range(100):
            queue.admit("flood", 1, 500)
    assert caught.value.of_caller
    queue.admit("newcomer", 1, 500)


def test_the_time_to_retry_is_measured():
    queue, clock = admission(200, 4000, shared=False)
    tickets = [queue.admit("", 1, 10) for _ in range(200)]
    for ticket in tickets[:20]:  # 2 requests per second
        clock.now += 0.5
        ticket.started(0)
    for _ in range(20):
        queue.admit("", 1, 10)
    for n, expected in [(1, 1), (10, 5), (50, 25), (128, 60)]:
        with pytest.raises(OverloadError) as caught:
            queue.check("", n, 10 * n)
        assert abs(caught.value.retry_after - expected) <= 1


def test_without_measurements_the_time_to_retry_is_a_second():
    queue, _ = admission(1)
    queue.admit("", 1, 1)
    with pytest.raises(OverloadError) as caught:
        queue.admit("", 1, 1)
    assert caught.value.retry_after == 1.0


def test_a_deadline_that_the_queue_cannot_meet():
    queue, clock = admission(100, 10**6, shared=False)
    queue.check_deadline("", clock.now + 0.001)  # nothing is known, and no request waits
    tickets = [queue.admit("", 1, 10) for _ in range(40)]
    queue.check_deadline("", clock.now + 0.001)
    for ticket in tickets[:20]:
        clock.now += 0.5
        ticket.started(0)
    queue.check_deadline("", clock.now + 12)  # 20 wait, 2 start each second
    with pytest.raises(OverloadError, match="0 ms are left, .* take about 10000 ms"):
        queue.check_deadline("", clock.now - 0.001)  # it passed while the body was read
    with pytest.raises(OverloadError, match="8000 ms are left, .* take about 10000 ms") as caught:
        queue.check_deadline("", clock.now + 8)
    assert caught.value.field == "deadline_ms"
    assert not caught.value.of_caller
    assert caught.value.retry_after >= 1


def test_a_flood_of_another_tenant_hardly_changes_estimates():
    queue, clock = admission(1000, 10**6)
    tickets = [queue.admit("flood", 1, 10) for _ in range(100)]
    for ticket in tickets[:20]:
        clock.now += 0.5
        ticket.started(0)
    with pytest.raises(OverloadError):
        queue.check_deadline("flood", clock.now + 8)
    queue.check_deadline("newcomer", clock.now + 8)


def test_idle_seconds_do_not_count_for_the_start_rate():
    pace = StartRate(0.0)
    for at in range(0, 1000, 10):  # a request every ten seconds, which waits 0.1 s
        pace.advance(at, busy=False)
        pace.advance(at + 0.1, busy=True)
        pace.add(1, 100)
    assert pace.estimate(10, 0, cautious=True) == pytest.approx(1.0, rel=0.01)


def test_the_start_rate_follows_changes():
    pace = StartRate(0.0)
    for step in range(2000):
        pace.advance(step * 0.1, busy=True)
        pace.add(1 if step < 1000 else 4, 1)
    assert pace.estimate(40, 0, cautious=True) == pytest.approx(1.0, rel=0.05)


class QueueMachine(RuleBasedStateMachine):
    """Any order of starts, ends and refusals returns reservations exactly once."""

    @initialize(shared=st.booleans())
    def begin(self, shared: bool) -> None:
        self.queue, self.clock = admission(20, 400, shared=shared)
        self.left: dict[Reservation, tuple[str, int, int]] = {}  # tenant, siblings, tokens of each
        self.ended: list[Reservation] = []

    @rule(
        tenant=st.sampled_from("abc"),
        n=st.integers(1, 6),
        tokens=st.integers(1, 120),
        seconds=st.floats(0, 2),
    )
    def arrive(self, tenant: str, n: int, tokens: int, seconds: float) -> None:
        self.clock.now += seconds
        alone = not self.queue.num_waiting
        try:
            self.left[self.queue.admit(tenant, n, tokens)] = (tenant, n, tokens)
        except OverloadError as error:
            assert 1 <= error.retry_after <= 60
            assert not (alone and n <= 20)

    @precondition(lambda self: self.left)
    @rule(data=st.data(), seconds=st.floats(0, 2))
    def start(self, data: st.DataObject, seconds: float) -> None:
        self.clock.now += seconds
        ticket = data.draw(st.sampled_from(list(self.left)))
        tenant, n, tokens = self.left[ticket]
        ticket.started(n - 1)
        self.left[ticket] = (tenant, max(0, n - 1), tokens)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.left)))
        ticket.release()
        del self.left[ticket]
        self.ended.append(ticket)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), again=st.booleans())
    def tell_twice(self, data: st.DataObject, again: bool) -> None:
        ticket = data.draw(st.sampled_from(self.ended))
        ticket.release() if again else ticket.started(0)

    @invariant()
    def counts(self) -> None:
        requests = sum(n for _, n, _ in self.left.values())
        tokens = sum(n * each for _, n, each in self.left.values())
        assert (self.queue.num_waiting, self.queue.waiting_tokens) == (requests, tokens)
        each = Counter()
        for tenant, n, _ in self.left.values():
            each[tenant] += n
        held = {tenant: waiting.requests for tenant, waiting in self.queue._tenants.items()}
        assert held == {tenant: n for tenant, n in each.items() if n}
        assert requests <= 20


QueueMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestQueueMachine = QueueMachine.TestCase


def test_requests_larger_than_the_queue_are_client_errors() -> None:
    """A later retry would not help."""
    queue, _ = admission(8, shared=False)
    with pytest.raises(
        CapacityError, match="n: counts as 9 requests, and the queue holds at most 8"
    ):
        queue.check("", 9)
    queue.check("", 8)


@pytest.mark.parametrize(
    ("fill", "kv", "waiting", "expected"),
    [(0.0, 1.0, False, 0.0), (0.0, 1.0, True, 1.0), (0.6, 0.2, True, 0.6), (0.1, 0.9, True, 0.9)],
)
def test_a_full_cache_only_shortens_answers_that_wait_for_it(fill, kv, waiting, expected):
    assert pressure(fill, kv, waiting=waiting) == expected


@pytest.mark.parametrize(
    ("asked", "least", "given"),
    [(None, 0, 8), (100, 0, 8), (8, 0, 8), (3, 0, 3), (100, 50, 50), (None, 9, 9)],
)
def test_the_cap_is_never_below_the_minimum(asked, least, given):
    params = SamplingParams(max_tokens=asked, min_tokens=least)
    assert shortened(params, 8).max_tokens == given
