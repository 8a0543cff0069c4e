"""Requests that an engine has not finished, and those that wait for the next engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kvik.core.types import EngineRequest, FinishReason, RequestDelta, RequestReport

MAX_SENDS = 2  # of one request: one that crashes its engine crashes one more, and no others


class Unfinished:
    """A request whose last delta has not come.

    Args:
        frame: what the engine is sent.

    Attributes:
        indexes: siblings whose last delta has not come.
        begun: something of it was delivered.
        ended: the engine was told to end it, or a part of it.
    """

    def __init__(self, request: EngineRequest, frame: bytes, arrival: float) -> None:
        self.request_id = request.request_id
        self.n = request.params.n
        self.deadline = request.deadline
        self.indexes = set(range(self.n))
        self.frame = frame
        self.arrival = arrival
        self.sends = 1
        self.begun = False
        self.ended = False

    @property
    def may_be_sent_again(self) -> bool:
        """Whether the next engine may be sent it without anything being delivered twice."""
        return not self.begun and not self.ended and self.sends < MAX_SENDS

    def last_deltas(
        self, indexes: Iterable[int], now: float, reason: FinishReason, error: str | None
    ) -> list[RequestDelta]:
        """Make the last delta of each of these siblings."""
        report = RequestReport(self.arrival, None, None, now, 0, 0)
        again = reason is FinishReason.ERROR and self.sends < MAX_SENDS
        return [
            RequestDelta(
                self.request_id, index, [], reason, error=error, report=report, again=again
            )
            for index in sorted(indexes)
        ]


class Waiting:
    """Requests that wait for the next engine, each until its deadline.

    Args:
        clock: the one that deadlines are told in.
        give: takes last deltas. It is called from the event loop alone, never within a call.
    """

    def __init__(
        self, clock: Callable[[], float], give: Callable[[list[RequestDelta]], None]
    ) -> None:
        self._clock = clock
        self._give = give
        self._requests: dict[str, Unfinished] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Unfinished) -> None:
        """Keep a request for the next engine."""
        self._requests[request.request_id] = request
        if request.deadline is not None:
            seconds = max(0.0, request.deadline - self._clock())
            late = (request.request_id, None, FinishReason.DEADLINE, None)
            self._timers[request.request_id] = asyncio.get_running_loop().call_later(
                seconds, self.end, *late
            )

    def end(
        self, request_id: str, index: int | None, reason: FinishReason, error: str | None
    ) -> None:
        """End a request that waits, or one of its siblings; its last delta comes soon."""
        request = self._requests[request_id]
        ended = request.indexes & ({index} if index is not None else request.indexes)
        request.indexes -= ended
        if not request.indexes:
            del self._requests[request_id]
            self._stop_timer(request_id)
        deltas = request.last_deltas(ended, self._clock(), reason, error)
        asyncio.get_running_loop().call_soon(self._give, deltas)

    def take(self) -> list[Unfinished]:
        """All of them, which wait no more."""
        requests, self._requests = list(self._requests.values()), {}
        for request in requests:
            self._stop_timer(request.request_id)
        return requests

    def _stop_timer(self, request_id: str) -> None:
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
