"""Between a client and whatever gives it engines."""

from __future__ import annotations

import socket
from typing import Protocol

from kvik.engine.async_client import EngineState
from kvik.engine.wire import Start


class EngineSource(Protocol):
    """Where a client gets its engine, and the next one when that is lost."""

    def start(self, client: SourceClient) -> None:
        """Connect an engine soon, by `client.connect`."""
        ...

    def lost(self, why: str, *, for_good: bool) -> None:
        """The engine that was connected is gone, and the client has been told.

        Args:
            for_good: it says that it cannot be loaded.
        """
        ...

    async def close(self) -> None:
        """End the engine; returns when nothing is left of it."""
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
        """0 until an engine was ready; grows while it advances, or has a reason to wait."""
        ...

    @property
    def step_limit(self) -> float | None:
        """Seconds after which what the engine computes now has taken too long; None: not known."""
        ...

    def connect(self, sock: socket.socket, start: Start | None) -> None:
        """Talk to the engine at the other end; the socket is the client's from now on.

        Args:
            start: what the engine is told first, if it must be told what to load.
        """
        ...

    def disconnect(self, state: EngineState, reason: str) -> None:
        """The engine is gone: end the requests that no other engine may be sent, and say why."""
        ...

    def set_state(self, state: EngineState, reason: str) -> None: ...
