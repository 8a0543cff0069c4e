"""The order of requests, and how long they may wait."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from helpers.fake_worker import expected_output
from helpers.simulation import Setup, Simulation

from kvik.core.config import POLICIES
from kvik.core.policy import make_policy
from kvik.core.types import Request, RequestStatus
from kvik.errors import ConfigError

NO_STOP: frozenset[int] = frozenset()


def order_of_service(sim: Simulation) -> list[str]:
    """Return request ids in the order of their first scheduling, one at a time."""
    assert sim.setup.max_num_seqs == 1
    seen: list[str] = []
    while sim.scheduler.has_requests or sim.in_flight:
        sim.step()
        sim.now += 0.1
        seen += [r.request_id for r in sim.scheduler.running if r.request_id not in seen]
        seen += [key[0] for key in sim.ended if key[0] not in seen]
    return seen


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy: must be one of fcfs, .*, not 'lifo'"):
        make_policy(Setup(policy="lifo").scheduler, lambda request: 0)


def test_short_prompts_first() -> None:
    sim = Simulation(Setup(policy="shortest-prefill-first", max_num_seqs=1))
    for length in (9, 1, 5):
        sim.add([length % 3] * length, max_tokens=1)
    assert order_of_service(sim) == ["r1", "r2", "r0"]


def test_a_long_prompt_is_overtaken_for_a_bounded_time() -> None:
    sim = Simulation(Setup(policy="shortest-prefill-first", max_num_seqs=1, ageing=10.0))
    sim.add([0] * 50)  # 50 tokens weigh as much as half a second of waiting
    sim.now = 0.4
    before = sim.add([1])[0]
    sim.now = 0.6
    after = sim.add([1])[0]
    assert [r.request_id for r in sim.scheduler.waiting] == [
        before.request_id,
        "r0",
        after.request_id,
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_only_one_policy_uses_priorities(policy: str) -> None:
    sim = Simulation(Setup(policy=policy, max_num_seqs=1, batch_size=1))
    for priority in (1, 0, -1):
        sim.add([0, 1, 2], max_tokens=1, priority=priority)
    expected = ["r2", "r1", "r0"] if policy == "priority" else ["r0", "r1", "r2"]
    assert order_of_service(sim) == expected


def test_ageing_keeps_a_stream_of_urgent_requests_from_starving_others() -> None:
    sim = Simulation(Setup(policy="priority", max_num_seqs=1, ageing=1.0))
    patient = sim.add([0], max_tokens=1, priority=3)[0]
    for _ in range(100):
        sim.add([1], max_tokens=1, priority=0)
        sim.step()
        sim.now += 0.1
        if patient.finished:
            break
    assert 2.9 <= patient.first_scheduled <= 3.5  # three levels, one second each


def test_a_request_of_low_priority_is_preempted_for_blocks() -> None:
    sim = Simulation(Setup(policy="priority", block_size=2, num_blocks=9))
    low = sim.add([0] * 4, max_tokens=10, priority=1, stop_ids=NO_STOP)[0]
    sim.step()
    high = sim.add([1] * 4, max_tokens=10, priority=0, stop_ids=NO_STOP)[0]
    while not (low.num_preemptions or high.num_preemptions):
        sim.step()
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_cached_prompts_first() -> None:
    sim = Simulation(Setup(policy="longest-prefix-match", max_num_seqs=1))
    sim.add([0] * 9, max_tokens=1)
    sim.drain()
    sim.add([1] * 9, max_tokens=1)
    sim.add([0] * 4 + [1] * 5, max_tokens=1)
    sim.add([0] * 9, max_tokens=1)
    assert order_of_service(sim)[1:] == ["r3", "r2", "r1"]


def test_an_uncached_prompt_waits_at_most_its_ageing() -> None:
    sim = Simulation(Setup(policy="longest-prefix-match", max_num_seqs=1, ageing=1.0))
    sim.add([0] * 9, max_tokens=1)
    sim.drain()
    sim.now = start = 10.0
    patient = sim.add([1] * 9, max_tokens=1)[0]
    while not patient.finished:
        sim.add([0] * 9, max_tokens=1)
        sim.step()
        sim.now += 0.1
    assert 0.9 <= patient.first_scheduled - start <= 1.3


def running(sim: Simulation) -> list[Request]:
    return sim.scheduler.running


def test_a_static_batch_admits_no_late_request() -> None:
    sim = Simulation(Setup(policy="static", batch_size=2, max_num_seqs=4, more_expected=False))
    short = sim.add([0], max_tokens=1, stop_ids=NO_STOP)[0]
    long = sim.add([1], max_tokens=5, stop_ids=NO_STOP)[0]
    third = sim.add([2], max_tokens=1)[0]
    sim.step()
    assert short.finished and running(sim) == [long]
    while not long.finished:
        assert third.first_scheduled is None
        sim.step()
    sim.step()
    assert third.first_scheduled is not None


@pytest.mark.parametrize(
    ("policy", "max_wait", "wakeup"),
    [
        ("static", None, 5.0),
        ("static", 2.0, 2.0),
        ("static", 0.0, inf),
        ("dynamic", None, 0.05),
    ],
)
def test_a_batch_waits_for_requests_that_may_come(
    policy: str, max_wait: float | None, wakeup: float
) -> None:
    def setup() -> Simulation:
        sim = Simulation(Setup(policy=policy, batch_size=2, max_wait=max_wait))
        sim.add([0])
        assert sim.scheduler.schedule(0.0) is None
        assert sim.scheduler.wakeup(0.0) == wakeup
        return sim

    late = setup()
    late.now = 1e6 if wakeup == inf else wakeup
    assert (late.scheduler.schedule(late.now) is None) == (wakeup == inf)
    full = setup()
    full.add([1])
    assert len(full.planned().slots) == 2
    last = setup()
    last.scheduler.more_expected = False
    assert len(last.planned().slots) == 1


def test_a_static_batch_is_cut_by_its_token_cap() -> None:
    sim = Simulation(Setup(policy="static", batch_size=4, budget=16, more_expected=False))
    for i, length in enumerate((8, 8, 1)):
        sim.add([i] * length)
    sim.plan()
    assert len(running(sim)) == 2
    big = Simulation(Setup(policy="static", batch_size=4, budget=16, more_expected=False))
    big.add([0] * 40)  # at least one request, in chunks
    big.plan()
    assert len(running(big)) == 1
    big.deliver()
    big.drain()


def test_a_dynamic_batch_waits_max_wait_for_more_requests() -> None:
    sim = Simulation(Setup(policy="dynamic", batch_size=3, max_wait=0.5))
    sim.now = 1.0
    sim.add([0])
    sim.now = 1.2
    sim.add([1])
    assert sim.plan() is None
    assert sim.scheduler.wakeup(sim.now) == 1.5
    sim.now = 1.499
    assert sim.plan() is None
    sim.now = 1.5
    assert sim.plan() is not None
    assert len(running(sim)) == 2


@pytest.mark.parametrize(
    ("requests", "tokens", "length", "wait"),
    [
        (8, 1000, 1, 0.5),  # a quarter of the allowed requests: the longest wait
        (4, 1000, 1, 0.5),
        (3, 1000, 1, 1 / 3),
        (2, 1000, 1, 0.0),  # no other request would be admitted
        (8, 30, 8, 0.5 * 14 / 15),  # 16 of 30 tokens
        (8, 16, 8, 0.0),
    ],
)
def test_a_dynamic_batch_waits_less_the_fuller_the_queue(
    requests: int, tokens: int, length: int, wait: float
) -> None:
    setup = Setup(policy="dynamic", max_wait=0.5, budget=32)
    sim = Simulation(replace(setup, max_queued_requests=requests, max_queued_tokens=tokens))
    sim.now = 1.0
    for i in range(2):
        sim.add([i] * length)
    due = sim.scheduler.policy.wakeup(sim.scheduler.waiting.snapshot(), 1.0)
    assert due == pytest.approx(1.0 + wait)
    assert (sim.plan() is None) == (wait > 0)
    sim.now = due or 0.0
    assert wait == 0 or sim.plan() is not None


def test_a_dynamic_batch_is_full_when_no_more_can_run() -> None:
    sim = Simulation(Setup(policy="dynamic", batch_size=8, max_num_seqs=2, max_wait=100.0))
    sim.add([0])
    assert sim.plan() is None
    sim.add([0])
    assert sim.plan() is not None


def test_a_dynamic_batch_is_full_when_its_token_cap_is_reached() -> None:
    sim = Simulation(Setup(policy="dynamic", batch_size=8, budget=16, max_wait=100.0))
    for _ in range(2):
        sim.add([0] * 10)
    assert sim.plan() is not None
    assert len(running(sim)) == 1


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_siblings_share_a_batch(policy: str) -> None:
    sim = Simulation(Setup(policy=policy, batch_size=4, max_num_seqs=8, more_expected=False))
    siblings = sim.add([0] * 6, n=4, max_tokens=6, stop_ids=frozenset())
    other = sim.add([1] * 6, max_tokens=6, stop_ids=frozenset())[0]
    sim.step()
    assert [r.status for r in siblings].count(RequestStatus.RUNNING) == 1
    sim.step()
    assert all(r.status is RequestStatus.RUNNING for r in siblings)
    while any(not r.finished for r in siblings):
        assert other.status is RequestStatus.WAITING
        sim.step()
    sim.step()
    assert other.status is RequestStatus.RUNNING


def test_a_preempted_request_rejoins_its_static_batch() -> None:
    sim = Simulation(Setup(policy="static", batch_size=2, block_size=4, num_blocks=11))
    long = [p for p in ([i] * 8 for i in range(100)) if len(expected_output(p, "", 20)) == 20]
    first, second = (sim.add(prompt, max_tokens=20)[0] for prompt in long[:2])
    newcomer = sim.add([2] * 4, max_tokens=2)[0]
    while second.num_preemptions == 0:
        sim.step()
    while not (first.finished and second.finished):
        assert newcomer.status is RequestStatus.WAITING
        sim.step()
    assert second.finished
