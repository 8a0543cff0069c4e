"""Start and end of a server: signals, draining, and an engine that cannot be started."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.waiting import eventually
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvik.config.server_config import ServerConfig
from kvik.engine.remote import EngineState
from kvik.server import health
from kvik.server.app import make_app
from kvik.server.errors import aborted
from kvik.server.route import Route
from kvik.server.run import Port, Printer, bind, serve
from kvik.server.server import Server


class Engine:
    config = SimpleNamespace(runner=SimpleNamespace(role="both"))
    state = EngineState.STARTING
    reason = "is being loaded"
    refusal = ""
    closed = False
    idle_seconds = 0.0

    @property
    def accepts(self) -> bool:
        return self.state is EngineState.READY

    def start(self, sink: object) -> None: ...

    async def close(self) -> None:
        self.closed = True


class Running:
    """Handlers, and a stub of the generations they wait for."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.aborted = ""

    def take(self, deltas: list[Any]) -> None: ...

    def abort_all(self, reason: str) -> None:
        self.aborted = reason
        self.done.set()

    async def wait(self, request: Request) -> Response:
        await self.done.wait()
        if self.aborted:
            raise aborted(self.aborted, retry=True)
        return JSONResponse({"answer": 1})


class Full:
    fill = 0.0


class Texts:
    closed = False

    async def close(self) -> None:
        self.closed = True


class RunningServer:
    """`serve` in this event loop, which receives signals."""

    def __init__(self, shutdown_timeout: float = 30.0) -> None:
        self.engine, self.running, self.texts, self.room = Engine(), Running(), Texts(), Full()
        self.messages: list[str] = []
        config = ServerConfig(shutdown_timeout=shutdown_timeout)
        stubs: Any = (self.engine, self.texts, self.running, self.room, None)
        self.parts = Server(config, ("m",), *stubs)
        routes = [Route("/wait", self.running.wait, "GET"), *health.routes(self.parts)]
        listening = bind("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        ports = [Port(make_app(self.parts, routes), listening)]
        self.ended = asyncio.ensure_future(serve(self.parts, ports, self.messages.append))

    async def ready(self) -> None:
        self.engine.state = EngineState.READY
        await eventually(lambda: "ready" in self.messages)

    async def get(self, path: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]

    async def wait(self) -> asyncio.Task[tuple[int, bytes]]:
        """Return a running request."""
        before = self.parts.drain.num_open
        task = asyncio.ensure_future(self.get("/wait"))
        await eventually(lambda: self.parts.drain.num_open > before)
        return task


def kill(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def test_health_and_readiness_follow_the_engine() -> None:
    server = RunningServer()
    await asyncio.sleep(0.05)
    for path in ("/health", "/ready", "/ping"):  # the port answers from the start
        status, body = await server.get(path)
        assert status == 503
        assert b'"starting"' in body
        assert b"the engine is being started" in body
    await server.ready()
    for path in ("/health", "/ready", "/ping", "/version"):
        assert (await server.get(path))[0] == 200
    server.room.fill = 1.0
    assert (await server.get("/health"))[0] == 200
    assert (await server.get("/ready"))[0] == 503
    server.room.fill = 0.0
    for state in (EngineState.STALLED, EngineState.RESTARTING):
        server.engine.state = state
        status, body = await server.get("/health")
        assert status == 503
        assert str(state).encode() in body
    kill()
    assert await server.ended == 0


@pytest.fixture
def with_terminal() -> Iterator[None]:
    """SIGHUP is not ignored, although the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("with_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_lets_running_requests_end(number: int) -> None:
    server = RunningServer()
    await server.ready()
    waiting = await server.wait()
    kill(number)
    await eventually(lambda: server.parts.drain.started)
    status, body = await server.get("/health")
    assert (status, b"draining" in body) == (503, True)
    assert (await server.get("/wait"))[0] == 503
    kill(signal.SIGHUP)  # a terminal that closes is not a second request to stop
    await asyncio.sleep(0.05)
    assert not server.ended.done()
    server.running.done.set()
    assert await waiting == (200, b'{"answer":1}')
    assert await server.ended == 0
    assert server.engine.closed
    assert server.texts.closed
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_after_the_timeout_running_requests_end_with_an_error() -> None:
    server = RunningServer(shutdown_timeout=0.1)
    await server.ready()
    waiting = await server.wait()
    kill()
    assert await server.ended == 0
    status, body = await waiting
    assert status == 503
    assert b"the server is being stopped" in body


async def test_the_second_signal_ends_at_once() -> None:
    server = RunningServer(shutdown_timeout=1000)
    await server.ready()
    waiting = await server.wait()
    kill()
    await eventually(lambda: server.parts.drain.started)
    start = time.monotonic()
    kill(signal.SIGINT)
    assert await server.ended == 0
    assert time.monotonic() - start < 60
    assert (await waiting)[0] == 503


async def test_a_server_started_with_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = RunningServer()
        await server.ready()
        kill(signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not server.parts.drain.started
        kill()
        assert await server.ended == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_an_engine_that_cannot_be_started_ends_the_server() -> None:
    server = RunningServer()
    server.engine.reason = "the checkpoint is broken"
    server.engine.state = EngineState.FAILED
    assert await server.ended == 1
    assert server.engine.closed


async def test_an_engine_that_is_not_started_again_ends_the_server() -> None:
    """With an exit code at which supervisors restart the server."""

    server = RunningServer()
    await server.ready()
    waiting = await server.wait()
    server.engine.reason = "it crashed 5 times"
    server.engine.state = EngineState.FAILED
    assert (await waiting)[0] == 503
    assert await server.ended == 1
    assert server.engine.closed
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_signal_while_the_model_is_loaded() -> None:
    server = RunningServer()
    await asyncio.sleep(0.02)
    kill()
    assert await server.ended == 0
    assert server.messages == []


# Output that is not read: writers continue, and lost lines are counted.


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set")
def test_writers_do_not_wait_and_lost_lines_are_counted() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    printer = Printer(writing, limit=10_000)
    lines = [f"{number:0999}" for number in range(40)]
    began = time.monotonic()
    for line in lines:
        printer.tell(line)
    printer.close(0.01)
    assert time.monotonic() - began < 30
    read: list[str] = []
    with os.fdopen(reading) as stream:
        while not read or "lost" not in read[-1]:
            read.append(stream.readline().rstrip("\n"))
        *kept, note = read
        assert kept == lines[: len(kept)]
        assert note.startswith(f"{len(lines) - len(kept)} lines were lost")
        printer.tell("more")
        assert stream.readline() == "more\n"
        printer.close(10)
    os.close(writing)


def test_a_closed_reader_causes_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    printer = Printer(writing, limit=100)
    for _ in range(100):
        printer.tell("a" * 50)
        printer.close(10)
    os.close(writing)
