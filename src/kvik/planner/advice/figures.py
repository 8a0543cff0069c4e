"""What a setting gives for a wish, and which of two settings gives more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvik.planner.advice.wish import USUAL_CONCURRENCY, Wish
from kvik.planner.serving import (
    Prediction,
    Serving,
    Traffic,
    largest_load,
    predict,
)
from kvik.planner.waiting import predict_rate

WORTHWHILE = 0.02  # of a figure: less is not worth a flag, nor sure


@dataclass(frozen=True, slots=True)
class Figures:
    """What a setting gives.

    Attributes:
        load: at the load that was asked for; if limits were and no load, at the largest that keeps
            them, or of a single request. None: it comes faster than it can be served.
        single: of one request alone.
        full: of as many requests as may run: the most that can be served.
        largest: the largest load that keeps the limits; None: there is none, or no limits.
        memory, memory_limit: bytes on the fullest device, and how many may be used there.
    """

    load: Prediction | None
    single: Prediction | None
    full: Prediction | None
    largest: Prediction | None
    memory: int
    memory_limit: int

    def key(self, wish: Wish) -> tuple[float, ...]:
        """What should be large, the most important first."""
        load = (self.full.output_rate if self.full else 0.0, 0.0)
        if self.load:
            load = (self.load.output_rate, 1.0 / self.load.e2e)
        if wish.slo is None:
            return load
        closeness = 1.0 / self.single.excess(wish.slo) if self.single else 0.0
        kept = (self.largest.rate if self.largest else 0.0, min(1.0, closeness))
        # Without a load of their own, settings are told at different ones.
        return (*kept, *load) if wish.load_named else kept


def figures_of(serving: Serving, traffic: Traffic, wish: Wish) -> Figures:
    """Predict everything.

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
    memory, limit = serving.known.bytes(serving.shape, replace(serving.at, batch=batch))
    return Figures(load, single, full, largest, memory, limit)


def improvement(before: Figures, after: Figures, wish: Wish) -> float:
    """By what share the most important figure that changes worth mentioning grows (or shrinks)."""
    for old, new in zip(before.key(wish), after.key(wish), strict=True):
        change = new / old - 1.0 if old else float(new > 0)
        if abs(change) > WORTHWHILE:
            return change
    return 0.0
