"""How long steps take, from the times at which they were planned and their results came."""

from __future__ import annotations

from collections import deque

SAMPLES = 16  # steps of each size that a lower bound needs
DECAY = 0.95  # weight of a step relative to the next newer one in the running means


class StepClock:
    """Seconds per step, by its number of tokens. Time is an argument; nothing here reads a clock.

    Means say what to expect. `at_least` is a lower bound from recent steps, by which work may be
    given up: a step of more tokens is assumed to take no less time.
    """

    def __init__(self) -> None:
        self._last = float("-inf")  # when the last result came
        # [k]: seconds and tokens of the last steps of up to 2^k tokens, and more than 2^(k - 1)
        self._by_size: list[deque[tuple[float, int]]] = []
        self._steps = self._step_seconds = 0.0
        self._prefill_tokens = self._prefill_seconds = 0.0

    def note(self, planned: float, done: float, tokens: int, *, prefill: bool) -> None:
        """Record a step that is done.

        With several steps in flight, one began when the one before it was done.

        Args:
            planned: when it was planned.
            done: when its result came.
            prefill: whether some of its tokens are chunks of prompts.
        """
        seconds = max(0.0, done - max(planned, self._last))
        self._last = done
        size = (tokens - 1).bit_length()
        while len(self._by_size) <= size:
            self._by_size.append(deque(maxlen=SAMPLES))
        self._by_size[size].append((seconds, tokens))
        self._steps = self._steps * DECAY + 1.0
        self._step_seconds = self._step_seconds * DECAY + seconds
        if prefill:
            self._prefill_tokens = self._prefill_tokens * DECAY + tokens
            self._prefill_seconds = self._prefill_seconds * DECAY + seconds

    @property
    def seconds_per_step(self) -> float | None:
        """A mean of the last steps; None before the first."""
        return self._step_seconds / self._steps if self._steps else None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """A mean of the last steps with chunks of prompts, their decoding rows included; None
        before the first."""
        seconds = self._prefill_seconds
        return self._prefill_tokens / seconds if seconds else None

    def at_least(self, tokens: int) -> float:
        """Seconds that a step of `tokens` tokens takes if it is as fast as the fastest of the last
        ones that were no larger; 0.0 if too few were measured."""
        seconds = 0.0
        for steps in self._by_size[: (tokens - 1).bit_length() + 1]:
            if len(steps) == SAMPLES and max(size for _, size in steps) <= tokens:
                seconds = max(seconds, min(steps)[0])
        return seconds
