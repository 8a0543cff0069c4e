"""An HTTP/1.1 connection, parsed by uvicorn, with limits on size and time."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.datastructures import Headers
from uvicorn._types import ASGI3Application, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl
from uvicorn.server import ServerState

from kvik.server.errors import HttpError, http_error
from kvik.server.route import CLOSE_EXTENSION, UNREAD_EXTENSION


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections."""

    max_connections: int = 4096  # open connections; beyond it, the longest idle one is closed
    files_per_connection: int = 1  # open files of a connection, its own included
    max_headers: int = 100  # number of headers of a request
    max_head_bytes: int = 64 << 10  # bytes of its first line and its headers
    head_seconds: float = 30.0  # time until the headers are complete
    # Time between two requests. The rest of a body after an early response is discarded meanwhile,
    # for at most `head_seconds`.
    idle_seconds: float = 30.0
    linger_seconds: float = 2.0  # time for a refused client to read the error
    # Time that a response waits for a client that does not read. Streams set shorter limits
    # (`limit_unread`).
    unread_seconds: float = 90.0


DEFAULT_LIMITS = ConnectionLimits()
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
MAX_PIPELINED = 4  # requests of a connection that wait, each with up to 64 KiB; then it is not read
FIRST_PEER_CHECK = 0.25  # seconds until a client that closed its half is checked
LONGEST_PEER_CHECK = 15.0
UPGRADE_HEADERS = (b"upgrade", b"http2-settings", b"connection")
ErrorHeaders = Callable[[Headers], Mapping[str, str]]


@dataclass(slots=True)
class Connections:
    """State shared by the connections of a server."""

    limits: ConnectionLimits
    # Returns the headers to add to an error, given the request headers read so far. Without them a
    # page of another origin cannot read the error.
    error_headers: ErrorHeaders
    # Connections without a request, idle longest first.
    idle: dict[Connection, None] = field(default_factory=dict)


class _ResponseTransport:
    """The transport of a response; the connection decides when to close it."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Connection(HttpToolsProtocol):
    """A connection that refuses input beyond its limits and closes when idle for too long."""

    def __init__(self, config: Config, state: ServerState, shared: Connections) -> None:
        super().__init__(config, state, {})
        self._shared = shared
        self._limits = shared.limits
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread_seconds = shared.limits.unread_seconds  # of the current response
        self._in_head = False  # inside the headers of a request
        self._in_body = False
        self._num_requests = 0
        self._fed_bytes = 0  # received since the head began, an upper bound of its size
        self._head_bytes = 0  # that the parser reported
        self._running: RequestResponseCycle | None = None  # `cycle` may be one that waits for it
        self._refusal: HttpError | None = None
        self._lingering = False  # the last response was written; input is discarded

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            if not self._shared.idle:
                self._refuse(HttpError(503, "too many connections", headers={"retry-after": "1"}))
                return
            next(iter(self._shared.idle)).abort()
        self._shared.idle[self] = None
        self._set_timer(self._limits.head_seconds, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._stop_unread_timer()
        self._shared.idle.pop(self, None)
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep the connection after the client closed its sending half.

        The client may be waiting for its response, or be gone; the server cannot tell the
        difference.
        """
        if self._lingering or self._in_body or not self._is_busy():
            return False
        if is_ssl(self.transport):  # TLS ends both halves together
            return False
        self.cycle.keep_alive = False
        line = self.transport.get_extra_info("socket")
        # Other systems lack these options or name them differently; a Unix socket needs none.
        if sys.platform == "linux" and line.family != socket.AF_UNIX:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        self._check_peer(FIRST_PEER_CHECK)
        return True

    def _check_peer(self, seconds: float) -> None:
        """Break the connection if the client is gone.

        The system of a client that is gone rejects data. So as long as the response has not begun,
        this sends an interim response, which clients skip (RFC 9110, section 15.2). HTTP/1.0 has no
        interim responses: only TCP keepalive detects the loss.
        """
        if self.transport.is_closing() or not self._is_busy():
            return
        line = self.transport.get_extra_info("socket")
        if line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
            return
        assert self._running is not None
        if not self._running.response_started and self.scope["http_version"] != "1.0":
            self.transport.write(CONTINUE)
        self._set_timer(seconds, partial(self._check_peer, min(4 * seconds, LONGEST_PEER_CHECK)))

    def abort(self) -> None:
        """Break the connection and drop unsent data."""
        self._shared.idle.pop(self, None)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._lingering or self.transport.is_closing():
            return  # discarded
        num_before, between = self._num_requests, not (self._in_head or self._in_body)
        if self._in_head:
            self._fed_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._refusal is not None:
            return
        if between and self._num_requests == num_before + 1:
            self._fed_bytes = len(data)
        # The parser reports only complete headers, so an endless one is detected only here.
        if self._in_head and self._fed_bytes > self._limits.max_head_bytes:
            self._refuse(self._large_head())
        elif self._timer is None and not self._is_busy() and not self.transport.is_closing():
            self._set_timer(self._limits.head_seconds, self._on_head_timeout)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self._unread_seconds, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def _break(self) -> None:
        """Break the connection of a response whose handler failed and has logged the reason."""
        assert self._running is not None
        self._running.disconnected = True  # else uvicorn logs that the response is incomplete
        self.abort()

    # One request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions = {CLOSE_EXTENSION: self._break, UNREAD_EXTENSION: self._limit_unread}
        self.scope["extensions"] = extensions  # type: ignore[typeddict-item]
        self._in_head = self._in_body = True
        self._num_requests += 1
        self._fed_bytes = self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._check_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._set_timer(None)
        self._shared.idle.pop(self, None)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            if self.scope["http_version"] == "1.0":
                _disable_chunks(self.cycle)
            self.cycle.transport = _ResponseTransport(self.transport, self._on_last_response)  # type: ignore[assignment]
            if len(self.pipeline) < MAX_PIPELINED:
                self.flow.resume_reading()  # to notice a disconnect

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._lingering:
            return
        self._unread_seconds = self._limits.unread_seconds
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_timer(self._limits.unread_seconds, self.abort)
        elif not self._is_busy():
            self._become_idle()

    def _should_upgrade(self) -> bool:
        return True  # `_feed` handles it

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserError:
            # The parser's own message would not help a client.
            self._refuse(self._refusal or HttpError(400, "this is not a valid HTTP/1.1 request"))
        except HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its upgrade headers, as the RFC permits.

        Some clients always offer HTTP/2 and send their body after that; the parser stops there.
        """
        if self.scope["method"] == "CONNECT":
            self._refuse(HttpError(400, "this server is not a proxy"))
            return
        headers = [(name, value) for name, value in self.headers if name not in UPGRADE_HEADERS]
        if b"close" in b",".join(v.lower() for n, v in self.headers if n == b"connection"):
            headers.append((b"connection", b"close"))
        self.parser = HttpRequestParser(self)
        head = b"%b %b HTTP/1.1\r\n" % (self.scope["method"].encode(), self.url)
        self._feed(head + b"".join(b"%b: %b\r\n" % field for field in headers) + b"\r\n" + rest)

    # The limits

    def _check_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if (
            self._head_bytes > self._limits.max_head_bytes
            or len(self.headers) > self._limits.max_headers
        ):
            self._refusal = self._large_head()
            raise ValueError  # stops the parser

    def _large_head(self) -> HttpError:
        limits = self._limits
        message = f"more than {limits.max_headers} headers or {limits.max_head_bytes} bytes of them"
        return HttpError(431, message)

    def _on_head_timeout(self) -> None:
        if self._in_head:
            message = f"the headers did not come within {self._limits.head_seconds:g} seconds"
            self._refuse(HttpError(408, message))
        else:
            self.transport.close()  # no request has begun

    def _refuse(self, error: HttpError) -> None:
        """Send an error, stop reading, and close after the client had time to read it."""
        self._refusal = error
        self._shared.idle.pop(self, None)
        if self._is_busy():
            if self.pipeline or self.cycle.response_started:
                self.transport.close()  # a response has begun
                return
            self.cycle.disconnected = True  # the handler sees a disconnect
            self.cycle.message_event.set()
        response = http_error(error).response()
        response.headers.update(self._shared.error_headers(Headers(raw=self.headers or [])))
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"%b%b\r\n%b" % (head, lines, bytes(response.body)))
        self._linger()

    def _on_last_response(self) -> None:
        """Close after the last response of this connection."""
        if self._in_body and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close after the client had time to read the response. Closing at once with unread input
        would reset the connection and lose the response."""
        self._lingering = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(self._limits.linger_seconds, self.abort)

    def _become_idle(self) -> None:
        """Wait for the next request; uvicorn's timer limits that."""
        self._shared.idle.pop(self, None)
        self._shared.idle[self] = None
        if self._in_head:  # the next one has begun
            self._set_timer(self._limits.head_seconds, self._on_head_timeout)
        else:
            self._set_timer(None)

    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_timer(self, seconds: float | None, call: Callable[[], None] = lambda: None) -> None:
        """Replace the timer; None removes it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, call)

    def _limit_unread(self, seconds: float) -> None:
        self._unread_seconds = seconds

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _disable_chunks(cycle: RequestResponseCycle) -> None:
    """End the response by closing the connection: HTTP/1.0 has no chunked encoding."""
    send = cycle.send

    async def plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = plain  # type: ignore[method-assign]
