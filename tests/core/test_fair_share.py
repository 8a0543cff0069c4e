"""A flood of one tenant does not delay another's first token, and all get equal shares."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from helpers.simulation import Setup, Simulation
from helpers.tiers import runs

from kvik.core.config import POLICIES
from kvik.core.fair_share import TenantUsage
from kvik.core.plan import SchedulerOutput
from kvik.core.types import Request, RequestStatus

NO_STOP: frozenset[int] = frozenset()
CONTINUOUS = [name for name in POLICIES if name not in ("static", "dynamic")]

# Eight requests of 200 tokens fill all slots, and two thirds of the blocks.
WIDE = Setup(
    block_size=4, num_blocks=600, budget=64, max_num_seqs=8, max_model_len=400, caching=False
)
# Four of them fill all blocks.
TIGHT = replace(WIDE, num_blocks=200)


def ask(sim: Simulation, tenant: str, length: int, max_tokens: int) -> Request:
    prompt = [(len(sim.requests) + i) % 3 for i in range(length)]
    return sim.add(prompt, max_tokens, tenant=tenant, salt=tenant, stop_ids=NO_STOP)[0]


def flood(setup: Setup, steps: int, length: int, max_tokens: int) -> Simulation:
    """Return a simulation `steps` steps after tenant "a" sent forty requests at once."""
    sim = Simulation(setup)
    for _ in range(40):
        ask(sim, "a", length, max_tokens)
    for _ in range(steps):
        sim.step()
        sim.now += 1.0
    return sim


def steps_to_first_token(sim: Simulation, request: Request) -> int:
    steps = 0
    while request.first_token is None:
        sim.step()
        sim.now += 1.0
        steps += 1
        assert steps < 1000
    return steps


def served(sim: Simulation, tenant: str) -> int:
    """Return the weighted tokens that a tenant was charged."""
    sim.scheduler.shares.settle(sim.scheduler.running)
    requests = [r for r in sim.requests.values() if r.tenant == tenant]
    prompts = sum(min(r.num_charged_tokens, r.num_prompt_tokens) for r in requests)
    outputs = sum(max(0, r.num_charged_tokens - r.num_prompt_tokens) for r in requests)
    return prompts + 2 * outputs


@pytest.mark.parametrize(
    ("policy", "setup", "depth"),
    [("fcfs", s, d) for s in (WIDE, TIGHT) for d in (1, 2)] + [(p, TIGHT, 1) for p in CONTINUOUS],
)
@pytest.mark.parametrize(
    ("flooding", "steps"),
    [
        ((180, 20), 1),  # the first prompt of the flood is being computed
        ((180, 20), 12),  # prompts use all tokens left by decodes
        ((180, 200), 40),  # no request ends: all slots or blocks are taken
        ((8, 300), 60),  # short prompts with long outputs
    ],
)
def test_a_flood_moves_the_first_token_of_another_by_one_step_at_most(
    policy: str, setup: Setup, depth: int, flooding: tuple[int, int], steps: int
) -> None:
    setup = replace(setup, policy=policy, depth=depth)
    sim = flood(setup, steps, *flooding)
    for length in (190, 1, 40):
        alone = Simulation(setup)
        expected = steps_to_first_token(alone, ask(alone, "b", length, 4))
        for _ in range(10):  # meanwhile, each step had tokens for the flood
            sim.step()
        assert sim.scheduler.waiting.num_tokens
        request = ask(sim, "b", length, 4)
        plan = sim.plan()
        assert plan is not None and request.slot in plan.slots  # in the next step
        sim.deliver()
        took = 1 + steps_to_first_token(sim, request)
        assert took <= expected + 1
        assert request.num_preemptions == 0
        while not request.finished:
            sim.step()


def keep_asking(sim: Simulation, steps: int, tenants: dict[str, tuple[int, int]]) -> None:
    """Tenants that always have work waiting: the lengths of prompt and output of each."""
    for _ in range(steps):
        for tenant, (length, max_tokens) in tenants.items():
            while len(sim.scheduler.waiting.by_tenant.get(tenant, ())) < 6:
                ask(sim, tenant, length, max_tokens)
        sim.step()
        sim.now += 1.0


@pytest.mark.parametrize("setup", [WIDE, TIGHT])
@pytest.mark.parametrize("policy", CONTINUOUS)
def test_tenants_that_always_have_work_get_equal_service(policy: str, setup: Setup) -> None:
    sim = Simulation(replace(setup, policy=policy))
    shapes = {"a": (150, 5), "b": (20, 5), "c": (60, 30)}
    keep_asking(sim, 50, shapes)
    before = {tenant: served(sim, tenant) for tenant in shapes}
    preemptions = sim.scheduler.counters.preemptions
    keep_asking(sim, min(runs(360), 360), shapes)
    got = {tenant: served(sim, tenant) - before[tenant] for tenant in shapes}
    assert max(got.values()) - min(got.values()) < 0.1 * min(got.values()), got
    # Equal tenants do not preempt each other.
    assert sim.scheduler.counters.preemptions - preemptions <= 0.1 * len(sim.ended)


def test_a_light_tenant_is_served_at_once_and_heavy_ones_share_the_rest() -> None:
    sim = Simulation(WIDE)
    for i in range(300):
        keep_asking(sim, 1, {"a": (150, 5), "b": (20, 20)})
        if i % 10 == 0:
            request = ask(sim, "light", 30, 2)
            sim.step()
            assert request.first_token is not None
    a, b = served(sim, "a"), served(sim, "b")
    assert abs(a - b) < 0.1 * a
    assert served(sim, "light") == 30 * (30 + 2)


def test_time_without_work_earns_no_credit() -> None:
    sim = Simulation(WIDE)
    ask(sim, "b", 10, 2)
    keep_asking(sim, 200, {"a": (60, 10)})  # b is idle
    for _ in range(2):
        before = {tenant: served(sim, tenant) for tenant in "ab"}
        keep_asking(sim, 100, {"a": (60, 10), "b": (60, 10)})
        a, b = (served(sim, tenant) - before[tenant] for tenant in "ab")
        assert abs(a - b) < 0.1 * a
        for _ in range(3):  # nor do occasional small requests
            keep_asking(sim, 30, {"a": (60, 10)})
            ask(sim, "b", 1, 1)


def test_use_of_idle_capacity_is_not_charged_later() -> None:
    sim = Simulation(WIDE)
    keep_asking(sim, 100, {"a": (60, 10)})
    sim.drain()
    before = served(sim, "a")
    keep_asking(sim, 100, {"a": (60, 10), "b": (60, 10)})
    a, b = served(sim, "a") - before, served(sim, "b")
    assert abs(a - b) < 0.1 * a


@pytest.mark.parametrize("setup", [WIDE, TIGHT])
def test_single_requests_preempt_a_flood_at_most_once_each(
    setup: Setup,
) -> None:
    alone = Simulation(setup)
    keep_asking(alone, 300, {"a": (60, 40)})
    sim = Simulation(setup)
    keep_asking(sim, 20, {"a": (60, 40)})
    count = 0
    for _ in range(280):
        if not any(r.tenant == "b" for r in [*sim.scheduler.running, *sim.scheduler.waiting]):
            ask(sim, "b", 30, 3)
            count += 1
        keep_asking(sim, 1, {"a": (60, 40)})
    assert count > 60
    assert sim.scheduler.counters.preemptions <= alone.scheduler.counters.preemptions + count
    rest = served(alone, "a") - served(sim, "b")
    assert served(sim, "a") > 0.8 * rest


def test_a_preempted_flood_repeats_no_work() -> None:
    """Its total work is what it needs alone, and the other's work."""
    alone = flood(TIGHT, 0, 100, 20)
    expected = alone.drain()
    sim = flood(TIGHT, 30, 100, 20)
    ask(sim, "b", 190, 20)
    assert 30 + sim.drain() <= expected + 190 // 40 + 20


def test_no_tenant_starves_among_many() -> None:
    rng = random.Random(5)
    sim = Simulation(replace(TIGHT, num_blocks=120))
    tenants = [f"t{i}" for i in range(12)]
    for _ in range(150):
        for tenant in rng.choices(tenants, weights=range(1, 13), k=rng.choice([0, 0, 1, 2])):
            ask(sim, tenant, rng.choice([3, 30, 200]), rng.choice([1, 10, 60]))
        sim.step()
        sim.now += 1.0
    preemptions = sim.scheduler.counters.preemptions
    sim.drain(max_steps=1500)
    assert preemptions < 2 * len(sim.requests)


def test_a_new_tenant_preempts_the_one_furthest_above_its_share() -> None:
    sim = Simulation(WIDE)
    many = [ask(sim, "many", 8, 200) for _ in range(6)]
    few = [ask(sim, "few", 8, 200) for _ in range(2)]
    for _ in range(10):
        sim.step()
    assert len(sim.scheduler.running) == 8
    ask(sim, "new", 8, 4)
    sim.step()
    assert sum(r.num_preemptions for r in many) == 1
    assert not any(r.num_preemptions for r in few)


def test_the_request_that_loses_least_is_preempted() -> None:
    sim = Simulation(replace(WIDE, max_num_seqs=3))
    requests = [ask(sim, "a", length, 200) for length in (60, 5, 30)]
    for _ in range(5):
        sim.step()
    ask(sim, "b", 8, 4)
    sim.step()
    assert [r.num_preemptions for r in requests] == [0, 1, 0]


def test_the_least_urgent_request_is_preempted_by_priorities() -> None:
    sim = Simulation(replace(WIDE, max_num_seqs=3, policy="priority"))
    low = sim.add([0] * 60, 200, tenant="a", priority=1, stop_ids=NO_STOP)[0]
    high = [
        sim.add([1] * length, 200, tenant="a", priority=-1, stop_ids=NO_STOP)[0]
        for length in (5, 9)
    ]
    for _ in range(5):
        sim.step()
    ask(sim, "b", 8, 4)
    sim.step()
    assert low.num_preemptions == 1
    assert not any(r.num_preemptions for r in high)


@pytest.mark.parametrize("max_num_seqs", [7, 8])
@pytest.mark.parametrize("length", [1, 20])
def test_decodes_that_fill_a_step_leave_a_fair_share(max_num_seqs: int, length: int) -> None:
    """As many requests as a step has tokens do not delay the first token of another tenant."""
    sim = Simulation(replace(WIDE, budget=8, max_num_seqs=max_num_seqs))
    for _ in range(12):
        ask(sim, "a", 3, 300)
    for _ in range(20):
        sim.step()
    other = ask(sim, "b", length, 8)
    assert steps_to_first_token(sim, other) <= -(-length // 4)
    done = {r.key: len(r.token_ids) for r in sim.scheduler.running}
    while not other.finished:
        sim.step()
    for request in sim.scheduler.running:  # no request waits forever
        assert len(request.token_ids) > done.get(request.key, 0)


def test_requests_within_a_fair_share_of_slots_are_not_preempted() -> None:
    """Four of eight slots are the fair share of two tenants, however often the other asks."""
    sim = Simulation(WIDE)
    mine = [ask(sim, "a", 8, 300) for _ in range(4)]
    for _ in range(20):
        ask(sim, "b", 8, 100)
    for _ in range(60):
        sim.step()
    assert not any(r.num_preemptions for r in mine)


def test_even_a_single_slot_is_preempted_once() -> None:
    sim = Simulation(replace(WIDE, max_num_seqs=1))
    flooding = [ask(sim, "a", 8, 30) for _ in range(5)]
    sim.step()
    other = ask(sim, "b", 8, 30)
    sim.step()
    assert other.first_token is not None
    sim.drain()
    assert sum(r.num_preemptions for r in flooding) == 1
    assert other.num_preemptions == 0


def test_simultaneous_tenants_get_up_to_a_third_of_the_slots() -> None:
    sim = Simulation(WIDE)
    for _ in range(20):
        ask(sim, "a", 8, 300)
    for _ in range(5):
        sim.step()
    for _ in range(8):
        ask(sim, "b", 8, 300)
    for _ in range(5):
        sim.step()
    running = [r.tenant for r in sim.scheduler.running]
    assert (running.count("a"), running.count("b")) == (6, 2)


def test_tenants_come_before_priorities_and_priorities_order_one_tenant() -> None:
    sim = Simulation(replace(WIDE, max_num_seqs=1, policy="priority"))
    for i in range(4):
        sim.add([0], 1, tenant="a", priority=-5 + i)
    low = sim.add([1], 1, tenant="b", priority=9)[0]
    urgent = sim.add([2], 1, tenant="b", priority=3)[0]
    seen: list[str] = []
    while sim.scheduler.has_requests:
        sim.step()
        seen += [key[0] for key in sim.ended if key[0] not in seen]
    assert seen.index(urgent.request_id) < seen.index(low.request_id) <= 3
    assert seen.index("r1") < seen.index("r2") < seen.index("r3")


def test_cached_prompt_tokens_are_not_charged() -> None:
    sim = Simulation(replace(WIDE, caching=True))
    sim.add([0] * 41, 1, tenant="a")
    sim.drain()
    ask(sim, "other", 1, 300)
    sim.step()
    again = sim.add([0] * 41, 1, tenant="a")[0]
    sim.plan()
    assert again.num_cached_tokens == 40
    sim.scheduler.shares.settle(sim.scheduler.running)
    accounts = sim.scheduler.shares.accounts
    assert accounts["a"].served == sim.scheduler.shares.virtual_time + 1


def test_tokens_lost_by_preemption_are_not_charged_again() -> None:
    sim = Simulation(replace(WIDE, max_num_seqs=1))
    victim = ask(sim, "a", 50, 10)
    sim.step()
    ask(sim, "b", 10, 2)
    sim.drain()
    assert victim.num_preemptions == 1
    assert victim.num_charged_tokens == 59  # the last token is never computed


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_static_batch_is_shared_fairly_and_not_joined_late(policy: str) -> None:
    sim = Simulation(replace(WIDE, policy=policy, batch_size=4, budget=64))
    for _ in range(12):
        ask(sim, "a", 8, 6)
    sim.step()
    first = list(sim.scheduler.running)
    mine = [ask(sim, "b", 8, 6) for _ in range(3)]
    while not all(r.finished for r in first):
        assert all(r.status is RequestStatus.WAITING for r in mine)
        sim.step()
    sim.now += 1.0
    sim.step()
    tenants = [r.tenant for r in sim.scheduler.running]
    assert (tenants.count("a"), tenants.count("b")) == (1, 3)  # one had a batch of its own


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_preempted_members_of_a_batch_resume_before_others(policy: str) -> None:
    sim = Simulation(replace(WIDE, policy=policy, batch_size=3, num_blocks=16, more_expected=False))
    long, other = (ask(sim, "a", 12, n) for n in (40, 2))
    short, member = (ask(sim, "b", 12, n) for n in (13, 30))
    while not member.num_preemptions:
        sim.step()
    assert not long.finished and not short.finished
    while member.status is RequestStatus.PREEMPTED:
        assert other.status is RequestStatus.WAITING  # although it arrived earlier
        sim.step()
    assert not long.finished
    sim.drain()


def test_accounts_of_idle_tenants_are_deleted() -> None:
    sim = Simulation(WIDE)
    keep_asking(sim, 5, {"flood": (20, 3)})
    for i in range(100):
        ask(sim, f"t{i}", 2, 1)
        keep_asking(sim, 3, {"flood": (20, 3)})
    assert len(sim.scheduler.shares.accounts) <= 3
    sim.drain()
    assert not sim.scheduler.shares.accounts


@pytest.mark.parametrize("policy", CONTINUOUS)
def test_the_quick_check_of_tenants_changes_no_plan(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast check of tenants' usage changes no plan."""
    genuine = TenantUsage.uneven
    looks: list[bool] = []

    def noted(self: TenantUsage, takers: Iterable[str], num_tenants: int) -> bool:
        looks.append(genuine(self, takers, num_tenants))
        return looks[-1]

    def plans(seed: int) -> list[SchedulerOutput | None]:
        rng = random.Random(seed)
        sim = Simulation(replace(WIDE, policy=policy, max_num_seqs=rng.choice([3, 6])))
        found = []
        for _ in range(150):
            if rng.random() < 0.4:
                tenant = rng.choice(["a", "a", "b", "c"])
                ask(sim, tenant, rng.choice([3, 40, 120]), rng.choice([3, 30, 150]))
            found.append(sim.step())
            sim.now += 1.0
        return found

    for seed in range(runs(3)):
        monkeypatch.setattr(TenantUsage, "uneven", noted)
        quick = plans(seed)
        monkeypatch.setattr(TenantUsage, "uneven", lambda *_: True)
        assert quick == plans(seed)
    assert {True, False} == set(looks)


@pytest.mark.parametrize("credited", [False, True])
def test_service_by_other_engines_counts(credited: bool):
    sim = Simulation(Setup(max_num_seqs=1))
    sim.add([1] * 8, tenant="a")
    sim.step()
    if credited:
        sim.scheduler.shares.credit("b", 10_000)
        sim.scheduler.shares.credit("nobody here", 5)
    (second,) = sim.add([2] * 8, tenant="a")
    (other,) = sim.add([3] * 8, tenant="b")
    sim.drain()
    ends = list(sim.ended)
    assert (ends.index(second.key) < ends.index(other.key)) == credited


def test_a_request_that_another_engine_began_earns_no_credit():
    """Its tenant is new here, although the request has its first token already."""
    sim = Simulation(WIDE)
    keep_asking(sim, 200, {"a": (60, 10)})
    moved = replace(
        next(iter(sim.requests.values())),
        request_id="moved",
        tenant="b",
        token_ids=[1] * 61,
        first_token=sim.now,
        status=RequestStatus.WAITING,
        num_charged_tokens=0,
    )
    sim.requests[moved.key], sim.outputs[moved.key] = moved, [1]
    before = served(sim, "a")
    sim.scheduler.add(moved, sim.now)
    keep_asking(sim, 100, {"a": (60, 10), "b": (60, 10)})
    assert moved.finished
    assert served(sim, "b") < 1.1 * (served(sim, "a") - before)


def test_service_by_other_engines_counts_once():
    sim = Simulation(Setup())
    assert sim.scheduler.shares.take_service(sim.scheduler.running) == {}
    sim.add([1] * 8, 4, tenant="a", stop_ids=frozenset())
    sim.add([2] * 6, 1, tenant="b", stop_ids=frozenset())
    sim.drain()
    taken = sim.scheduler.shares.take_service(sim.scheduler.running)
    assert taken == {"a": 8 + 2 * 3, "b": 6}
    assert sim.scheduler.shares.take_service([]) == {}
