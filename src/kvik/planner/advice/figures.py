"""The wish that `kvik advise` answers, the figures of a setting for it, and their comparison."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.errors import ConfigError
from kvik.options import FORMERLY, Integer, Number, Text, normalised, option
from kvik.planner.serving import (
    Prediction,
    Serving,
    Traffic,
    largest_load,
    predict,
    predict_rate,
)
from kvik.planner.shape import ModelShape
from kvik.planner.slo import Slo, SloText

# The question that `kvik advise` answers: a model, a machine, a load, targets of latency.

USUAL_PROMPT, USUAL_OUTPUT, USUAL_CONCURRENCY = 512, 128, 8  # of a wish that names none


@dataclass(frozen=True, slots=True)
class Wish:
    """A question to `kvik advise`."""

    model: str = option("", Text("a folder or a hub id"), "a folder, hub id or config.json")
    hardware: str = option("this", Text(), "h200, a100-80g, rtx4090, ..., this, or a file")
    slo: Slo | None = option(  # noqa: RUF009  # a field, which ruff cannot see
        None,
        SloText(),
        "what the mean request may take, such as ttft=300ms,tpot=50ms,e2e=5s; None: throughput "
        "counts",
    )
    prompt_tokens: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"tokens of a request's prompt; None: {USUAL_PROMPT}, or less",
        {FORMERLY: "prompt"},
    )
    output_tokens: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"tokens of its output; None: {USUAL_OUTPUT}, or less",
        {FORMERLY: "output"},
    )
    shared: int = option(0, Integer(0, 1 << 24), "tokens of the prompt that all begin with")
    concurrency: int | None = option(
        None,
        Integer(1, 1 << 24),
        f"requests at a time; None: {USUAL_CONCURRENCY}, or what keeps the SLO",
    )
    rate: float | None = option(
        None, Number(0, 1e9, above=True), "requests a second, at random, in place of concurrency"
    )
    acceptance: float | None = option(
        None, Number(0, 1), "share of drafts that are right; None: says what is needed"
    )
    draft: str | None = option(
        None, Text(), "model that makes them; None: they are looked up, for nothing"
    )

    @property
    def load_named(self) -> bool:
        return self.concurrency is not None or self.rate is not None


def check_wish(wish: Wish, shape: ModelShape) -> None:
    """Raise ConfigError for the first field that makes no sense for this model."""
    normalised(wish, ConfigError)
    if wish.rate is not None and wish.concurrency is not None:
        raise ConfigError("rate", "cannot be given together with concurrency")
    traffic, context = traffic_of(wish, shape), shape.max_context
    if traffic.context > context:
        raise ConfigError(
            "prompt_tokens",
            f"and output must fit the model's context of {context} tokens, not "
            f"{traffic.prompt} + {traffic.output}",
        )
    if wish.shared > traffic.prompt:
        raise ConfigError(
            "shared", f"must be in [0, {traffic.prompt}], the prompt, not {wish.shared}"
        )


def traffic_of(wish: Wish, shape: ModelShape) -> Traffic:
    """Return the requests of a wish, with defaults for what it leaves open."""
    context = shape.max_context
    output = wish.output_tokens or min(
        USUAL_OUTPUT, max(1, (context - (wish.prompt_tokens or 1)) // 2)
    )
    prompt = wish.prompt_tokens or max(1, min(USUAL_PROMPT, context - output))
    return Traffic(prompt, output, wish.shared)


def assumed(wish: Wish, traffic: Traffic) -> tuple[str, ...]:
    """Return flags for what the wish leaves open."""
    found = []
    if wish.prompt_tokens is None:
        found.append(f"--prompt-tokens {traffic.prompt}")
    if wish.output_tokens is None:
        found.append(f"--output-tokens {traffic.output}")
    if wish.slo is None and not wish.load_named:
        found.append(f"--concurrency {USUAL_CONCURRENCY}")
    return tuple(found)


WORTHWHILE = 0.02  # relative change of a figure; a smaller one is within the predictions' error


@dataclass(frozen=True, slots=True)
class Figures:
    """Predictions of a setting.

    Attributes:
        load: at the load of the wish; with limits and no load, at the largest that keeps them, or
            of a single request. None: requests arrive faster than they can be served.
        single: of one request alone.
        full: of as many requests as may run: the highest throughput.
        largest: the largest load that keeps the limits; None: there is none, or no limits.
        memory, memory_limit: bytes needed on the fullest device, and bytes that may be used.
    """

    load: Prediction | None
    single: Prediction | None
    full: Prediction | None
    largest: Prediction | None
    memory: int
    memory_limit: int

    def key(self, wish: Wish) -> tuple[float, ...]:
        """Return the figures to maximise, the most important first."""
        load = (self.full.output_rate if self.full else 0.0, 0.0)
        if self.load:
            load = (self.load.output_rate, 1.0 / self.load.e2e)
        if wish.slo is None:
            return load
        closeness = 1.0 / self.single.excess(wish.slo) if self.single else 0.0
        kept = (self.largest.rate if self.largest else 0.0, min(1.0, closeness))
        # Without a load in the wish, settings are compared at different loads.
        return (*kept, *load) if wish.load_named else kept


def figures_of(serving: Serving, traffic: Traffic, wish: Wish) -> Figures:
    """Predict the figures of a setting.

    Raises:
        ConfigError: the machine's speed is unknown, or it has no link to siblings.
    """
    single = predict(serving, traffic, 1)
    full = predict(serving, traffic, max(1, serving.most))
    largest = None
    if wish.slo is not None:
        largest = largest_load(serving, traffic, wish.slo)
    if wish.rate is not None:
        load = predict_rate(serving, traffic, wish.rate)
    elif wish.concurrency is not None or wish.slo is None:
        load = predict(serving, traffic, wish.concurrency or USUAL_CONCURRENCY)
    else:
        load = largest or single
    batch = max(1, min(load.concurrency if load else serving.most, serving.most))
    memory, limit = serving.memory(batch)
    return Figures(load, single, full, largest, memory, limit)


def improvement(before: Figures, after: Figures, wish: Wish) -> float:
    """Return the relative change of the most important figure that changes by more than
    `WORTHWHILE`; 0 if none does."""
    for old, new in zip(before.key(wish), after.key(wish), strict=True):
        change = new / old - 1.0 if old else float(new > 0)
        if abs(change) > WORTHWHILE:
            return change
    return 0.0
