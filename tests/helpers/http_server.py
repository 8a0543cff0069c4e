"""A real server on a free port, with its own thread and event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from ssl import SSLContext
from typing import Any, Protocol, TypeVar

import uvloop
from starlette.types import ASGIApp

from kvik.server.app import App
from kvik.server.http_protocol import DEFAULT_LIMITS, ConnectionLimits
from kvik.server.run import Listener, bind

T = TypeVar("T")


@dataclass
class HttpServer:
    """A running server.

    Attributes:
        url: such as http://127.0.0.1:40123, without a trailing slash.
        port: the port it listens on.
        listener: owns its connections.
    """

    url: str
    port: int
    listener: Listener
    _loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
        """Run a coroutine in the server's event loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)


@contextmanager
def http_server(
    app: ASGIApp,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    start: Callable[[], Awaitable[None]] | None = None,
    close: Callable[[], Awaitable[None]] | None = None,
    listening: socket.socket | None = None,
    tls: SSLContext | None = None,
) -> Iterator[HttpServer]:
    """Serve an app until the block ends.

    Args:
        limits: of its connections.
        start, close: called in the event loop, before the first connection and after the last one.
        listening: socket to listen on; None: a free port.
        tls: serves HTTPS.
    """
    listening = bind("127.0.0.1", 0) if listening is None else listening
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="http-server", daemon=True)
    thread.start()

    async def begin() -> Listener:
        if start is not None:
            await start()
        headers = app.origins.headers if isinstance(app, App) else lambda headers: {}
        listener = Listener(app, listening, limits, headers, tls)
        await listener.start()
        return listener

    async def stop(listener: Listener) -> None:
        await listener.close()
        if close is not None:
            await close()

    try:
        listener = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
        try:
            port = 0 if listening.family == socket.AF_UNIX else listener.port
            yield HttpServer(f"http://127.0.0.1:{port}", port, listener, loop)
        finally:
            asyncio.run_coroutine_threadsafe(stop(listener), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        listening.close()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for a condition that another thread or process makes true, and return its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)
    return found


class Listening(Protocol):
    """A server, in this process or another one."""

    port: int


@dataclass
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an error answer, checked to have exactly OpenAI's shape."""
        assert self.headers["content-type"] == "application/json"
        body = self.json
        assert list(body) == ["error"]
        error: dict[str, Any] = body["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"] and isinstance(error["message"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return error


def ask(
    server: Listening,
    method: str,
    target: str,
    body: bytes | str | dict[str, Any] | None = None,
    timeout: float = 30.0,
    **headers: str | None,
) -> Reply:
    """Send one request on its own connection. A dict is sent as JSON, with its content type.

    Args:
        timeout: seconds without data.
        headers: with _ for - in names; None omits a default header.
    """
    sent: dict[str, str | None] = {}
    if body is not None and not isinstance(body, str | bytes):
        body = json.dumps(body)
    if body is not None:
        sent["content-type"] = "application/json"
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=timeout)) as connection:
        data = body.encode() if isinstance(body, str) else body
        connection.request(method, target, data, {k: v for k, v in sent.items() if v is not None})
        response = connection.getresponse()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, fields, response.read())


def raw(server: HttpServer, data: bytes, timeout: float = 30.0) -> bytes:
    """Send bytes, and return the server's answer up to the end of the connection.

    Raises:
        TimeoutError: the server does not close it.
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout) as connection:
        connection.sendall(data)
        received = bytearray()
        while piece := connection.recv(65536):
            received += piece
    return bytes(received)


def until_head(server: HttpServer, data: bytes) -> tuple[socket.socket, bytes]:
    """Send bytes, and return the open connection and the head of the server's answer."""
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    connection.sendall(data)
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return connection, received
