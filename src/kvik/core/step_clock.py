"""Step durations, from the times at which steps were planned and their results came."""

from __future__ import annotations

from collections import deque
from itertools import islice

HISTORY = 64  # steps kept per size, so that early ones, which may have compiled kernels, drop out
SAMPLES = 16  # most recent steps per size that a lower bound is the fastest of
DECAY = 0.95  # of running ratios


class RunningRatio:
    """A ratio of two sums, such as tokens per second, to which newer measurements add more."""

    def __init__(self, decay: float = DECAY) -> None:
        """
        Args:
            decay: weight of a measurement relative to the next newer one.
        """
        self._decay = decay
        self._over = self._under = 0.0

    def note(self, over: float, under: float) -> None:
        self._over = self._over * self._decay + over
        self._under = self._under * self._decay + under

    @property
    def ratio(self) -> float | None:
        """None before the first measurement."""
        return self._over / self._under if self._under else None


class StepClock:
    """Seconds per step, by its number of tokens. Time is an argument; nothing here reads a clock.

    Means are expectations. `at_least` is a lower bound from recent steps, used to give up work that
    will be late: a step of more tokens is assumed to take no less time. `at_most` is an upper
    bound, used to detect a hung step.
    """

    def __init__(self) -> None:
        self._last = float("-inf")  # when the last result came
        # [k]: (seconds, tokens) of the last steps of more than 2^(k - 1) and up to 2^k tokens,
        # newest first.
        self._by_size: list[deque[tuple[float, int]]] = []
        self._step_seconds, self._prefill_rate = RunningRatio(), RunningRatio()

    def note(self, planned: float, done: float, tokens: int, *, prefill: bool) -> None:
        """Record a step that is done.

        With several steps in flight, a step is assumed to begin when the one before it is done.

        Args:
            planned: when it was planned.
            done: when its result came.
            prefill: whether some of its tokens are chunks of prompts.
        """
        seconds = max(0.0, done - max(planned, self._last))
        self._last = done
        size = _size(tokens)
        while len(self._by_size) <= size:
            self._by_size.append(deque(maxlen=HISTORY))
        self._by_size[size].appendleft((seconds, tokens))
        self._step_seconds.note(seconds, 1.0)
        if prefill:
            self._prefill_rate.note(tokens, seconds)

    def skip(self, done: float) -> None:
        """Record the end of a failed step, or of one without rows; its duration does not count."""
        self._last = done

    @property
    def seconds_per_step(self) -> float | None:
        """Running mean of the last steps; None before the first."""
        return self._step_seconds.ratio

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Running mean over steps with chunks of prompts, their decoding rows included; None before
        the first."""
        return self._prefill_rate.ratio

    def at_least(self, tokens: int) -> float:
        """Return the seconds that a step of `tokens` tokens takes if it is as fast as the fastest
        recent step that was no larger; 0.0 if too few were measured."""
        seconds = 0.0
        for steps in self._by_size[: _size(tokens) + 1]:
            recent = list(islice(steps, SAMPLES))
            if len(recent) == SAMPLES and max(size for _, size in recent) <= tokens:
                seconds = max(seconds, min(recent)[0])
        return seconds

    def at_most(self, tokens: int) -> float | None:
        """Return the seconds of the slowest recent step of about `tokens` tokens; None if no step
        was measured.

        If no step of that size was measured, the bound follows from the others: no step takes
        longer than a larger one, or than several smaller ones with the same tokens in total.
        """
        size = _size(tokens)
        if size < len(self._by_size) and self._by_size[size]:  # the usual case, in every step
            return max(self._by_size[size])[0]
        slowest = {other: max(steps)[0] for other, steps in enumerate(self._by_size) if steps}
        return min((s * 2 ** max(0, size - other) for other, s in slowest.items()), default=None)


def _size(tokens: int) -> int:
    """Return the binary logarithm, rounded up."""
    return (tokens - 1).bit_length()
