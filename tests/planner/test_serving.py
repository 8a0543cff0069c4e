"""Latencies under load: computed by hand, compared with the real scheduler, and monotonic."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from statistics import fmean

import pytest
from helpers.configs import PUBLIC

from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.plan import ModelRunnerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import Request
from kvik.planner.devices import Device, Setting
from kvik.planner.families import shape_from_config
from kvik.planner.memory import MemoryPlanner
from kvik.planner.roofline import PlannedStep, decode, prefill, step_time
from kvik.planner.search import largest, smallest
from kvik.planner.serving import (
    Drafting,
    Serving,
    Slo,
    Traffic,
    budgets,
    largest_load,
    predict,
    predict_rate,
    set_up,
)
from kvik.spec.kv import KVCacheSpec, group_layers

SHAPE = shape_from_config(PUBLIC["llama-3-8b"], "llama-3-8b")
DEVICE = Device("test", "cuda", 80 << 30, 2e12, {"bf16": 400e12, "int8": 800e12}, link=300e9)
TRAFFIC = Traffic(512, 128)


def serving(traffic: Traffic = TRAFFIC, device: Device = DEVICE, budget: int = 2048) -> Serving:
    return set_up(SHAPE, Setting(device, "bf16", "bf16", traffic.context), 256, budget)


def seconds(step: PlannedStep) -> float:
    return step_time(SHAPE, Setting(DEVICE, "bf16", "bf16"), step).expected


def test_one_request_alone() -> None:
    found = predict(serving(), TRAFFIC, 1)
    assert found.ttft == pytest.approx(seconds(prefill(512)))
    assert found.tpot == pytest.approx(seconds(decode(1, 512 + 64 + 1)))
    assert found.e2e == pytest.approx(found.ttft + 127 * found.tpot)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    found = predict(serving(budget=256), TRAFFIC, 1)
    halves = seconds(prefill(256)) + seconds(prefill(256, 256))
    assert found.ttft == pytest.approx(halves, rel=0.01)


def test_an_output_of_one_token_has_no_tpot() -> None:
    found = predict(serving(Traffic(512, 1)), Traffic(512, 1), 1)
    assert (found.tpot, found.e2e) == (0.0, pytest.approx(seconds(prefill(512))))


@pytest.mark.parametrize(("concurrency", "output"), [(1, 128), (64, 1), (200, 20), (2000, 128)])
def test_little_s_law_and_the_sum_of_times(concurrency: int, output: int) -> None:
    traffic = Traffic(512, output)
    found = predict(serving(traffic), traffic, concurrency)
    assert found.rate * found.e2e == pytest.approx(concurrency)
    assert found.e2e == pytest.approx(found.ttft + (output - 1) * found.tpot)
    assert found.output_rate == pytest.approx(found.rate * output)


def test_requests_without_a_slot_wait_for_the_first_token() -> None:
    full = replace(serving(), max_fitting=10)
    ten, thirty = predict(full, TRAFFIC, 10), predict(full, TRAFFIC, 30)
    assert thirty.rate == pytest.approx(ten.rate)
    assert thirty.tpot == ten.tpot
    assert thirty.e2e == pytest.approx(3 * ten.e2e)
    assert predict(replace(full, max_fitting=0), TRAFFIC, 1) is None


@dataclass
class Simulation:
    """The real scheduler, with the step times of the roofline.

    Attributes:
        done: (TTFT, seconds of decoding, tokens decoded, time of the end) of each request.
    """

    served: Serving
    traffic: Traffic
    now: float = 0.0
    asked: int = 0
    done: list[tuple[float, float, int, float]] = field(default_factory=list)
    alive: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(0)
        tokens = self.traffic.prompt + 2 * self.traffic.output
        groups = group_layers([KVCacheSpec(1, 16, 64)])
        blocks = 256 * (tokens // 16 + 2) + 1
        self.scheduler = Scheduler(
            SchedulerConfig(self.served.seqs, self.served.budget, tokens),
            CacheConfig(16, blocks, groups, enable_prefix_caching=False),
        )

    def ask(self, at: float) -> None:
        # Outputs of equal length would keep requests together that began together.
        spread = self.rng.uniform(0.5, 1.5) if self.traffic.output > 1 else 1.0
        name, prompt = str(self.asked), self.traffic.prompt
        request = Request(
            name, 0, SamplingParams(), [self.asked % 50] * prompt, prompt,
            prompt + round(self.traffic.output * spread), frozenset(), 0, at,
        )  # fmt: skip
        self.alive[name] = request
        self.scheduler.add(request, self.now)
        self.asked += 1

    def step(self) -> int:
        """Run a step and return the number of ended requests."""
        plan = self.scheduler.schedule(self.now)
        by_slot = {r.slot: r for r in self.scheduler.running}
        rows = [
            (n, by_slot[slot].num_computed_tokens)
            for slot, n in zip(plan.slots, plan.num_scheduled_tokens, strict=True)
        ]
        singles = [end for n, end in rows if n == 1]
        runs = [(1, n, end - n) for n, end in rows if n > 1]
        if singles:
            runs.append((len(singles), 1, round(fmean(singles)) - 1))
        self.now += seconds(PlannedStep(tuple(runs)))
        output = ModelRunnerOutput(plan.step, [[1] if s else [] for s in plan.samples])
        before = len(self.done)
        for delta in self.scheduler.update(output, self.now):
            if delta.report is not None:
                request = self.alive.pop(delta.request_id)
                first, count = request.first_token or self.now, request.num_output_tokens
                times = first - request.arrival, self.now - first
                self.done.append((*times, count - 1, self.now))
        return len(self.done) - before

    def figures(self, warmup: int) -> tuple[float, float, float]:
        """Return TTFT, TPOT and requests per second in the steady state."""
        rest = self.done[warmup:]
        ttft = fmean(first for first, _, _, _ in rest)
        tpot = sum(decoding for _, decoding, _, _ in rest) / max(1, sum(n for _, _, n, _ in rest))
        return ttft, tpot, (len(rest) - 1) / (rest[-1][3] - rest[0][3])


def simulate(served: Serving, traffic: Traffic, concurrency: int) -> tuple[float, float, float]:
    """Simulate a closed loop."""
    found = Simulation(served, traffic)
    for _ in range(concurrency):
        found.ask(0.0)
    while len(found.done) < 8 * concurrency + 20:
        for _ in range(found.step()):
            found.ask(found.now)
    return found.figures(2 * concurrency)


def simulate_at_random(served: Serving, traffic: Traffic, rate: float, count: int) -> float:
    """Return the TTFT in an open loop."""
    found = Simulation(served, traffic)
    gaps = random.Random(1)
    due = list(accumulate(gaps.expovariate(rate) for _ in range(count)))
    while len(found.done) < count:
        if not found.alive:
            found.now = max(found.now, due[found.asked])
        while found.asked < count and due[found.asked] <= found.now:
            found.ask(due[found.asked])
        found.step()
    return found.figures(count // 5)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("traffic", "concurrency", "budget"),
    [
        (Traffic(512, 64), 1, 2048),
        (Traffic(512, 64), 8, 2048),
        (Traffic(512, 64), 8, 256),  # half of the steps have a chunk of a prompt
        (Traffic(100, 64), 24, 2048),
        (Traffic(512, 128), 64, 2048),
        (Traffic(512, 16), 32, 2048),  # several prompts in every step
        (Traffic(1500, 20), 12, 1024),  # queued prompts in chunks
        (Traffic(64, 256), 200, 2048),
        (Traffic(512, 32), 64, 512),  # more prompts than fit the budget
        (Traffic(512, 128), 100, 256),
        (Traffic(64, 4), 48, 2048),
    ],
)
def test_predictions_match_the_real_scheduler(
    traffic: Traffic, concurrency: int, budget: int
) -> None:
    served = replace(serving(traffic), budget=budget)
    found = predict(served, traffic, concurrency)
    ttft, tpot, rate = simulate(served, traffic, concurrency)
    assert found.rate == pytest.approx(rate, rel=0.12)
    assert found.tpot == pytest.approx(tpot, rel=0.12)
    assert found.ttft == pytest.approx(ttft, rel=0.25)


def test_tighter_limits_never_allow_a_larger_load() -> None:
    rng = random.Random(0)
    served = serving()
    for _ in range(40):
        ttft, tpot = rng.uniform(0.005, 0.5), rng.uniform(0.004, 0.05)
        loads = [
            found.concurrency if found else 0
            for scale in (1.0, 0.9, 0.5, 0.2)
            if (found := largest_load(served, TRAFFIC, Slo(ttft * scale, tpot * scale))) or True
        ]
        assert loads == sorted(loads, reverse=True)


def test_the_largest_load_keeps_the_limits_and_the_next_does_not() -> None:
    limits = Slo(ttft=0.2, tpot=0.02)
    found = largest_load(serving(), TRAFFIC, limits)
    assert found.excess(limits) <= 1.0 and 1 < found.concurrency < 256
    more = predict(serving(), TRAFFIC, found.concurrency + 1)
    assert more.excess(limits) > 1.0
    assert largest_load(serving(), TRAFFIC, Slo(tpot=1e-6)) is None
    assert largest_load(serving(), TRAFFIC, Slo()).concurrency == 256


@pytest.mark.parametrize("concurrency", [1, 8, 60, 256])
def test_a_faster_machine_is_never_slower(concurrency: int) -> None:
    before = predict(serving(), TRAFFIC, concurrency)
    for faster in (
        replace(DEVICE, bandwidth=4e12),
        replace(DEVICE, rates={"bf16": 900e12, "int8": 1800e12}),
    ):
        served = serving(device=faster)
        after = predict(served, TRAFFIC, concurrency)
        assert after.ttft <= before.ttft and after.tpot <= before.tpot
        assert after.rate >= before.rate
        limits = Slo(0.1, 0.02)
        was, now = largest_load(serving(), TRAFFIC, limits), largest_load(served, TRAFFIC, limits)
        assert now.concurrency >= was.concurrency


def test_random_arrivals() -> None:
    slow, fast = (
        predict_rate(serving(), TRAFFIC, 2.0),
        predict_rate(serving(), TRAFFIC, 20.0),
    )
    assert (slow.rate, slow.output_rate) == (2.0, 256.0)
    assert slow.concurrency < fast.concurrency and slow.ttft < fast.ttft
    assert slow.ttft > predict(serving(), TRAFFIC, 1).ttft  # some arrive together
    most = predict(serving(), TRAFFIC, 256).rate
    assert predict_rate(serving(), TRAFFIC, 1.1 * most) is None


@pytest.mark.parametrize(
    ("traffic", "share", "budget", "count"),
    [
        (Traffic(2000, 40), 0.4, 2048, 300),  # a prompt fills a step
        (Traffic(512, 32), 0.85, 256, 600),  # and more than one
        (Traffic(16, 16), 0.4, 2048, 300),
        (Traffic(64, 8), 0.95, 2048, 600),
        pytest.param(Traffic(512, 64), 0.1, 2048, 300, marks=pytest.mark.full),
        pytest.param(Traffic(512, 64), 0.7, 2048, 300, marks=pytest.mark.full),
        pytest.param(Traffic(2000, 40), 0.7, 2048, 300, marks=pytest.mark.full),
        pytest.param(Traffic(8, 128), 0.85, 2048, 600, marks=pytest.mark.full),  # many in a step
        pytest.param(Traffic(16, 16), 0.85, 2048, 600, marks=pytest.mark.full),
        pytest.param(Traffic(64, 8), 0.7, 2048, 300, marks=pytest.mark.full),
    ],
)
def test_the_wait_of_random_arrivals(
    traffic: Traffic, share: float, budget: int, count: int
) -> None:
    served = serving(traffic, budget=budget)
    rate = share * predict(served, traffic, served.max_running).rate
    found = predict_rate(served, traffic, rate)
    assert found.ttft == pytest.approx(simulate_at_random(served, traffic, rate, count), rel=0.25)


@pytest.mark.full
def test_requests_wait_for_slots() -> None:
    """Eight at a time: most of the time to the first token is the wait for a slot."""
    served, traffic = replace(serving(Traffic(512, 64)), seqs=8), Traffic(512, 64)
    rate = 0.7 * predict(served, traffic, 8).rate
    found = predict_rate(served, traffic, rate)
    assert found.ttft == pytest.approx(simulate_at_random(served, traffic, rate, 600), rel=0.3)
    assert found.ttft > 1.5 * predict_rate(serving(traffic), traffic, rate).ttft


@pytest.mark.parametrize("traffic", [Traffic(64, 1), Traffic(64, 8), Traffic(512, 1)])
def test_prompts_that_share_steps_are_served_until_steps_are_full(traffic: Traffic) -> None:
    served = serving(traffic)
    most = predict(served, traffic, served.max_running).rate
    assert predict_rate(served, traffic, 0.95 * most) is not None
    assert predict_rate(served, traffic, 1.05 * most) is None


@pytest.mark.parametrize("traffic", [Traffic(512, 1), Traffic(64, 2), TRAFFIC])
def test_more_requests_never_lower_the_rate(traffic: Traffic) -> None:
    counts = (1, 2, 4, 8, 16, 17, 32, 64, 128, 129, 200, 256)
    rates = [predict(serving(traffic), traffic, n).rate for n in counts]
    assert all(more > 0.97 * fewer for fewer, more in pairwise(rates)), rates


def test_a_shared_prefix_is_not_computed() -> None:
    shared = predict(serving(), replace(TRAFFIC, shared=256), 1)
    assert shared.ttft == pytest.approx(seconds(prefill(256, 256)))
    whole = predict(serving(), replace(TRAFFIC, shared=512), 1)
    assert whole.ttft == pytest.approx(seconds(prefill(1, 512)), rel=0.01)


def test_drafts_without_cost_gain_by_the_formula() -> None:
    plain = predict(serving(), TRAFFIC, 1)
    served = replace(serving(), drafting=Drafting(3, 0.8))
    gain = (1 - 0.8**4) / (1 - 0.8)
    found = predict(served, TRAFFIC, 1)
    assert found.tpot == pytest.approx(plain.tpot / gain, rel=0.05)  # four rows read little more
    dear = replace(serving(), drafting=Drafting(3, 0.8, seconds=1.0))
    assert predict(dear, TRAFFIC, 1).tpot > plain.tpot


def test_drafts_count_in_the_budget_of_a_step() -> None:
    plain = serving(budget=256)
    drafting = replace(plain, drafting=Drafting(3, 0.8))
    assert (plain.max_running, drafting.max_running) == (256, 64)  # 64 requests, 4 tokens each
    assert predict(drafting, TRAFFIC, 60).ttft > predict(plain, TRAFFIC, 60).ttft


def test_budgets_are_halved() -> None:
    assert budgets(serving(budget=2048)) == (2048, 1024, 512, 256)
    assert budgets(serving(budget=100)) == (100,)


def test_largest_finds_the_boundary() -> None:
    for most, border in product((0, 1, 2, 9, 16), range(20)):
        assert largest(lambda n, border=border: n <= border, most) == min(border, most)


def test_least_finds_the_boundary() -> None:
    for border in range(1, 20):
        assert smallest(lambda n, border=border: n >= border, 16) == (
            border if border <= 16 else None
        )


def test_every_setting_has_its_own_step_times_and_memory() -> None:
    usual = Setting(DEVICE, "bf16", "bf16", context=1000)
    settings = [
        usual,
        replace(usual, kv_format="fp8"),
        replace(usual, weight_format="int4"),
        replace(usual, tp=2),
        replace(usual, pp=2),
        replace(usual, context=2000),
        replace(usual, utilization=0.5),
    ]
    first = serving()
    for _ in range(2):
        for at in settings:
            changed = replace(first, at=at)
            for step in (decode(1, 100), decode(2, 100)):
                assert changed.expected_seconds(step) == step_time(SHAPE, at, step).expected
            for batch in (1, 4):
                assert (
                    changed.memory(batch) == MemoryPlanner.of(SHAPE, replace(at, batch=batch)).total
                )
