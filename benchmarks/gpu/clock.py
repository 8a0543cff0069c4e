"""Time calls on the device, launched from a CUDA graph so that Python costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Protocol

import torch
from place import REHEARSED, elapsed, sized, synchronize

from kvik.worker.captures import CudaCapturer, NotCaptured

Call = Callable[[], object]

# Seconds that a graph should take, so that the cost of events is negligible.
MIN_GRAPH = sized(1e-3, 0.0)
FEWEST, MOST = sized((5, 40), (1, 1))  # runs of which the median is reported
# Bytes that alternating calls should touch, several times the L2 cache.
COLD = sized(256 << 20, 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """seconds: the median of one call. captured: the time excludes the cost of launches."""

    seconds: float
    captured: bool


class Timer(Protocol):
    def __call__(self, calls: Sequence[Call], budget: float = 0.2) -> Timing: ...


def copies_for(touched: float, most: int = 64) -> int:
    """Return the number of operand sets that calls should rotate through, to miss the L2 cache."""
    return max(1, min(most, ceil(COLD / max(1.0, touched))))


def timed(calls: Sequence[Call], budget: float = 0.2) -> Timing:
    """Time all calls, one after another, repeatedly.

    Args:
        calls: the same work on different operands.
        budget: seconds to measure for.
    """
    for _ in range(2):  # kernels are compiled here
        for call in calls:
            call()
    synchronize()

    def body() -> None:
        for call in calls:
            call()

    repeats = max(1, min(64, ceil(MIN_GRAPH / elapsed(body))))

    def all_of_them() -> None:
        for _ in range(repeats):
            body()

    replay = _captured(all_of_them)
    run = replay or all_of_them
    runs = int(budget / max(1e-6, elapsed(run)))
    times = [elapsed(run) for _ in range(max(FEWEST, min(MOST, runs)))]
    return Timing(median(times) / (repeats * len(calls)), replay is not None)


def _captured(call: Call) -> Callable[[], None] | None:
    """Return a replay of the call; None: it cannot be captured, as it waits for the device."""
    if REHEARSED:
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    try:  # if this fails, the next one may still be captured, unlike with `torch.cuda.graph`
        replay: Callable[[], None] | None = CudaCapturer(device).capture(call).replay
    except NotCaptured:
        replay = None
    torch.cuda.synchronize()
    return replay
