"""Replicas under a virtual clock: the gain of routing by prefixes, and that nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import pytest
from helpers.configs import PUBLIC

from kvik.cli import main
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.core.config import TierSizes
from kvik.core.plan import NOWHERE, PageLoad, PageStore, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import SchedulerCounters
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop, LoopObserver
from kvik.errors import CapacityError, ConfigError, KvikError
from kvik.launch import load_worker, resolve_config
from kvik.planner.plan import Question
from kvik.planner.roofline import PlannedStep
from kvik_bench.cli import simulate as verb
from kvik_bench.simulation import (
    ANSWER,
    Conversations,
    Outcome,
    SimulatedEngine,
    SimulatedReplica,
    SimulatedTiers,
    Traffic,
    simulate,
)

BUSY = Traffic(requests=1200, rate=150.0, seed=3)
ROOMY = SimulatedEngine(blocks=16_384)


@pytest.fixture(scope="module")
def routed() -> Outcome:
    """Return the outcome of a busy day of eight replicas with large caches."""
    return simulate(BUSY, ROOMY, 8)


@pytest.mark.full
def test_eight_replicas_have_most_hits_of_one_large_cache(routed):
    in_turn = simulate(BUSY, ROOMY, 8, "round-robin")
    assert routed.requests == in_turn.requests == BUSY.requests
    assert routed.prompt_tokens == in_turn.prompt_tokens
    assert routed.hit_tokens >= 2 * in_turn.hit_tokens
    assert routed.hit_tokens >= 0.9 * routed.ideal_tokens
    assert routed.imbalance <= 1.3


@pytest.mark.full
def test_a_lost_replica_only_loses_its_own_hits(routed):
    lost = simulate(BUSY, ROOMY, 8, lose=(4.0, 3))
    assert lost.requests == BUSY.requests and lost.retried > 0
    assert lost.hit_tokens >= 0.8 * routed.hit_tokens


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
def test_the_same_seed_gives_the_same_run(policy: str):
    traffic = Traffic(requests=60, rate=50.0)
    runs = [simulate(traffic, SimulatedEngine(blocks=1024), 3, policy) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].requests == 60
    assert runs[0].hit_tokens <= runs[0].ideal_tokens <= runs[0].prompt_tokens


def test_requests_of_a_lost_replica_restart_elsewhere():
    traffic = Traffic(requests=60, rate=50.0)
    outcome = simulate(traffic, SimulatedEngine(blocks=1024), 3, lose=(0.4, 1))
    assert outcome.requests == 60 and outcome.retried > 0
    assert outcome.busy[1] < outcome.busy[0] / 2


def test_one_replica_has_the_hits_of_one_cache():
    shares: list[float] = []
    traffic = Traffic(requests=40, rate=0.5)
    outcome = simulate(traffic, SimulatedEngine(blocks=4096), 1, tell=shares.append)
    assert shares == [(i + 1) / 40 for i in range(40)]  # as on a terminal
    assert 0.99 * outcome.ideal_tokens <= outcome.hit_tokens <= outcome.ideal_tokens


def test_conversations_that_reach_the_context_begin_again():
    """The system prompt stays cached."""
    traffic = Traffic(requests=60, turns=20, rate=0.5, systems=1, system_tokens=64)
    outcome = simulate(traffic, SimulatedEngine(context=256), 1)
    assert outcome.requests == 60 and outcome.prompt_tokens < 60 * 256
    assert 59 * 64 <= outcome.ideal_tokens == outcome.hit_tokens
    with pytest.raises(ConfigError):
        simulate(traffic, SimulatedEngine(context=65), 1)


class Clock(LoopObserver):
    """The time of an engine whose steps take 5 ms, and 0.1 ms for each token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rows: list[int] = []  # tokens of each step

    def step(self, step: PlannedStep) -> float:
        self.rows.append(step.rows)
        return 0.005 + step.rows * 1e-4

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        if plan is not None:
            self.now = now + self.step(PlannedStep(((1, sum(plan.num_scheduled_tokens), 0),)))


def real_run(
    resolved: ResolvedConfig, traffic: Traffic
) -> tuple[SchedulerCounters, list[int], list[float]]:
    """Return the counters, the tokens of each step and the times to first tokens of a real engine
    that answers conversations."""
    clock, worker, ttft = Clock(), load_worker(resolved), []
    loop = EngineLoop(EngineCore(resolved), worker, lambda: clock.now, [clock])
    talk = Conversations(traffic, resolved.scheduler.max_model_len)
    numbers, vocab = count(), resolved.model.vocab_size
    events = [(time, next(numbers), turn) for time, turn in talk.starts()]
    running = {}
    while events or running:
        if not running:
            clock.now = max(clock.now, events[0][0])
        while events and events[0][0] <= clock.now:
            at, number, turn = heappop(events)
            answer = SamplingParams(
                max_tokens=turn.output, ignore_eos=True, allowed_token_ids=(ANSWER,)
            )
            loop.add(EngineRequest(str(number), [t % vocab for t in turn.tokens], answer))
            running[str(number)] = at, turn
        for delta in loop.step():
            at, turn = running[delta.request_id]
            if delta.prompt is not None:
                ttft.append(clock.now - at)
            if delta.finish_reason is not None:
                del running[delta.request_id]
                if turn.rest:
                    pause, following = talk.after(turn)
                    heappush(events, (clock.now + pause, next(numbers), following))
    worker.stop()
    return loop.core.scheduler.counters, clock.rows, sorted(ttft)


def test_a_simulated_engine_takes_the_steps_of_a_real_one() -> None:
    """With chunks of prompts, preemptions and prefix hits, and as many tokens in each step."""
    sizes = {"system_tokens": 48, "user_tokens": 24, "output_tokens": 24}
    traffic = Traffic(requests=60, rate=2000.0, turns=2, think=0.05, systems=3, **sizes)
    resolved = resolve_config(
        EngineConfig(num_blocks=75, max_num_seqs=16, max_num_batched_tokens=128)
    )
    counters, rows, ttft = real_run(resolved, traffic)
    clock, cache, limits = Clock(), resolved.cache, resolved.scheduler
    engine = SimulatedEngine(
        cache.num_blocks,
        cache.block_size,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        clock.step,
        limits.max_model_len,
        cache.groups,
    )
    outcome = simulate(traffic, engine, 1)
    assert clock.rows == rows and outcome.steps == counters.steps
    assert outcome.preemptions == counters.preemptions > 0
    assert outcome.hit_tokens == counters.prefix_hits > 0
    assert outcome.first_tokens == pytest.approx(ttft)


SMALL = SimulatedEngine(blocks=600)
PAGE = 1_600_000  # bytes
TIERED = {
    "memory": TierSizes((PAGE,), 4000),
    "disk": TierSizes((PAGE,), 0, 4000 * PAGE),
    "both": TierSizes((PAGE,), 500, 4000 * PAGE),
}


@pytest.mark.parametrize(
    "name", ["both", *(pytest.param(n, marks=pytest.mark.full) for n in ("memory", "disk"))]
)
def test_tiers_keep_evicted_pages(name: str):
    traffic = Traffic(requests=150, rate=10.0, seed=1, output_tokens=16)
    plain = simulate(traffic, SMALL, 1)
    engine = replace(SMALL, tiers=TIERED[name])
    tiered = simulate(traffic, engine, 1)
    assert tiered.requests == plain.requests == traffic.requests
    assert tiered.prompt_tokens == plain.prompt_tokens and plain.loaded_tokens == 0
    assert 0 < tiered.loaded_tokens <= tiered.hit_tokens <= tiered.ideal_tokens
    assert tiered.hit_tokens >= 1.2 * plain.hit_tokens
    assert tiered == simulate(traffic, engine, 1)


@pytest.mark.full
def test_a_conversation_continues_where_the_memory_tier_has_it(routed):
    """With small caches, routing with the tier finds most of the hits of large caches."""
    tiered = simulate(BUSY, replace(ROOMY, blocks=2000, tiers=TierSizes((PAGE,), 16_384)), 8)
    assert tiered.hit_tokens >= 0.85 * routed.hit_tokens


def test_loads_take_time_by_their_rate():
    """If loading takes longer than computing, little is loaded, and late."""
    traffic = Traffic(requests=60, rate=5.0, seed=1, output_tokens=16)
    fast, slow = (
        simulate(traffic, replace(SMALL, blocks=300, tiers=TIERED["memory"], memory_rate=rate), 1)
        for rate in (20e9, 2e8)
    )
    assert slow.loaded_tokens < fast.loaded_tokens / 2
    assert slow.ttft(0.99) > fast.ttft(0.99)


def test_a_load_ends_with_its_last_bytes():
    engine = replace(SMALL, tiers=TIERED["both"], memory_rate=1e9, disk_rate=1e8)
    tiers = SimulatedTiers(engine)
    assert tiers.take(0.0).scanned and tiers.take(0.0) is None
    plan = SchedulerOutput(0, [], [], [], [])
    plan.stores.append(PageStore((0, b"a"), b"", 1, place=0, on_disk=True))
    plan.loads.append(PageLoad(7, [((0, b"b"), 2, 5), ((0, b"c"), 3, NOWHERE)]))
    tiers.begin(plan, 1.0)
    assert tiers.wait(1.0) == 1.0 + 0.016  # of disk: writes and reads overlap
    assert tiers.take(1.0159) is None
    moved = tiers.take(1.0161)
    assert moved.loaded == [(7, [])] and moved.stored == [(0, b"a")]
    assert moved.rates == [("memory", PAGE, PAGE / 1e9), ("disk", PAGE, PAGE / 1e8)]
    plan.stores.clear()
    plan.loads[0].pages.pop()
    for now in (2.0, 2.0):  # the second one waits for the first
        tiers.begin(plan, now)
    assert [len(tiers.take(at).loaded) for at in (2.0017, 2.0033)] == [1, 1]


@pytest.mark.parametrize(("model", "prompt"), [("llama-3.1-8b", 32_768), ("qwen3-30b-a3b", 256)])
def test_a_prompt_takes_the_planned_time(
    model: str, prompt: int, capsys: pytest.CaptureFixture[str]
):
    """Late chunks attend to all before them, and few tokens wake most experts."""
    traffic = Traffic(requests=1, systems=1, system_tokens=prompt, user_tokens=1, output_tokens=1)
    outcome = simulate(traffic, verb.simulated(Question(model, "h100"), verb.Replicas()), 1)
    words = ["plan", model, "--hardware", "h100", "--context", str(prompt)]
    assert main.main([*words, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["speed"]["prefill"][-1]
    assert outcome.ttft(0.5) == pytest.approx(planned["expected"], rel=0.02)


def test_caches_keep_only_the_windows_of_layers(capsys: pytest.CaptureFixture[str]):
    """As many requests fit as the planner says."""
    words = ["plan", "gemma-3-4b", "--hardware", "h100", "--context", "131072", "--json"]
    assert main.main(words) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    asked = verb.Replicas(max_num_batched_tokens=memory["step_tokens"])
    cache = SimulatedReplica(
        verb.simulated(Question("gemma-3-4b", "h100"), asked)
    ).scheduler.kv.config
    each = cache.max_blocks(131_072, memory["step_tokens"])
    assert cache.num_blocks // each == pytest.approx(memory["largest_batch"], abs=1)


def test_states_are_kept_for_a_few_requests(tmp_path: Path):
    """A prefix is only hit where a copy of the states is, of which each request has two. A tier
    keeps more of them."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["LFM2-1.2B"]))
    asked = Question(str(tmp_path / "config.json"), "h100")
    traffic = Traffic(requests=60, rate=5.0, systems=1)
    few, many = (
        simulate(traffic, verb.simulated(asked, verb.Replicas(max_num_seqs=seqs)), 1)
        for seqs in (1, 64)
    )
    assert few.hit_tokens < 0.7 * many.hit_tokens
    tiers = verb.Replicas(max_num_seqs=1, kv_tiers="memory:4GiB")
    kept = simulate(traffic, verb.simulated(asked, tiers), 1)
    assert kept.hit_tokens > 1.2 * few.hit_tokens
    with pytest.raises(CapacityError, match="kv_tiers"):
        verb.simulated(asked, verb.Replicas(kv_tiers="memory:100KiB"))


def test_a_trace_gives_the_times_and_lengths_of_requests(tmp_path: Path):
    path = tmp_path / "trace.csv"
    lengths = [(300, 8), (70, 1), (500, 20)]
    rows = [f"2023-11-16 18:15:{2 * i:02},{p},{o}" for i, (p, o) in enumerate(lengths)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    traffic = Traffic(requests=3, trace=str(path))
    outcome = simulate(traffic, SimulatedEngine(), 2)
    assert (outcome.requests, outcome.prompt_tokens, outcome.hit_tokens) == (3, 870, 0)
    assert 4 < outcome.seconds < 5
    assert simulate(replace(traffic, speed=4.0), SimulatedEngine(), 2).seconds < 2
    assert simulate(replace(traffic, requests=2), SimulatedEngine(), 2).prompt_tokens == 370
    with pytest.raises(ConfigError, match="520"):
        simulate(traffic, SimulatedEngine(context=512), 2)


def test_engines_are_those_of_the_planner(capsys: pytest.CaptureFixture[str]):
    """Divided, and with smaller formats, an engine has more room and faster steps."""
    words = ["simulate", "llama-3.1-8b", "--hardware", "h100", "--replicas", "1", "--requests", "5"]
    words += ["--turns", "1", "--json"]
    times = []
    words += ["--output-tokens", "10000"]  # of the load, not a question to the planner
    for flags in ([], ["--tp", "4"], ["--tp", "4", "--dtype", "fp8"]):
        assert main.main([*words, *flags]) == 0
        times.append(json.loads(capsys.readouterr().out)[0]["ttft_p50"])
    assert times[0] > 2 * times[1] > 2 * times[2]
    asked = Question("llama-3.1-70b", "h100")
    with pytest.raises(ConfigError, match="hardware"):
        verb.simulated(asked, verb.Replicas())
    two, four = (verb.simulated(replace(asked, tp=tp), verb.Replicas()).blocks for tp in (2, 4))
    assert four > 4 * two > 0


@pytest.mark.full
def test_the_verb_compares_policies(capsys: pytest.CaptureFixture[str]):
    words = ["simulate", "--hardware", "h100", "--replicas", "2", "--requests", "30", "--json"]
    assert main.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found] == ["prefix", "round-robin"]
    assert all(one["requests"] == 30 and len(one["busy"]) == 2 for one in found)
    assert main.main(words[:-1]) == 0
    assert "round-robin" in capsys.readouterr().out
    tiers = ["--num-blocks", "80", "--kv-tiers", "memory:1GiB,disk:DIR:9GiB"]
    assert main.main([*words, *tiers]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loaded_tokens"] > 0
    assert main.main([*words[:-1], *tiers, "--rate", "2"]) == 0
    assert "loaded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "field"),
    [
        ("--replicas", "0", "replicas"),
        ("--rate", "0", "rate"),
        ("--num-blocks", "1", "num_blocks"),
        ("--disk-rate", "0", "disk_rate"),
        ("--trace none.csv --speed", "1e-300", "speed"),  # times would be infinite
        ("--max-num-batched-tokens", "63", "max_num_seqs"),
        ("--kv-tiers", "memory:1KiB", "kv_tiers"),
        ("--kv-tiers", "disk:1GiB", "kv_tiers"),
    ],
)
def test_bad_numbers_name_their_field(flag: str, value: str, field: str):
    with pytest.raises(KvikError, match=f"^{field}: "):
        verb.run(verb.build_parser().parse_args(["--hardware", "h100", *flag.split(), value]))


@pytest.mark.parametrize(
    "words", ["--trace x.csv --rate 2", "--trace x.csv --turns 2", "--speed 2"]
)
def test_flags_that_would_not_count_are_refused(words: str):
    flag = words.split()[-2]
    with pytest.raises(KvikError) as raised:
        verb.run(verb.build_parser().parse_args(["--hardware", "h100", *words.split()]))
    assert raised.value.field == flag.removeprefix("--")
