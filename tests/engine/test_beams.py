"""Beam search in the engine core, over a worker that checks every key that a step reads."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers import invariants
from helpers.fake_worker import EOS, FakeWorker, extend_state, likely_tokens, start_state
from helpers.served_engine import FakeExecutor, tiny_config
from helpers.simulation import Setup
from helpers.tiers import runs

from kvik.config.config import ResolvedConfig
from kvik.core.config import POLICIES
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, Pin, RequestDelta
from kvik.engine.core import EngineCore, salt_of
from kvik.engine.loop import EngineLoop
from kvik.errors import ParamError


class CheckedExecutor(FakeExecutor):
    """Runs plans on a `FakeWorker`.

    Attributes:
        failing_row: of the next step.
    """

    def __init__(self, config: ResolvedConfig, depth: int) -> None:
        super().__init__(depth=depth)
        self.worker = FakeWorker(config.cache, lambda new: new.cache_salt)
        self.failing_row: int | None = None

    def submit(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        row, self.failing_row = self.failing_row, None
        output = self.worker.execute(plan, failing_row=row)
        assert output is not None
        return output


class Rig:
    def __init__(self, setup: Setup) -> None:
        self.config = replace(tiny_config(), cache=setup.cache, scheduler=setup.scheduler)
        self.executor = CheckedExecutor(self.config, setup.depth)
        self.core = EngineCore(self.config)
        self.now = 0.0
        self.loop = EngineLoop(self.core, self.executor, self.clock)
        self.deltas: dict[str, list[RequestDelta]] = {}

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    def add(self, request: EngineRequest) -> None:
        self.loop.add(request)
        self.deltas[request.request_id] = []

    def step(self) -> None:
        for delta in self.loop.step():
            self.deltas[delta.request_id].append(delta)
        invariants.check(self.core.scheduler)

    def drain(self) -> None:
        for _ in range(3000):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, "the engine did not come to rest"
        pool = self.core.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks


def setup(**changes: object) -> Setup:
    sizes = {"policy": "fcfs", "block_size": 4, "num_blocks": 64, "windows": (None,), "budget": 32}
    return Setup(**{**sizes, "max_num_seqs": 8, "depth": 1, **changes})


def beams(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> EngineRequest:
    defaults = {"num_beams": 3, "max_tokens": 6, "stop_token_ids": (EOS,), "logprobs": 0}
    return EngineRequest(name, list(prompt), SamplingParams(**{**defaults, **params}))


def searched(prompt: list[int], salt: str, params: SamplingParams) -> list[tuple[list[int], float]]:
    """Return the outputs of a search by its definition, with the sums of log probabilities."""

    def likely(output: list[int]) -> list[tuple[int, float]]:
        state = start_state(salt)
        for token in (*prompt, *output):
            state = extend_state(state, token)
        return likely_tokens(state)

    def score(output: list[int], logprob: float) -> float:
        return logprob / len(output) ** params.length_penalty

    width, ended = params.num_beams, list[tuple[list[int], float]]()
    live: list[tuple[list[int], float]] = [([], 0.0)]
    while live:
        longer = [([*o, t], sum_ + p) for o, sum_ in live for t, p in likely(o)]
        longer.sort(key=lambda pair: -pair[1])
        last = len(longer[0][0]) == params.max_tokens
        ended += [one for one in longer[:width] if last or one[0][-1] in params.stop_token_ids]
        ended = sorted(ended, key=lambda one: -score(*one))[:width]
        live = [one for one in longer if not last and one[0][-1] not in params.stop_token_ids]
        live = live[:width]
        full = len(ended) == width
        if live and full and (params.early_stopping or score(*live[0]) <= score(*ended[-1])):
            break
    return ended[: params.n]


def checked(rig: Rig, request: EngineRequest) -> None:
    """Check the outputs of a search that has ended."""
    right = searched(list(request.prompt_token_ids), salt_of(rig.config, request), request.params)
    deltas = {delta.index: delta for delta in rig.deltas[request.request_id]}
    assert len(deltas) == len(rig.deltas[request.request_id]) == request.params.n
    for index, (tokens, logprob) in enumerate(right):
        delta = deltas[index]
        assert (delta.error, delta.token_ids) == (None, tokens), index
        assert sum(entry.logprob for entry in delta.logprobs or ()) == pytest.approx(logprob)
        stops = tokens[-1] in request.params.stop_token_ids
        assert delta.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
        assert delta.stop_reason == (tokens[-1] if stops else None)
        assert delta.report is not None and delta.report.num_output_tokens == len(tokens)


def drawn_setup(rng: random.Random) -> Setup:
    caching = rng.random() < 0.8
    return setup(
        policy=rng.choice(POLICIES),
        block_size=rng.choice([1, 2, 4, 8]),
        num_blocks=rng.choice([20, 30, 60]) * 8,
        windows=rng.choice([(None,), (None,), (4,), (None, 3), (5, None, 8)]),
        budget=rng.choice([4, 8, 32]),
        max_num_seqs=rng.randint(1, 6),
        depth=rng.randint(1, 3),
        caching=caching,
        max_wait=0.05,
        checkpoints=rng.choice([None, None, None, 1, 12]),
    )


def drawn_request(rng: random.Random, name: str) -> EngineRequest:
    prompt = [rng.randint(0, 1)] * rng.randint(0, 12) + [rng.randint(0, 1)]
    params = SamplingParams(max_tokens=rng.randint(1, 8), stop_token_ids=(EOS,), temperature=0)
    if rng.random() < 0.7:
        width = rng.randint(2, 5)
        params = params.with_changes(
            num_beams=width,
            n=rng.randint(1, 2),
            length_penalty=rng.choice([0.0, 1.0, 1.0, 2.0, -0.5]),
            early_stopping=rng.random() < 0.3,
            logprobs=rng.choice([0, 2]),
        )
    salt, tenant = rng.choice(["", "", "other"]), rng.choice(["", "", "b"])
    pins = (Pin(6, 0.5),) if rng.random() < 0.2 else ()
    return EngineRequest(name, prompt, params, cache_salt=salt, tenant=tenant, pins=pins)


@pytest.mark.parametrize("seed", range(runs(90)))
def test_outputs_do_not_depend_on_the_schedule(seed):
    rng = random.Random(seed)
    made = drawn_setup(rng)
    one = replace(made, num_blocks=10**6).cache.max_blocks(24, made.budget)
    rig = Rig(replace(made, num_blocks=one + rng.choice([0, 4, 40])))
    requests = [drawn_request(rng, f"r{i}") for i in range(rng.randint(1, 5))]
    given_up = set()
    for request in requests:
        rig.add(request)
        for _ in range(rng.randint(0, 6)):
            rig.step()
        if rng.random() < 0.15:
            given_up.add(request.request_id)
            rig.loop.end(request.request_id)
    rig.drain()
    for request in requests:
        deltas = rig.deltas[request.request_id]
        reasons = {delta.finish_reason for delta in deltas} - {None}
        if request.params.num_beams > 1 and reasons != {FinishReason.ABORT}:
            checked(rig, request)
        elif request.request_id not in given_up:
            assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}
    assert not rig.core.scheduler.kv.pool.pin_counts() or any(r.pins for r in requests)


def test_equal_and_other_searches_run_side_by_side():
    """Among them searches that end long before the others."""
    rng = random.Random(7)
    rig = Rig(setup(num_blocks=4000, max_num_seqs=256, budget=1024, block_size=8))
    requests = []
    for i in range(20):
        prompt = tuple(rng.choices((0, 1, 2), k=rng.randint(1, 9)))
        width = rng.randint(2, 5)
        params = {"num_beams": width, "n": width, "early_stopping": i % 3 == 0}
        params |= {"length_penalty": rng.choice([0.0, 1.0, 3.0]), "max_tokens": 16}
        requests += [beams(f"{i}", prompt, **params), beams(f"{i} again", prompt, **params)]
    for request in requests:
        rig.add(request)
    rig.drain()
    for request in requests:
        checked(rig, request)


def test_a_round_computes_one_token_for_each_beam():
    rig = Rig(setup())
    prompt = (0, 1, 0, 1, 1)
    request = beams("a", prompt, num_beams=4, n=4, max_tokens=20, stop_token_ids=())
    rig.add(request)
    rig.drain()
    checked(rig, request)
    scheduler = rig.core.scheduler
    assert scheduler.counters.scheduled_tokens == len(prompt) + 19 * 4
    copies = sum(len(plan.block_copies) for plan in rig.executor.plans)
    assert copies < 19 * 3  # the last beam that continues a block takes it
    # Nothing is left of partly filled blocks, which would take the place of other prefixes.
    hashes = {key for (_, key), _ in scheduler.kv.pool.index_items()}
    assert len(hashes) < 6 * 4 + 2
    assert scheduler.counters.delivered_tokens == 4 * 20


@pytest.mark.parametrize("how", ["row", "deadline", "abort", "one output"])
def test_a_search_ends_as_a_whole(how):
    rig = Rig(setup(depth=2))
    request = beams(num_beams=3, n=2, max_tokens=30, stop_token_ids=())
    rig.add(replace(request, deadline=rig.now + 0.5 if how == "deadline" else None))
    rig.add(EngineRequest("b", [5, 6], SamplingParams(max_tokens=4, temperature=0)))
    for _ in range(7):
        rig.step()
    if how == "row":
        rig.executor.failing_row = 0
    elif how == "deadline":
        rig.now += 1.0
    else:
        rig.loop.end("a", 1 if how == "one output" else None)
        contents = [*rig.core.scheduler.kv.pool.index_items()]
        rig.deltas["a"] += rig.core.take_finished()  # a replay does that at another time
        assert [*rig.core.scheduler.kv.pool.index_items()] == contents
    rig.drain()
    expected = {"row": FinishReason.ERROR, "deadline": FinishReason.DEADLINE}
    reason = expected.get(how, FinishReason.ABORT)
    assert [(d.index, d.finish_reason) for d in rig.deltas["a"]] == [(0, reason), (1, reason)]
    assert rig.deltas["b"][-1].finish_reason is FinishReason.LENGTH
    rig.add(request)  # its name is free again
    rig.drain()
    assert rig.deltas["a"][0].finish_reason is FinishReason.LENGTH


def test_rules_that_leave_too_few_outputs_are_an_error(monkeypatch):
    """A worker whose only possible token is 0."""
    monkeypatch.setattr(
        "helpers.fake_worker.likely_tokens", lambda state: [(0, 0.0), (1, float("-inf"))]
    )
    rig = Rig(setup())
    rig.add(beams(n=2, max_tokens=4))
    rig.drain()
    first, second = rig.deltas["a"]
    assert first.token_ids == [0] * 4 and first.error is None
    assert second.finish_reason is FinishReason.ERROR and "n: " in (second.error or "")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 4}, "n"),
        ({"stop": "x"}, "stop"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 65}, "num_beams"),
        ({"num_beams": 60, "stop_token_ids": tuple(range(41))}, "num_beams"),
    ],
)
def test_impossible_searches_are_refused(params, field):
    rig = Rig(setup())
    with pytest.raises(ParamError) as error:
        rig.add(beams(**params))
    assert error.value.field == field
