"""How a frontend uses the engine, in this process or in another one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvik.config.config import ResolvedConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.engine.executor import Executor
from kvik.engine.live import LiveView
from kvik.engine.loop import EngineLoop
from kvik.engine.stats import EngineStats
from kvik.engine.wire import EngineStart
from kvik.text.tokenizer import Tokenizer


class InprocClient:
    """Takes requests and returns their deltas; polling runs the steps of the engine."""

    def __init__(self, loop: EngineLoop, sleep: Sleep) -> None:
        self._loop = loop
        self._sleep = sleep

    def check(self, request: EngineRequest) -> None:
        """Raise `ParamError` or `CapacityError` if the request can never be served."""
        self._loop.core.check(request)

    def add(self, request: EngineRequest) -> None:
        """Check and queue a request; raises `CapacityError` if the queue is full."""
        self._loop.add(request)

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        self._loop.end(request_id, index, reason, error)

    def poll(self, timeout: float | None = None) -> list[RequestDelta]:
        """Return the deltas since the last call; waits up to `timeout` seconds for some."""
        idle = self._loop.idle_seconds()
        if idle:  # the policy waits for more requests: do not spin
            self._sleep(idle if timeout is None else min(idle, timeout))
        return self._loop.step()

    @property
    def has_requests(self) -> bool:
        return self._loop.has_work

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def close(self) -> None:
        self._loop.close()


class Sleep(Protocol):
    def __call__(self, seconds: float, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and what a frontend needs to know of its model."""

    resolved: ResolvedConfig
    client: InprocClient
    tokenizer: Tokenizer | None  # None: the model has none; prompts are token ids
    default_params: SamplingParams
    executor: Executor


# How an event loop talks to an engine that runs elsewhere: in another process, or a thread.


class EngineSource(Protocol):
    """Connects an engine to a client, and the next one when that is lost."""

    def start(self, client: SourceClient) -> None:
        """Connect an engine soon, by `client.connect`."""
        ...

    def lost(self, why: str, *, for_good: bool) -> None:
        """The engine is gone, as the client already knows.

        Args:
            for_good: the engine reported that it cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """End the engine; returns when its process is gone."""
        ...


class SourceClient(Protocol):
    """What a source sees of its client."""

    @property
    def state(self) -> EngineState: ...

    @property
    def reason(self) -> str: ...

    @property
    def num_unfinished(self) -> int:
        """Requests that the engine works on."""
        ...

    @property
    def signs_of_life(self) -> int:
        """Counter that is 0 until an engine was ready, and grows while it makes progress or has a
        reason to wait."""
        ...

    @property
    def step_limit(self) -> float | None:
        """Seconds that the steps in flight may take; None: not known."""
        ...

    def connect(self, sock: socket.socket, start: EngineStart | None) -> None:
        """Use the engine at the other end of the socket, which the client owns from now on.

        Args:
            start: first message, for an engine that does not know what to load.
        """
        ...

    def disconnect(self, state: EngineState, reason: str) -> None:
        """The engine is gone: end the requests that may not be sent to another one."""
        ...

    def set_state(self, state: EngineState, reason: str) -> None: ...


Sink = Callable[[list[RequestDelta]], None]  # called in the event loop, once for many deltas


class EngineState(StrEnum):
    STARTING = "starting"  # the model is being loaded
    READY = "ready"
    STALLED = "stalled"  # it has work and nothing advances
    RESTARTING = "restarting"  # it crashed, and is being loaded again
    FAILED = "failed"  # it cannot be started, or crashes again and again
    CLOSED = "closed"


class AsyncEngineClient(Protocol):
    """Takes requests and hands their deltas to the sink given to `start`. No method blocks.

    Every request added ends with exactly one last delta for each sibling, whatever happens to the
    engine. If it crashes, requests of which nothing was delivered are sent to the next engine,
    once; all others end with `FinishReason.ERROR`. A full queue refuses a request with such a
    delta, too; its `RequestDelta.refused` names the limit.
    """

    @property
    def config(self) -> ResolvedConfig: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def reason(self) -> str:
        """Why the engine is not ready, as a message for users; "" if it is."""
        ...

    @property
    def num_starts(self) -> int:
        """How often an engine became ready; more than once: it was restarted."""
        ...

    def start(self, sink: Sink) -> None:
        """Begin to start the engine. To be called once, in the event loop."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Raises `ParamError` or `CapacityError` when the request can never be served."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Send a request that passed `check`.

        Raises:
            ParamError: its id is in use, or it cannot be encoded.
            UnavailableError: the engine is not ready.
        """
        ...

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        """End a request, or one of its siblings; its last delta comes soon. Unknown ids are already
        gone."""
        ...

    async def stats(self) -> EngineStats:
        """Current statistics; the last known ones if the engine does not answer in a second."""
        ...

    async def live(self) -> LiveView:
        """The current state of requests, blocks and steps.

        Raises:
            UnavailableError: it does not answer within a second.
        """
        ...

    async def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, also pinned ones; requests go on. Returns the number of
        blocks that held one. Raises as `live`."""
        ...

    async def close(self) -> None:
        """End the engine, and its requests with an error."""
        ...
