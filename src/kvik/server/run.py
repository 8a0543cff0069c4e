"""A server from its first connection to its last, and how signals end it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp

from kvik.engine.async_client import EngineState
from kvik.server.http_protocol import DEFAULT_LIMITS, ConnectionLimits
from kvik.server.listener import Listener
from kvik.server.parts import Parts

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05  # between two looks at the engine while it starts
WATCH_SECONDS = 0.5  # and while it serves
LAST_WORDS = 2.0  # seconds for answers that were ended to reach their clients
HURRY = 0.2  # the same, when the signal came twice
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Port:
    """An app and the socket that it answers on."""

    app: ASGIApp
    socket: socket.socket


async def serve(
    parts: Parts,
    ports: Sequence[Port],
    tell: Callable[[str], None],
    limits: ConnectionLimits = DEFAULT_LIMITS,
) -> int:
    """Serve until a signal comes, or no engine is started any more; returns the exit code.

    It is 1 in the latter case, so that whoever started the server starts it again. The first
    SIGTERM or SIGINT takes no more requests and lets those that run end, for at most
    `shutdown_timeout` seconds; what is left then ends with an error. The second ends at once.

    Args:
        tell: prints a line for the operator.
    """
    stop = Stop()
    listeners = [Listener(port.app, port.socket, limits) for port in ports]
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.ask)
    try:
        parts.engine.start(parts.generations.take)
        for listener in listeners:
            await listener.start()
        failed = await _started(parts, stop, tell)
        failed = failed or await _served(parts, stop)
        if not failed:
            await _drain(parts, stop, tell)
    finally:
        quick = stop.again.is_set()
        parts.drain.start()
        parts.generations.abort_all("the server is being stopped")
        await parts.drain.wait(HURRY if quick else LAST_WORDS)
        for listener in listeners:
            await listener.close(HURRY)
        await _close(parts, HURRY if quick else None)
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return 1 if failed else 0


class Stop:
    """Whether the server was asked to stop, and whether it was asked again."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.again = asyncio.Event()

    def ask(self) -> None:
        (self.again if self.asked.is_set() else self.asked).set()


async def _started(parts: Parts, stop: Stop, tell: Callable[[str], None]) -> bool:
    """Until the engine is ready, or the server is to stop. Returns whether it never will be."""
    while not stop.asked.is_set():
        match parts.engine.state:
            case EngineState.READY:
                tell("ready")
                return False
            case EngineState.FAILED:
                log.error("the engine cannot be started: %s", parts.engine.reason)
                return True
        await asyncio.sleep(LOOK_SECONDS)
    return False


async def _served(parts: Parts, stop: Stop) -> bool:
    """Until the server is to stop, or the engine has failed for good. Returns whether it has."""
    while not stop.asked.is_set():
        if parts.engine.state is EngineState.FAILED:
            log.error("the server ends: %s", parts.engine.reason)
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCH_SECONDS):
                await stop.asked.wait()
    return False


async def _drain(parts: Parts, stop: Stop, tell: Callable[[str], None]) -> None:
    parts.drain.start()
    seconds = parts.config.shutdown_timeout
    if parts.drain.num_open:
        tell(f"stopping: {parts.drain.num_open} answers have {seconds:g} s; once more ends at once")
    empty = asyncio.ensure_future(parts.drain.wait(seconds))
    again = asyncio.ensure_future(stop.again.wait())
    _, pending = await asyncio.wait((empty, again), return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()


async def _close(parts: Parts, seconds: float | None) -> None:
    """Args:
    seconds: after which the engine is left behind; its process ends by itself.
    """
    try:
        async with asyncio.timeout(seconds):
            await parts.engine.close()
            await parts.texts.close()
    except TimeoutError:
        log.warning("the engine was left behind; its process ends by itself")
