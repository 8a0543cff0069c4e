"""What a load should feel like: times of requests from the times of steps, and how much load keeps
a promise.

A closed loop in its steady state: so many requests are in the system, and one that ends is followed
by the next. Each step decodes every running request once and gives the rest of its token budget to
prompts, as the scheduler does. Prompts arrive one by one while there are steps enough for that;
beyond, they queue, and every step carries a piece of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvik.planner.known import Known
from kvik.planner.memory import memory_of
from kvik.planner.roofline import Step, decode, verify
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape
from kvik.planner.slo import Slo
from kvik.planner.speculation import expected_tokens

SMALLEST_BUDGET = 256  # tokens of a step: below, weights are read for too little


@dataclass(frozen=True, slots=True)
class Traffic:
    """Equal requests.

    Attributes:
        prompt, output: tokens.
        shared: tokens of the prompt that other requests have too, found in the prefix cache.
    """

    prompt: int
    output: int
    shared: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.output

    @property
    def halfway(self) -> int:
        """Context of a request with half of its output."""
        return self.prompt + self.output // 2 + 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculation: `drafts` tokens guessed for each step, at `seconds` a step for all requests,
    each accepted with probability `acceptance`, by a draft model or, without one, looked up."""

    drafts: int
    acceptance: float
    seconds: float = 0.0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Serving:
    """A model on a machine, set up.

    Attributes:
        room: requests of the whole context that fit in memory.
        seqs, budget: `max_num_seqs` and `max_num_batched_tokens`.
        usual_budget: what the engine chooses for the latter in the memory it has here.
        known: what was worked out already; changed settings share it.
    """

    shape: ModelShape
    at: Setting
    room: int
    seqs: int
    budget: int
    usual_budget: int
    drafting: Drafting | None = None
    known: Known = field(default_factory=Known, compare=False, repr=False)

    @property
    def most(self) -> int:
        """Requests that run at a time at most."""
        return min(self.room, self.seqs, self.budget // self.rows)

    @property
    def rows(self) -> int:
        """Tokens of a step that a decoding request takes: its own and its drafts."""
        return 1 + (self.drafting.drafts if self.drafting else 0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a load.

    Attributes:
        concurrency: requests in the system, running or waiting.
        ttft, tpot: seconds, of the mean request.
        e2e: seconds.
        rate: requests a second.
        output_rate: generated tokens a second.
    """

    concurrency: int
    ttft: float
    tpot: float
    e2e: float
    rate: float
    output_rate: float

    def excess(self, slo: Slo) -> float:
        """The largest of the mean times over their limits; at most 1 if all are kept."""
        return slo.excess(self.ttft, self.tpot, self.e2e)


def set_up(
    shape: ModelShape, at: Setting, traffic: Traffic, seqs: int, budget: int | None = None
) -> Serving:
    """With the memory that is left for requests of the traffic.

    Args:
        budget: None: what the engine chooses.

    Raises:
        ConfigError: the model cannot be shared by so many devices.
    """
    at = replace(at, context=traffic.context, batch=1)
    memory = memory_of(shape, at)
    chosen = memory.step_tokens
    return Serving(shape, at, memory.largest_batch, seqs, budget or chosen, chosen)


def predict(serving: Serving, traffic: Traffic, concurrency: int) -> Prediction | None:
    """Times and rates; None if not one request fits in memory.

    Raises:
        ConfigError: the machine's speed is unknown, or it has no link to siblings.
    """
    running = min(concurrency, serving.most)
    if running == 0:
        return None
    drafting = serving.drafting
    gain = expected_tokens(drafting.acceptance, drafting.drafts) if drafting else 1.0
    rounds = (traffic.output - 1) / gain  # steps that decode one request
    fresh = max(1, traffic.prompt - traffic.shared)
    # From one request of a place to the next; all of their tokens must pass through the budget.
    steps = max(rounds + 1.0, running * (fresh + rounds * serving.rows) / serving.budget)
    decoding = min(running - 1, round(running * rounds / steps))
    room = max(
        1, serving.budget - decoding * serving.rows
    )  # tokens of a step that prompts may have
    chunks = -(-fresh // room)  # steps of one prompt that has them to itself
    steps = max(steps, rounds + chunks)
    if running * chunks <= rounds:
        mixed = mixed_seconds(serving, traffic, decoding, fresh / chunks, fresh)
        others = (running - 1) * chunks
        each = (
            others * mixed + (rounds - others) * step_seconds(serving, traffic, running)
        ) / rounds
    else:
        each = mixed_seconds(serving, traffic, decoding, running * fresh / steps, fresh)
    # Some prompts share a step with mine, others are before it.
    beside = min(room, fresh / chunks * (1.0 + (running - 1) / (rounds + chunks)))
    waited = max(chunks, _with_queue(fresh / room, rounds, running))
    first = waited * mixed_seconds(serving, traffic, decoding, beside, fresh)
    cycle = (first + rounds * each) * concurrency / running
    tpot = each / gain if traffic.output > 1 else 0.0
    return Prediction(
        concurrency=concurrency,
        ttft=cycle - rounds * each,
        tpot=tpot,
        e2e=cycle,
        rate=concurrency / cycle,
        output_rate=concurrency * traffic.output / cycle,
    )


def largest_load(serving: Serving, traffic: Traffic, slo: Slo) -> Prediction | None:
    """The largest concurrency at which the SLO is kept, none of it waiting for a place; None if
    not even one request keeps them.

    Raises:
        ConfigError: as `predict`.
    """

    def kept(concurrency: int) -> bool:
        found = predict(serving, traffic, concurrency)
        return found is not None and found.excess(slo) <= 1.0

    most = largest(kept, serving.most)
    return predict(serving, traffic, most) if most else None


def budgets(serving: Serving) -> tuple[int, ...]:
    """Token budgets of a step worth trying: what it is, halved again and again."""
    found = []
    budget = serving.budget
    while budget >= SMALLEST_BUDGET:
        found.append(budget)
        budget //= 2
    return tuple(found) or (serving.budget,)


def largest(good: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that is good, found by doubling and halving; 0 if 1 is not.

    Whatever `good` is, one that is true of less never finds more.
    """
    low, high = 0, 1
    while high <= most and good(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _with_queue(service: float, away: float, count: int) -> float:
    """Steps at a station that serves one at a time, of `count` customers who are elsewhere for
    `away` steps in between: mean-value analysis (Reiser and Lavenberg 1980), with equal services,
    of which an arrival finds half of one left on average."""
    queue = busy = 0.0
    steps = service
    for customers in range(1, count + 1):
        steps = service * (1.0 + queue - busy / 2.0)
        rate = customers / (steps + away)
        queue, busy = rate * steps, min(1.0, rate * service)
        if busy > 0.999:  # each further one waits for one more
            return steps + (count - customers) * service
    return steps


def mixed_seconds(
    serving: Serving, traffic: Traffic, decoding: int, chunk: float, fresh: int
) -> float:
    """Seconds of a step that decodes and computes a chunk of prompts, halfway through one."""
    tokens = max(1, math.ceil(chunk))
    cached = traffic.shared + max(0, fresh - tokens) // 2
    runs = [(1, tokens, cached)]
    if tokens > fresh:  # several prompts
        runs = [(tokens // fresh, fresh, traffic.shared)]
        if tokens % fresh:
            runs.append((1, tokens % fresh, traffic.shared))
    return step_seconds(serving, traffic, decoding, runs)


def step_seconds(
    serving: Serving, traffic: Traffic, decoding: int, prompts: Sequence[tuple[int, int, int]] = ()
) -> float:
    """Of a step over prompts and decoding requests, halfway through their output, whose drafts are
    made and checked too."""
    if not decoding:
        return _expected(serving, Step(tuple(prompts)))
    context, drafting = traffic.halfway, serving.drafting
    plain = decode(decoding, context)
    seconds = _expected(serving, Step((*prompts, *plain.runs)))
    if drafting is None:
        return seconds
    checking = _expected(serving, verify(decoding, context, drafting.drafts))
    return seconds + drafting.seconds + checking - _expected(serving, plain)


def _expected(serving: Serving, step: Step) -> float:
    return serving.known.step_seconds(serving.shape, serving.at, step)
