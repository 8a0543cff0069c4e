"""How long requests wait that come at random, whatever the server does.

A step takes in all prompts that came during the one before, as far as its budget goes: service
in bulk (Bailey 1954). The wait of a request has three parts.

- The rest of the step that runs when it comes. It comes more often in a long step than in a short
  one: E[s^2] / E[s] long, of which half is left.
- Its own step, which computes the prompts that came with it, too.
- Steps that are full before it has its turn. Bulk service of c prompts in steps of equal length
  leaves as many behind as a queue with c servers does (Crommelin 1932), whose wait with equal
  services is about half of Erlang's. With prompts that fill a step, c = 1, that is the formula of
  Pollaczek and Khinchine. The same holds for places: `most` servers, each busy for a whole request.

The number of prompts in a step follows from the length of the step before. Its mean and variance
are iterated, each time over two values that have both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvik.planner.serving import (
    Prediction,
    Serving,
    Traffic,
    largest,
    mixed_seconds,
    predict,
    step_seconds,
)

FULL = 0.999  # share of what can be served from which on waiting has no end
ITERATIONS = 12  # the lengths of steps have settled to a percent


def predict_rate(serving: Serving, traffic: Traffic, rate: float) -> Prediction | None:
    """Requests that come at random, `rate` a second: the concurrency at which as many leave, and
    how long they wait. None if they come as fast as they can be served, or faster: that wait has
    no end.

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
    """Steps that decode so many requests, and take prompts.

    Attributes:
        chunks: steps of one prompt.
        share: whole prompts that a step takes at most; 1 where one prompt fills a step, or several.
        full: seconds of full steps for each prompt in them.
        seconds: of a step with this many prompts, or chunks of them.
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
        """Seconds to the first token of requests that find a place; None: without end."""
        queued = _queue(self.share, rate * self.full, self.full * self.share)
        if queued is None:
            return None
        busy = 1.0 - math.exp(-rate * found.e2e)  # how often at least one is there
        if self.share == 1:  # the queue's formula knows of the rest of a step with a prompt
            plain = 1.0 - rate * self.full  # how often another step runs, if one does
            rest = plain * busy * self.seconds(0.0) / 2.0 if found.tpot else 0.0
            return rest + queued + self.chunks * self.seconds(1.0)
        met = self._met(rate)
        others = min(busy * rate * met, self.share - 1.0)  # that came during the same step
        own = _mean(lambda count: self.seconds(1.0 + count), others, others)
        return busy * met / 2.0 + queued + own

    def _met(self, rate: float) -> float:
        """Seconds of the step that a request meets when it comes: E[s^2] / E[s]."""
        mean = self.seconds(0.0)
        square = mean * mean
        for _ in range(ITERATIONS):
            count = min(float(self.share), rate * mean)
            # Poisson, of a time that varies itself; no more than numbers up to `share` can vary.
            variance = min(count + rate * rate * (square - mean * mean), self.share**2 / 4.0)
            mean = _mean(self.seconds, count, variance)
            square = _mean(lambda prompts: self.seconds(prompts) ** 2, count, variance)
        return square / mean


def _mean(of: Callable[[float], float], mean: float, variance: float) -> float:
    """Of a function of a number from 0 up, over two values that have its mean and variance."""
    low = max(0.0, mean - math.sqrt(variance))
    below = mean - low
    if below <= 0.0:
        return of(mean)
    share = below * below / (below * below + variance)
    return (1.0 - share) * of(low) + share * of(mean + variance / below)


def _queue(servers: int, load: float, service: float) -> float | None:
    """Seconds in the queue of M/D/c: half of that of M/M/c. None: it has no end."""
    if load >= FULL:
        return None
    blocked = 1.0  # Erlang's B formula, by one server more at a time
    for count in range(1, servers + 1):
        offered = load * servers * blocked
        blocked = offered / (count + offered)
    waits = blocked / (1.0 - load * (1.0 - blocked))  # Erlang's C formula
    return waits * service / (servers * (1.0 - load)) / 2.0
