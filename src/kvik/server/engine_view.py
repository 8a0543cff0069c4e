"""Decisions and state of the engine: `/v1/engine`, and as a stream `/v1/engine/live`.

Both show the activity of all callers, so if there are keys they need an administrator's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvik.config.config import Decision
from kvik.config.memory import MemoryPlan
from kvik.core.config import SchedulerConfig
from kvik.engine.client import EngineClient
from kvik.engine.live import LiveView, ReplicaView
from kvik.engine.remote import EngineState
from kvik.errors import OverloadError, UnavailableError
from kvik.server.responses import CONTENT_TYPE, json_event
from kvik.server.route import Route, limit_unread
from kvik.server.server import Server

INTERVAL = 0.4  # seconds between two events
MAX_WATCHERS = 8
SEND_SECONDS = 20.0  # time for a watcher to accept the next event
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class EngineFrame:
    """One event of the stream."""

    state: EngineState
    reason: str  # why the engine is not ready; "" if it is
    # Complete in the first event, then without steps and finished requests that were already sent;
    # None: the engine is not answering. With several engines, it covers all of them.
    view: LiveView | None
    # One entry for each of several engines; () for a single one.
    replicas: tuple[ReplicaView, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The decisions and the state of the engine."""

    model: str
    state: EngineState
    reason: str
    decisions: tuple[Decision, ...]
    memory: MemoryPlan  # planned memory in bytes
    total: int  # sum of its parts
    scheduler: SchedulerConfig
    live: LiveView | None
    replicas: tuple[ReplicaView, ...] = ()


class EngineFeed:
    """Reads the engine at most once per `interval` seconds, whatever the number of watchers."""

    interval = INTERVAL

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._frame: EngineFrame | None = None
        self._taken_at = 0.0  # when, on the clock of the event loop

    async def after(self, seen: EngineFrame | None) -> EngineFrame:
        """Return the next frame after `seen`."""
        now = asyncio.get_running_loop().time
        async with self._lock:
            frame = self._frame
            rest = self._taken_at + self.interval - now()
            if frame is None or frame is seen or rest <= 0:
                if frame is not None and rest > 0:
                    await asyncio.sleep(rest)
                self._frame = frame = await self._take()
                self._taken_at = now()
            return frame

    async def _take(self) -> EngineFrame:
        view = None
        if self._engine.state is EngineState.READY:
            with suppress(UnavailableError):  # it is busy, or has just stopped
                view = await self._engine.live()
        replicas = await self._engine.replicas()
        return EngineFrame(self._engine.state, self._engine.reason, view, replicas)


class EngineView:
    """The handlers of both routes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.feed = EngineFeed(server.engine)
        self.max_watchers = MAX_WATCHERS
        self._num_watchers = 0

    async def facts(self, request: Request) -> Response:
        config = self._server.engine.config
        frame = await self.feed.after(None)
        facts = EngineFacts(
            model=self._server.model_name,
            state=frame.state,
            reason=frame.reason,
            decisions=config.decisions,
            memory=config.memory,
            total=config.memory.total,
            scheduler=config.scheduler,
            live=frame.view,
            replicas=frame.replicas,
        )
        return Response(msgspec.json.encode(facts), media_type="application/json", headers=HEADERS)

    async def live(self, request: Request) -> Response:
        if self._server.drain.started:
            raise UnavailableError("server", "is being stopped")
        if self._num_watchers >= self.max_watchers:
            raise OverloadError(
                "engine", f"has {self.max_watchers} watchers already", 10.0, of_caller=False
            )
        self._num_watchers += 1
        return WatchedStream(self._events(), self._leave)

    def _leave(self) -> None:
        self._num_watchers -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        seen: EngineFrame | None = None
        sent: LiveView | None = None
        while not self._server.drain.started:  # shutdown does not wait for watchers
            seen = await self.feed.after(seen)
            view = seen.view
            if view is not None and sent is not None and view.stats.steps >= sent.stats.steps:
                view = view.after(sent)
            yield json_event(replace(seen, view=view))
            sent = seen.view or sent


class WatchedStream(StreamingResponse):
    """A stream that ends if its client does not read.

    Args:
        leave: called when the stream ends, for whatever reason.
    """

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type=CONTENT_TYPE, headers=HEADERS)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_unread(scope, SEND_SECONDS)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def routes(server: Server) -> list[Route]:
    view = EngineView(server)
    facts, live = "What was decided, and what is going on.", "The latter as server-sent events."
    return [
        Route("/v1/engine", view.facts, "GET", operator=True, note=facts),
        Route("/v1/engine/live", view.live, "GET", operator=True, note=live),
    ]
