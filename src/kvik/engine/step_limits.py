"""How long a step may take until the engine counts as hung, by how long such steps took before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.engine.observer import LoopObserver

LEAST = 30.0  # seconds: what else runs on a machine may hold up any step
TIMES = 20.0  # what the slowest step of about its size took
_RECENT = 64  # steps of each size: the first ones may have compiled kernels


class StepLimits:
    """Sizes that have as many binary digits count as one."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # by binary digits of the tokens of a step

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size = num_tokens.bit_length()
        self._seconds.setdefault(size, deque(maxlen=_RECENT)).append(seconds)

    def limit(self, num_tokens: int) -> float | None:
        """Seconds, rounded up to 30 times a power of two so that it changes rarely; None if no step
        was measured. Of a size that was not, they are told from the others: no step takes longer
        than a larger one, or than several smaller ones of as many tokens together."""
        if not self._seconds:
            return None
        size = num_tokens.bit_length()
        if size in self._seconds:
            seconds = max(self._seconds[size])
        else:
            seconds = min(
                max(found) * 2 ** max(0, size - other) for other, found in self._seconds.items()
            )
        limit = LEAST
        while limit < TIMES * seconds:
            limit *= 2
        return limit


class StepWatch(LoopObserver):
    """Says how long what is in flight may take, whenever that changes.

    Args:
        announce: takes seconds.
    """

    def __init__(self, announce: Callable[[float], None]) -> None:
        self._announce = announce
        self._limits = StepLimits()
        self._in_flight: deque[tuple[int, float]] = deque()  # tokens, and when it was planned
        self._since = 0.0  # when the last step ended
        self._told: float | None = None

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        if plan is None:
            return
        self._in_flight.append((plan.num_tokens, now))
        limit = self._limits.limit(max(tokens for tokens, _ in self._in_flight))
        if limit is not None and limit != self._told:
            self._told = limit
            self._announce(limit)

    def finished(self, output: ModelRunnerOutput, now: float) -> None:
        tokens, planned = self._in_flight.popleft()
        self._limits.note(tokens, now - max(planned, self._since))
        self._since = now

    def failed(self, error: str, now: float) -> None:
        self._in_flight.popleft()
        self._since = now
