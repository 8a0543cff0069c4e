"""Tokens on their way to readers, held in the engine for a moment, so that frames are fewer and
larger.

What a server does for a piece of a stream costs more than what it does for a token, and where it
has no core of its own it stops the engine's step. So between the first and the last piece of a
stream, which go on at once, tokens are merged: the more streams, the longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvik.core.plan import SchedulerOutput
from kvik.core.types import RequestDelta
from kvik.engine.observer import LoopObserver

PIECES_PER_SECOND = 640  # of all streams together: from 32 on each has 20, as `MAX_HOLD` has it
MAX_HOLD = 0.05  # seconds
LONGER = 2  # times the tokens of the step before: nothing is held through such a step


class Held(LoopObserver):
    """Deltas by completion. It looks on because a step that will take long must be known before.

    Args:
        send: takes deltas that were merged, one for each completion.
    """

    def __init__(self, send: Callable[[list[RequestDelta]], None]) -> None:
        self._send = send
        self._deltas: dict[tuple[str, int], RequestDelta] = {}
        self._released = float("-inf")
        self._step_tokens = 0

    def take(self, deltas: Iterable[RequestDelta], now: float) -> list[RequestDelta]:
        """Hold what a step brought. Returns what is not held any longer: what begins or ends, and
        everything if the last time was long enough ago."""
        urgent: dict[tuple[str, int], None] = {}
        for delta in deltas:
            key = (delta.request_id, delta.index)
            earlier = self._deltas.get(key)
            if earlier is None:
                self._deltas[key] = delta
            else:
                _join(earlier, delta)
            if delta.finish_reason is not None or delta.prompt is not None:
                urgent[key] = None
        hold = min(MAX_HOLD, len(self._deltas) / PIECES_PER_SECOND)
        if self._deltas and now - self._released >= hold:
            return self.release(now)
        return [self._deltas.pop(key) for key in urgent]

    def release(self, now: float) -> list[RequestDelta]:
        """All that is held."""
        deltas, self._deltas = self._deltas, {}
        self._released = now
        return list(deltas.values())

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        tokens = 0 if plan is None else plan.num_tokens
        if self._deltas and tokens > LONGER * self._step_tokens:
            self._send(self.release(now))
        self._step_tokens = tokens


def _join(held: RequestDelta, later: RequestDelta) -> None:
    """`held` becomes both. Its lists are others' too: they stay as they are. Before a first token
    only the log probabilities of its prompt come."""
    held.token_ids = held.token_ids + later.token_ids
    if later.prompt_logprobs is not None:
        held.prompt_logprobs = (held.prompt_logprobs or []) + later.prompt_logprobs
    held.prompt = held.prompt or later.prompt
    if later.logprobs is not None:
        held.logprobs = later.logprobs if held.logprobs is None else held.logprobs + later.logprobs
    if later.finish_reason is not None:
        held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason
        held.error, held.report, held.embedding = later.error, later.report, later.embedding
        held.refused = later.refused
