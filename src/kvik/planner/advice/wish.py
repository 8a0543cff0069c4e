"""What `kvik advise` is asked: a model, a machine, a load, promises to keep."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.errors import ConfigError
from kvik.planner.serving import Traffic
from kvik.planner.shape import ModelShape
from kvik.planner.slo import Slo

USUAL_PROMPT, USUAL_OUTPUT, USUAL_CONCURRENCY = 512, 128, 8  # of a wish that names none


@dataclass(frozen=True, slots=True)
class Wish:
    """Attributes:
    slo: promises to keep; None: as many tokens a second as the load gives.
    prompt, output: tokens of a request; None: usual ones, cut to the model's context.
    shared: tokens of the prompt that other requests begin with too.
    concurrency: requests at a time. rate: requests a second in its place.
    acceptance: share of drafts that are right; None: not known, it depends on the texts.
    draft: a model that makes them; None: they are looked up and cost nothing.
    """

    model: str = ""
    hardware: str = "this"
    slo: Slo | None = None
    prompt: int | None = None
    output: int | None = None
    shared: int = 0
    concurrency: int | None = None
    rate: float | None = None
    acceptance: float | None = None
    draft: str | None = None

    @property
    def load_named(self) -> bool:
        return self.concurrency is not None or self.rate is not None


def check_wish(wish: Wish, shape: ModelShape) -> None:
    """Raise ConfigError for the first field that makes no sense for this model."""
    counts = {"prompt": wish.prompt, "output": wish.output, "concurrency": wish.concurrency}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(name, f"must be an integer of at least 1, not {value}")
    if wish.rate is not None and not 0.0 < wish.rate < float("inf"):
        raise ConfigError("rate", f"must be requests a second, above 0, not {wish.rate:g}")
    if wish.rate is not None and wish.concurrency is not None:
        raise ConfigError("rate", "cannot be given together with concurrency")
    if wish.acceptance is not None and not 0.0 <= wish.acceptance <= 1.0:
        raise ConfigError("acceptance", f"must be in [0, 1], not {wish.acceptance:g}")
    traffic, context = traffic_of(wish, shape), shape.max_context
    if traffic.context > context:
        raise ConfigError(
            "prompt",
            f"and output must fit the model's context of {context} tokens, not "
            f"{traffic.prompt} + {traffic.output}",
        )
    if not 0 <= wish.shared <= traffic.prompt:
        raise ConfigError(
            "shared", f"must be in [0, {traffic.prompt}], the prompt, not {wish.shared}"
        )


def traffic_of(wish: Wish, shape: ModelShape) -> Traffic:
    """The requests, with what was not said of them."""
    context = shape.max_context
    output = wish.output or min(USUAL_OUTPUT, max(1, (context - (wish.prompt or 1)) // 2))
    prompt = wish.prompt or max(1, min(USUAL_PROMPT, context - output))
    return Traffic(prompt, output, wish.shared)


def assumed(wish: Wish, traffic: Traffic) -> tuple[str, ...]:
    """Flags for what was not said."""
    found = []
    if wish.prompt is None:
        found.append(f"--prompt {traffic.prompt}")
    if wish.output is None:
        found.append(f"--output {traffic.output}")
    if wish.slo is None and not wish.load_named:
        found.append(f"--concurrency {USUAL_CONCURRENCY}")
    return tuple(found)
