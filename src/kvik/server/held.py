"""Tokens on their way to readers, held for a moment so that pieces are fewer and larger.

What a server does for an event costs more than what it does for a token. So between the first and
the last piece of a stream, which go on at once, tokens are merged: the more streams, the longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvik.core.types import RequestDelta

PIECES_PER_SECOND = 1000  # of all streams together, as far as `MAX_HOLD` allows
MAX_HOLD = 0.05  # seconds


class Held:
    """Deltas by request and completion.

    Args:
        hand_on: takes deltas that were merged, one for each completion, in order of arrival.
        clock: seconds.
    """

    def __init__(
        self, hand_on: Callable[[list[RequestDelta]], None], clock: Callable[[], float]
    ) -> None:
        self._hand_on = hand_on
        self._clock = clock
        self._requests: dict[str, dict[int, RequestDelta]] = {}
        self._flushed = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def add(self, delta: RequestDelta) -> None:
        """It is this object's from now on."""
        mine = self._requests.get(delta.request_id)
        if mine is None:
            self._requests[delta.request_id] = {delta.index: delta}
        elif delta.index in mine:
            _join(mine[delta.index], delta)
        else:
            mine[delta.index] = delta

    def drop(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self._requests.pop(request_id, None)

    def release(self, urgent: list[str], num_streams: int) -> None:
        """Hand on what is held of some requests, and soon the rest."""
        if urgent:
            taken = [self._requests.pop(request_id, {}) for request_id in urgent]
            self._hand_on([delta for mine in taken for delta in mine.values()])
        if self._requests and self._timer is None:
            hold = min(MAX_HOLD, num_streams / PIECES_PER_SECOND)
            wait = self._flushed + hold - self._clock()
            if wait <= 0:
                self._flush()
            else:
                self._timer = asyncio.get_running_loop().call_later(wait, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._flushed = self._clock()
        requests, self._requests = self._requests, {}
        self._hand_on([delta for mine in requests.values() for delta in mine.values()])


def _join(held: RequestDelta, later: RequestDelta) -> None:
    """Before a first token only the log probabilities of its prompt come."""
    held.token_ids += later.token_ids
    if later.prompt_logprobs is not None:
        held.prompt_logprobs = (held.prompt_logprobs or []) + later.prompt_logprobs
    held.prompt = held.prompt or later.prompt
    if later.logprobs is not None:
        held.logprobs = later.logprobs if held.logprobs is None else held.logprobs + later.logprobs
    if later.finish_reason is not None:
        held.finish_reason, held.stop_reason = later.finish_reason, later.stop_reason
        held.error, held.report, held.embedding = later.error, later.report, later.embedding
