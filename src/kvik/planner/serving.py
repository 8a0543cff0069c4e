"""Predictions of serving: latencies of requests from the times of steps, and the largest load that
keeps an SLO.

The model is a closed loop in its steady state: a fixed number of requests is in the system, and a
request that ends is followed by the next. Each step decodes every running request once and gives
the rest of its token budget to prompts, as the scheduler does. Prompts arrive one by one while
there are enough steps for that; beyond, they queue, and every step carries a chunk of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from kvik.errors import ParamError
from kvik.options import Kind, bad_value
from kvik.planner.devices import Setting
from kvik.planner.memory import bytes_of, memory_of
from kvik.planner.roofline import PlannedStep, decode, step_time, verify
from kvik.planner.search import largest
from kvik.planner.shape import ModelShape
from kvik.planner.speculation import expected_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on the latencies of a request, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def excess(self, ttft: float | None, tpot: float | None, e2e: float | None) -> float:
        """Return the largest ratio of a time to its limit; at most 1 if all limits are kept. A time
        that is None, as the TPOT of a single token, keeps its limit."""
        pairs = ((ttft, self.ttft), (tpot, self.tpot), (e2e, self.e2e))
        return max(
            (time / limit for time, limit in pairs if time is not None and limit is not None),
            default=0.0,
        )

    def __str__(self) -> str:
        pairs = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return ",".join(f"{name}={value * 1e3:g}ms" for name, value in pairs if value is not None)


class SloText(Kind):
    """Limits, written as `parse_slo` reads them."""

    metavar = "SLO"

    def parse(self, text: str) -> Slo:
        return parse_slo(text)

    def checked(self, value: object) -> Slo:
        if not isinstance(value, Slo):
            raise bad_value("a Slo", value)
        return value


def parse_slo(text: str) -> Slo:
    """ "ttft=300ms,tpot=50ms,e2e=5s" -> Slo.

    Raises:
        ParamError: an unknown name, a name twice, or no positive time with unit s or ms.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in ("ttft", "tpot", "e2e") or name in limits or not value:
            raise ParamError("slo", f"must be like ttft=300ms,tpot=50ms,e2e=5s, not {text[:60]!r}")
        limits[name] = parse_seconds("slo", value)
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def parse_seconds(field: str, text: str) -> float:
    """ "300ms", "5s" or "2m" -> seconds.

    Raises:
        ParamError: anything else, zero and infinity included.
    """
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("smh")
    try:
        seconds = float(number) * units[text[len(number) :]]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise ParamError(field, f"must be a time such as 300ms, 5s or 2m, not {text[:60]!r}")
    return seconds


SMALLEST_BUDGET = 256  # tokens of a step: with fewer, weights are read for too few tokens


@dataclass(frozen=True, slots=True)
class Traffic:
    """A load of equal requests.

    Attributes:
        prompt, output: tokens of a request.
        shared: leading tokens of the prompt that are found in the prefix cache.
    """

    prompt: int
    output: int
    shared: int = 0

    @property
    def context(self) -> int:
        return self.prompt + self.output

    @property
    def halfway(self) -> int:
        """The context of a request that has half of its output."""
        return self.prompt + self.output // 2 + 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculative decoding.

    Attributes:
        drafts: tokens drafted for each request in each step.
        acceptance: probability that a draft is accepted.
        seconds: of drafting for all requests in a step.
        model: that drafts; "": prompt lookup.
    """

    drafts: int
    acceptance: float
    seconds: float = 0.0
    model: str = ""


@dataclass(slots=True)
class Memo:
    """Step times and memory of one model on one machine, by all else that they depend on: advice
    asks for the same ones again and again."""

    steps: dict[Hashable, float] = field(default_factory=dict)
    memory: dict[Hashable, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Serving:
    """A model served on a machine with given limits.

    Attributes:
        room: requests of the full context that fit in memory.
        seqs, budget: `max_num_seqs` and `max_num_batched_tokens`.
        usual_budget: `max_num_batched_tokens` as the engine chooses it in this memory.
        memo: shared by the settings of this model on this machine.
    """

    shape: ModelShape
    at: Setting
    room: int
    seqs: int
    budget: int
    usual_budget: int
    drafting: Drafting | None = None
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    def expected_seconds(self, step: PlannedStep) -> float:
        """Return the expected duration of a step.

        Raises:
            ConfigError: as `step_time`.
        """
        at = self.at
        key = (at.weight_format, at.kv_format, at.tp, at.pp, step)
        if key not in self.memo.steps:
            self.memo.steps[key] = step_time(self.shape, at, step).expected
        return self.memo.steps[key]

    def memory(self, batch: int) -> tuple[int, int]:
        """Return the bytes that `batch` requests need on the fullest device, and its limit."""
        at = self.at
        key = (at.weight_format, at.kv_format, at.tp, at.pp, at.context, batch, at.utilization)
        if key not in self.memo.memory:
            self.memo.memory[key] = bytes_of(self.shape, replace(at, batch=batch))
        return self.memo.memory[key]

    @property
    def most(self) -> int:
        """The largest number of requests that run at a time."""
        return min(self.room, self.seqs, self.budget // self.rows)

    @property
    def rows(self) -> int:
        """Tokens of a step for each decoding request: its own and its drafts."""
        return 1 + (self.drafting.drafts if self.drafting else 0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Latencies and rates of a load.

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
        """Return the largest ratio of a mean time to its limit; at most 1 if all are kept."""
        return slo.excess(self.ttft, self.tpot, self.e2e)


def set_up(
    shape: ModelShape, at: Setting, traffic: Traffic, seqs: int, budget: int | None = None
) -> Serving:
    """Return the serving setting with the memory that is left for requests of the traffic.

    Args:
        seqs, budget: `max_num_seqs`, and `max_num_batched_tokens` or None for the engine's choice.

    Raises:
        ConfigError: the model cannot be shared by this many devices.
    """
    at = replace(at, context=traffic.context, batch=1)
    memory = memory_of(shape, at)
    chosen = memory.step_tokens
    return Serving(shape, at, memory.largest_batch, seqs, budget or chosen, chosen)


def predict(serving: Serving, traffic: Traffic, concurrency: int) -> Prediction | None:
    """Predict latencies and rates of a closed loop; None if not one request fits in memory.

    Raises:
        ConfigError: the machine's speed is unknown, or it has no link to siblings.
    """
    running = min(concurrency, serving.most)
    if running == 0:
        return None
    drafting = serving.drafting
    gain = expected_tokens(drafting.acceptance, drafting.drafts) if drafting else 1.0
    rounds = (traffic.output - 1) / gain  # decoding steps of one request
    fresh = max(1, traffic.prompt - traffic.shared)
    # Steps from one request of a slot to the next: all their tokens must pass through the budget.
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
    # Some prompts share a step with this one, others come before it.
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
    """Predict the largest concurrency that keeps the SLO while no request waits for a slot; None
    if a single request does not keep it.

    Raises:
        ConfigError: as `predict`.
    """

    def kept(concurrency: int) -> bool:
        found = predict(serving, traffic, concurrency)
        return found is not None and found.excess(slo) <= 1.0

    most = largest(kept, serving.most)
    return predict(serving, traffic, most) if most else None


def budgets(serving: Serving) -> tuple[int, ...]:
    """Return the token budgets worth trying: the current one, halved repeatedly."""
    found = []
    budget = serving.budget
    while budget >= SMALLEST_BUDGET:
        found.append(budget)
        budget //= 2
    return tuple(found) or (serving.budget,)


def _with_queue(service: float, away: float, count: int) -> float:
    """Return the steps that a customer spends at a station with one server, queueing included.

    `count` customers alternate between the station and `away` steps elsewhere: mean-value analysis
    (Reiser and Lavenberg 1980) with equal service times, where an arrival finds half of a service
    left on average.
    """
    queue = busy = 0.0
    steps = service
    for customers in range(1, count + 1):
        steps = service * (1.0 + queue - busy / 2.0)
        rate = customers / (steps + away)
        queue, busy = rate * steps, min(1.0, rate * service)
        if busy > 0.999:  # each further customer waits for one more service
            return steps + (count - customers) * service
    return steps


def mixed_seconds(
    serving: Serving, traffic: Traffic, decoding: int, chunk: float, fresh: int
) -> float:
    """Return the seconds of a step that decodes and computes a chunk of prompts.

    Args:
        decoding: requests that decode.
        chunk: tokens of prompts; the chunk lies in the middle of a prompt.
        fresh: tokens of a prompt that are not cached.
    """
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
    """Return the seconds of a step over prompts and decoding requests, drafting included.

    Args:
        decoding: requests that decode, halfway through their output.
        prompts: runs of `PlannedStep`.
    """
    if not decoding:
        return serving.expected_seconds(PlannedStep(tuple(prompts)))
    context, drafting = traffic.halfway, serving.drafting
    plain = decode(decoding, context)
    seconds = serving.expected_seconds(PlannedStep((*prompts, *plain.runs)))
    if drafting is None:
        return seconds
    checking = serving.expected_seconds(verify(decoding, context, drafting.drafts))
    return seconds + drafting.seconds + checking - serving.expected_seconds(plain)


# Requests that arrive at random, in an open loop.
#
# A step takes in all prompts that arrived during the one before, as far as its budget goes: service
# in bulk (Bailey 1954). The wait of a request has three parts.
#
# - The rest of the step that runs when it arrives. An arrival meets a long step more often than a
#   short one: a step of E[s^2] / E[s], of which half is left.
# - Its own step, which also computes the prompts that arrived with it.
# - Steps that are full before its turn. Bulk service of c prompts in steps of equal length leaves
#   as many behind as a queue with c servers does (Crommelin 1932), whose wait with equal services
#   is about half of Erlang's. With prompts that fill a step, c = 1, that is the formula of
#   Pollaczek and Khinchine. The same holds for places: `most` servers, each busy for a whole
#   request.
#
# The number of prompts in a step follows from the length of the step before. Its mean and variance
# are iterated, each time over two values that have both.

FULL = 0.999  # utilisation from which on the wait counts as infinite
ITERATIONS = 12  # until the lengths of steps have settled to a percent


def predict_rate(serving: Serving, traffic: Traffic, rate: float) -> Prediction | None:
    """Predict random arrivals at `rate` requests a second: the concurrency that completes as many,
    and how long requests wait. None if they arrive as fast as they can be served, or faster.

    Raises:
        ConfigError: as `predict`.
    """

    def slower(concurrency: int) -> bool:
        found = predict(serving, traffic, concurrency)
        return found is not None and found.rate < rate

    most = max(1, serving.most)
    full = predict(serving, traffic, most)
    found = predict(serving, traffic, 1 + largest(slower, most))
    if full is None or found is None or full.rate <= rate:
        return None
    decoding = min(most - 1, round(rate * (found.e2e - found.ttft)))  # Little's law
    steps = _Steps.of(serving, traffic, decoding)
    first = steps.first(rate, found)
    if first is None:
        return None
    e2e = first + (traffic.output - 1) * found.tpot
    places = _queue(most, rate * e2e / most, e2e)
    if places is None:
        return None
    return replace(
        found,
        ttft=first + places,
        e2e=e2e + places,
        rate=rate,
        output_rate=rate * traffic.output,
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps that decode a number of requests and take in prompts.

    Attributes:
        chunks: steps of one prompt.
        share: whole prompts that a step takes in at most; 1 where a prompt fills one or more steps.
        full: seconds of full steps for each prompt in them.
        seconds: of a step, by the number of prompts, or chunks of them, in it.
    """

    chunks: int
    share: int
    full: float
    seconds: Callable[[float], float]

    @staticmethod
    def of(serving: Serving, traffic: Traffic, decoding: int) -> _Steps:
        fresh = max(1, traffic.prompt - traffic.shared)
        room = max(1, serving.budget - decoding * serving.rows)
        chunks = -(-fresh // room)
        share = max(1, room // fresh)
        one = mixed_seconds(serving, traffic, decoding, fresh / chunks, fresh)
        none = step_seconds(serving, traffic, decoding) if decoding else one
        full = fresh / room * mixed_seconds(serving, traffic, decoding, room, fresh)

        def seconds(prompts: float) -> float:
            if prompts < 1.0:  # of some steps
                return none + (one - none) * prompts
            tokens = min(prompts, share) * fresh / chunks
            return mixed_seconds(serving, traffic, decoding, tokens, fresh)

        return _Steps(chunks, share, full, seconds)

    def first(self, rate: float, found: Prediction) -> float | None:
        """Return the seconds to the first token of requests that find a slot; None: infinite."""
        queued = _queue(self.share, rate * self.full, self.full * self.share)
        if queued is None:
            return None
        busy = 1.0 - math.exp(-rate * found.e2e)  # probability that a request is in the system
        if self.share == 1:  # the queue's formula has the rest of a step with a prompt in it
            plain = 1.0 - rate * self.full  # share of steps without prompts
            rest = plain * busy * self.seconds(0.0) / 2.0 if found.tpot else 0.0
            return rest + queued + self.chunks * self.seconds(1.0)
        met = self._met(rate)
        others = min(busy * rate * met, self.share - 1.0)  # arrivals during the same step
        own = _mean(lambda count: self.seconds(1.0 + count), others, others)
        return busy * met / 2.0 + queued + own

    def _met(self, rate: float) -> float:
        """Return the seconds of the step that an arrival meets: E[s^2] / E[s]."""
        mean = self.seconds(0.0)
        square = mean * mean
        for _ in range(ITERATIONS):
            count = min(float(self.share), rate * mean)
            # Poisson over a time that varies itself, bounded by the variance of [0, share].
            variance = min(count + rate * rate * (square - mean * mean), self.share**2 / 4.0)
            mean = _mean(self.seconds, count, variance)
            square = _mean(lambda prompts: self.seconds(prompts) ** 2, count, variance)
        return square / mean


def _mean(of: Callable[[float], float], mean: float, variance: float) -> float:
    """Return the mean of a function of a number of at least 0, over two values that have the
    number's mean and variance."""
    low = max(0.0, mean - math.sqrt(variance))
    below = mean - low
    if below <= 0.0:
        return of(mean)
    share = below * below / (below * below + variance)
    return (1.0 - share) * of(low) + share * of(mean + variance / below)


def _queue(servers: int, load: float, service: float) -> float | None:
    """Return the seconds in the queue of M/D/c, half of those of M/M/c; None: infinite."""
    if load >= FULL:
        return None
    blocked = 1.0  # Erlang's B formula, one server more at a time
    for count in range(1, servers + 1):
        offered = load * servers * blocked
        blocked = offered / (count + offered)
    waits = blocked / (1.0 - load * (1.0 - blocked))  # Erlang's C formula
    return waits * service / (servers * (1.0 - load)) / 2.0
