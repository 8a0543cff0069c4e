"""A client whose engine is played by the test."""

from __future__ import annotations

import asyncio
import socket

from helpers.served_engine import tiny_config

from kvik.core.types import FinishReason, RequestDelta, RequestReport
from kvik.engine import wire
from kvik.engine.client import EngineClient
from kvik.engine.remote import EngineLink, EngineState
from kvik.engine.wire import EngineStart, FrameReader, stepped

REPORT = RequestReport(0.0, 0.0, 0.0, 0.0, 0, 0)


def token(name: str, index: int = 0) -> RequestDelta:
    return RequestDelta(name, index, [1])


def end(name: str, index: int = 0) -> RequestDelta:
    return RequestDelta(name, index, [], FinishReason.LENGTH, report=REPORT)


class Scripted:
    """A source of engine messages that the test controls."""

    def __init__(self) -> None:
        self.link: EngineLink | None = None
        self.sock: socket.socket | None = None
        self.losses: list[tuple[str, bool]] = []
        self.closed = False
        self._frames = FrameReader()

    def start(self, link: EngineLink) -> None:
        self.link = link
        self.connect()

    def connect(self, start: EngineStart | None = None) -> None:
        ours, self.sock = socket.socketpair()
        self.sock.setblocking(False)
        self._frames = FrameReader()
        self.link.connect(ours, start)

    def lost(self, why: str, *, for_good: bool) -> None:
        self.losses.append((why, for_good))

    async def close(self) -> None:
        self.closed = True

    def send(self, *messages) -> None:
        self.sock.sendall(b"".join(wire.frame(message) for message in messages))

    def step(self, *deltas: RequestDelta, steps: int = 1, waits: bool = False) -> None:
        self.send(stepped(steps, waits, deltas))

    def received(self) -> list:
        return [wire.to_engine.decode(b) for b in self._frames.receive(self.sock)[0]]


class Rig:
    def __init__(self) -> None:
        self.source = Scripted()
        self.client = EngineClient(tiny_config(), [self.source])
        (self.link,) = self.client.links
        self.calls: list[list[RequestDelta]] = []

    @property
    def deltas(self) -> list[RequestDelta]:
        return [delta for call in self.calls for delta in call]

    @property
    def ends(self) -> list[tuple[str, int, FinishReason]]:
        return [(d.request_id, d.index, d.finish_reason) for d in self.deltas if d.finish_reason]

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0.002)

    async def send(self, *messages) -> None:
        self.source.send(*messages)
        await self.settle()

    async def step(self, *deltas: RequestDelta, steps: int = 1, waits: bool = False) -> None:
        await self.send(stepped(steps, waits, deltas))

    async def lose(self) -> None:
        """Have the engine disconnect."""
        self.source.sock.close()
        await self.settle()
        assert self.client.state is EngineState.RESTARTING
