"""Predict serving: request latencies from step times, and the largest load that keeps an SLO.

The model is a closed loop in steady state: the number of requests in the system is fixed, and each
finished request is replaced by the next. Each step decodes every running request once and gives
the rest of its token budget to prompts, as the scheduler does. While there are steps enough, each
prompt is computed in steps of its own; beyond that, prompts queue and every step carries a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from kvik.errors import ParamError
from kvik.options import Kind, bad_value
from kvik.planner.devices import Setting
from kvik.planner.memory import MemoryPlanner
from kvik.planner.roofline import PlannedStep, decode, step_time, verify
from kvik.planner.search import largest
from kvik.planner.shape import ModelShape
from kvik.planner.speculation import expected_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits of a request, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def excess(self, ttft: float | None, tpot: float | None, e2e: float | None) -> float:
        """Return the largest ratio of a time to its limit; at most 1 if all limits are kept.

        A time of None, such as the TPOT of a single token, is ignored."""
        pairs = ((ttft, self.ttft), (tpot, self.tpot), (e2e, self.e2e))
        return max(
            (time / limit for time, limit in pairs if time is not None and limit is not None),
            default=0.0,
        )

    def __str__(self) -> str:
        pairs = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return ",".join(f"{name}={value * 1e3:g}ms" for name, value in pairs if value is not None)


class SloText(Kind):
    """An SLO in the syntax of `parse_slo`."""

    expects = "limits such as ttft=300ms,tpot=50ms,e2e=5s"
    metavar = "SLO"

    def parse(self, text: str) -> Slo:
        return parse_slo(text)

    def checked(self, value: object) -> Slo:
        if not isinstance(value, Slo):
            raise bad_value("a Slo", value)
        return value


def parse_slo(text: str) -> Slo:
    """Parse limits such as "ttft=300ms,tpot=50ms,e2e=5s".

    Raises:
        ParamError: a name is unknown or repeated, or a time is invalid.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in ("ttft", "tpot", "e2e") or name in limits or not value:
            raise ParamError("slo", f"must be like ttft=300ms,tpot=50ms,e2e=5s, not {text[:60]!r}")
        limits[name] = parse_seconds("slo", value)
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def parse_seconds(field: str, text: str) -> float:
    """Parse a time such as "300ms", "5s" or "2m" into seconds. Raises ParamError for anything else,
    including zero and infinity."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("smh")
    try:
        seconds = float(number) * units[text[len(number) :]]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise ParamError(field, f"must be a time such as 300ms, 5s or 2m, not {text[:60]!r}")
    return seconds


SMALLEST_BUDGET = 256  # tokens per step; below it, reading the weights dominates


@dataclass(frozen=True, slots=True)
class Traffic:
    """A load of equal requests."""

    prompt: int  # tokens per request
    output: int  # likewise
    shared: int = 0  # leading prompt tokens found in the prefix cache

    @property
    def context(self) -> int:
        return self.prompt + self.output

    @property
    def halfway(self) -> int:
        """Context length of a request with half of its output."""
        return self.prompt + self.output // 2 + 1


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculative decoding."""

    drafts: int  # tokens drafted per request and step
    acceptance: float  # probability that a drafted token is accepted
    seconds: float = 0.0  # time per step to draft for all requests


@dataclass(slots=True)
class Memo:
    """Cached step times and memory of one model on one machine, since `advise` needs the same
    values many times. Keys hold everything else they depend on."""

    steps: dict[Hashable, float] = field(default_factory=dict)
    memory: dict[Hashable, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Serving:
    """A model served on a machine with given limits."""

    shape: ModelShape
    at: Setting
    max_fitting: int  # requests of the full context that fit in memory
    seqs: int  # `max_num_seqs`
    budget: int  # `max_num_batched_tokens`
    usual_budget: int  # the engine's default `max_num_batched_tokens` for this memory
    drafting: Drafting | None = None
    # Shared by all settings of this model on this machine.
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    def expected_seconds(self, step: PlannedStep) -> float:
        """Return the expected duration of a step. Raises ConfigError as `step_time`."""
        at = self.at
        key = (at.weight_format, at.kv_format, at.tp, at.pp, step)
        if key not in self.memo.steps:
            self.memo.steps[key] = step_time(self.shape, at, step).expected
        return self.memo.steps[key]

    def memory(self, batch: int) -> int:
        """Return the bytes that `batch` requests need on the fullest device."""
        at = self.at
        formats = (at.weight_format, at.kv_format, at.source.path)
        key = (*formats, at.tp, at.pp, at.context, batch, at.utilization)
        if key not in self.memo.memory:
            self.memo.memory[key] = MemoryPlanner.of(self.shape, replace(at, batch=batch)).total
        return self.memo.memory[key]

    @property
    def max_running(self) -> int:
        """Largest number of requests that can run at a time."""
        return min(self.max_fitting, self.seqs, self.budget // self.rows)

    @property
    def rows(self) -> int:
        """Tokens per step of each decoding request: its last token and its drafts."""
        return 1 + (self.drafting.drafts if self.drafting else 0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted mean latencies and rates of a load."""

    concurrency: int  # requests in the system, running or waiting
    ttft: float  # seconds
    tpot: float  # seconds
    e2e: float  # seconds
    rate: float  # requests per second
    output_rate: float  # generated tokens per second

    def excess(self, slo: Slo) -> float:
        """Return the largest ratio of a mean time to its limit; at most 1 if all are kept."""
        return slo.excess(self.ttft, self.tpot, self.e2e)


def set_up(shape: ModelShape, at: Setting, seqs: int, budget: int | None = None) -> Serving:
    """Return the serving setting, with its memory planned for requests of the context of `at`.

    Args:
        seqs: `max_num_seqs`.
        budget: `max_num_batched_tokens`; None: the engine's default.

    Raises:
        ConfigError: the model cannot be shared by this many devices.
    """
    at = replace(at, batch=1)
    memory = MemoryPlanner.of(shape, at).memory()
    chosen = memory.step_tokens
    return Serving(shape, at, memory.largest_batch, seqs, budget or chosen, chosen)


def predict(serving: Serving, traffic: Traffic, concurrency: int) -> Prediction | None:
    """Predict latencies and rates of a closed loop; None if no request fits in memory.

    Raises:
        ConfigError: the machine's speed is unknown, or it has no link to siblings.
    """
    running = min(concurrency, serving.max_running)
    if running == 0:
        return None
    drafting = serving.drafting
    gain = expected_tokens(drafting.acceptance, drafting.drafts) if drafting else 1.0
    rounds = (traffic.output - 1) / gain  # decoding steps of one request
    fresh = max(1, traffic.prompt - traffic.shared)
    # Steps between successive requests in a slot; all their tokens must fit the budget.
    steps = max(rounds + 1.0, running * (fresh + rounds * serving.rows) / serving.budget)
    decoding = min(running - 1, round(running * rounds / steps))
    prompt_budget = max(1, serving.budget - decoding * serving.rows)  # prompt tokens per step
    chunks = -(-fresh // prompt_budget)  # steps of a prompt that shares none with other prompts
    steps = max(steps, rounds + chunks)
    if running * chunks <= rounds:
        mixed = mixed_seconds(serving, traffic, decoding, fresh / chunks, fresh)
        mixed_steps = (running - 1) * chunks
        round_time = (
            mixed_steps * mixed + (rounds - mixed_steps) * step_seconds(serving, traffic, running)
        ) / rounds
    else:
        round_time = mixed_seconds(serving, traffic, decoding, running * fresh / steps, fresh)
    # Some prompts share a step with this one; others are ahead of it in the queue.
    tokens = min(prompt_budget, fresh / chunks * (1.0 + (running - 1) / (rounds + chunks)))
    waited = max(chunks, _with_queue(fresh / prompt_budget, rounds, running))
    first = waited * mixed_seconds(serving, traffic, decoding, tokens, fresh)
    cycle = (first + rounds * round_time) * concurrency / running
    tpot = round_time / gain if traffic.output > 1 else 0.0
    return Prediction(
        concurrency=concurrency,
        ttft=cycle - rounds * round_time,
        tpot=tpot,
        e2e=cycle,
        rate=concurrency / cycle,
        output_rate=concurrency * traffic.output / cycle,
    )


def largest_load(serving: Serving, traffic: Traffic, slo: Slo) -> Prediction | None:
    """Predict the largest load that keeps the SLO with no request waiting for a slot.

    Returns None if even a single request misses the SLO. Raises ConfigError as `predict`.
    """

    def keeps_slo(concurrency: int) -> bool:
        prediction = predict(serving, traffic, concurrency)
        return prediction is not None and prediction.excess(slo) <= 1.0

    count = largest(keeps_slo, serving.max_running)
    return predict(serving, traffic, count) if count else None


def budgets(serving: Serving) -> tuple[int, ...]:
    """Return the token budgets to try: the current one, halved repeatedly."""
    candidates = []
    budget = serving.budget
    while budget >= SMALLEST_BUDGET:
        candidates.append(budget)
        budget //= 2
    return tuple(candidates) or (serving.budget,)


def _with_queue(service: float, delay: float, count: int) -> float:
    """Return the steps that a customer spends at a station with one server, including the queue.

    `count` customers alternate between the station and `delay` steps elsewhere. This is mean-value
    analysis (Reiser and Lavenberg 1980) with constant service times: an arrival at a busy server
    finds half a service left on average.
    """
    queue = busy = 0.0
    steps = service
    for customers in range(1, count + 1):
        steps = service * (1.0 + queue - busy / 2.0)
        rate = customers / (steps + delay)
        queue, busy = rate * steps, min(1.0, rate * service)
        if busy > 0.999:  # each further customer adds one service to the wait
            return steps + (count - customers) * service
    return steps


def mixed_seconds(
    serving: Serving, traffic: Traffic, decoding: int, chunk: float, fresh: int
) -> float:
    """Return the seconds of a step that decodes and computes a chunk of prompts.

    Args:
        decoding: number of decoding requests.
        chunk: prompt tokens in the step; a partial chunk lies in the middle of its prompt.
        fresh: uncached tokens per prompt.
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
    """Return the seconds of a step over prompts and decoding requests, including drafting.

    Args:
        decoding: number of decoding requests, each halfway through its output.
        prompts: runs of a `PlannedStep`.
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


# An open loop: requests arrive at random.
#
# A step takes all prompts that arrived during the previous step, up to its budget (bulk service,
# Bailey 1954). The wait of a request has three parts:
#
# - The rest of the step that runs when it arrives. Arrivals see long steps more often than short
#   ones: the mean length is E[s^2] / E[s], of which half is left.
# - Its own step, which also computes the prompts that arrived with it.
# - Full steps ahead of it. Bulk service of c prompts per step of constant length leaves the same
#   queue as c servers (M/D/c, Crommelin 1932), whose wait is about half of Erlang's for M/M/c. If
#   one prompt fills a step (c = 1), this is the Pollaczek-Khinchine formula. Slots are treated
#   likewise: `max_running` servers, each busy for a whole request.
#
# The number of prompts in a step depends on the length of the previous step. Its mean and variance
# are found by iteration, with a two-point distribution that has both.

FULL = 0.999  # utilisation from which the wait counts as infinite
ITERATIONS = 12  # step lengths converge to 1 %


def predict_rate(serving: Serving, traffic: Traffic, rate: float) -> Prediction | None:
    """Predict random arrivals at `rate` requests per second: the concurrency with that throughput,
    and how long requests wait. None if the rate reaches the highest throughput. Raises ConfigError
    as `predict`."""

    def slower(concurrency: int) -> bool:
        prediction = predict(serving, traffic, concurrency)
        return prediction is not None and prediction.rate < rate

    slots = max(1, serving.max_running)
    full = predict(serving, traffic, slots)
    prediction = predict(serving, traffic, 1 + largest(slower, slots))
    if full is None or prediction is None or full.rate <= rate:
        return None
    decoding = min(slots - 1, round(rate * (prediction.e2e - prediction.ttft)))  # Little's law
    steps = _Steps.of(serving, traffic, decoding)
    first = steps.first(rate, prediction)
    if first is None:
        return None
    e2e = first + (traffic.output - 1) * prediction.tpot
    places = _queue(slots, rate * e2e / slots, e2e)
    if places is None:
        return None
    return replace(
        prediction,
        ttft=first + places,
        e2e=e2e + places,
        rate=rate,
        output_rate=rate * traffic.output,
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps that decode a fixed number of requests and compute prompts."""

    chunks: int  # steps per prompt
    share: int  # most whole prompts per step; 1 where a prompt fills one or more steps
    full: float  # seconds per prompt in full steps
    seconds: Callable[[float], float]  # length of a step, by the number of prompts or chunks in it

    @staticmethod
    def of(serving: Serving, traffic: Traffic, decoding: int) -> _Steps:
        fresh = max(1, traffic.prompt - traffic.shared)
        prompt_budget = max(1, serving.budget - decoding * serving.rows)
        chunks = -(-fresh // prompt_budget)
        share = max(1, prompt_budget // fresh)
        mixed = mixed_seconds(serving, traffic, decoding, fresh / chunks, fresh)
        plain = step_seconds(serving, traffic, decoding) if decoding else mixed
        full = (
            fresh / prompt_budget * mixed_seconds(serving, traffic, decoding, prompt_budget, fresh)
        )

        def seconds(prompts: float) -> float:
            if prompts < 1.0:  # only some steps have a prompt
                return plain + (mixed - plain) * prompts
            tokens = min(prompts, share) * fresh / chunks
            return mixed_seconds(serving, traffic, decoding, tokens, fresh)

        return _Steps(chunks, share, full, seconds)

    def first(self, rate: float, prediction: Prediction) -> float | None:
        """Return the seconds to the first token once a slot is free; None: infinite."""
        queued = _queue(self.share, rate * self.full, self.full * self.share)
        if queued is None:
            return None
        busy = 1.0 - math.exp(-rate * prediction.e2e)  # probability that a request is in the system
        if self.share == 1:  # `queued` already includes the rest of a step with a prompt
            plain = 1.0 - rate * self.full  # share of steps without prompts
            rest = plain * busy * self.seconds(0.0) / 2.0 if prediction.tpot else 0.0
            return rest + queued + self.chunks * self.seconds(1.0)
        running = self._running_step(rate)
        arrivals = min(busy * rate * running, self.share - 1.0)  # arrivals during the same step
        service = _mean(lambda count: self.seconds(1.0 + count), arrivals, arrivals)
        return busy * running / 2.0 + queued + service

    def _running_step(self, rate: float) -> float:
        """Return the mean seconds of the step that runs when a request arrives: E[s^2] / E[s]."""
        mean = self.seconds(0.0)
        square = mean * mean
        for _ in range(ITERATIONS):
            count = min(float(self.share), rate * mean)
            # Poisson over a step of varying length, at most the variance of values in [0, share].
            variance = min(count + rate * rate * (square - mean * mean), self.share**2 / 4.0)
            mean = _mean(self.seconds, count, variance)
            square = _mean(lambda prompts: self.seconds(prompts) ** 2, count, variance)
        return square / mean


def _mean(of: Callable[[float], float], mean: float, variance: float) -> float:
    """Return the mean of `of` over a two-point distribution on [0, inf) with this mean and
    variance."""
    low = max(0.0, mean - math.sqrt(variance))
    below = mean - low
    if below <= 0.0:
        return of(mean)
    share = below * below / (below * below + variance)
    return (1.0 - share) * of(low) + share * of(mean + variance / below)


def _queue(servers: int, load: float, service: float) -> float | None:
    """Return the mean wait in an M/D/c queue, taken as half that of M/M/c; None: infinite."""
    if load >= FULL:
        return None
    blocked = 1.0  # Erlang B formula, by recursion over the number of servers
    for count in range(1, servers + 1):
        offered = load * servers * blocked
        blocked = offered / (count + offered)
    waits = blocked / (1.0 - load * (1.0 - blocked))  # Erlang C formula
    return waits * service / (servers * (1.0 - load)) / 2.0
