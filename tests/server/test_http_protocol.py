"""Limits of a connection, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
from helpers.http_server import HttpServer, ask, http_server, raw, until, until_head
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvik.config.server_config import ServerConfig
from kvik.server import run
from kvik.server.access import Keys
from kvik.server.app import App
from kvik.server.http_protocol import ConnectionLimits
from kvik.server.route import BodyLimits, Route, read_body
from kvik.server.run import bind
from kvik.server.server import Drain

SECONDS = 0.3
LIMITS = ConnectionLimits(
    max_connections=8,
    head_seconds=SECONDS,
    idle_seconds=SECONDS,
    linger_seconds=0.2,
    unread_seconds=SECONDS,
)
GET = b"GET /ok HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"


class Body(msgspec.Struct):
    text: str = ""


class State:
    """Events in the handlers."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()  # the reader of /endless has disconnected
        self.sent = 0


@pytest.fixture(scope="module")
def state() -> State:
    return State()


@contextmanager
def serving(state: State, limits: ConnectionLimits, body_seconds: float) -> Iterator[HttpServer]:
    async def ok(request: Request) -> Response:
        return JSONResponse({})

    async def echo(request: Request) -> Response:
        body = await read_body(request, Body)
        return JSONResponse({"length": len(body.text)})

    async def endless(request: Request) -> Response:
        async def pieces() -> object:
            try:
                while True:
                    yield b"x" * 65536
                    state.sent += 65536
                    await asyncio.sleep(0)
            finally:
                state.gone.set()

        return StreamingResponse(pieces())

    async def broken(request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"
            raise RuntimeError("it fails")

        return StreamingResponse(pieces())

    routes = [Route("/ok", ok, "GET"), Route("/echo", echo), Route("/endless", endless, "GET")]
    routes.append(Route("/broken", broken, "GET"))
    bodies = BodyLimits(max_bytes=1 << 20, seconds=body_seconds, total_bytes=1 << 20)
    app = App(routes, Keys(), Drain(), ServerConfig(), limits=bodies)
    with http_server(app, limits) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(state: State) -> Iterator[HttpServer]:
    """A server for late clients."""
    with serving(state, LIMITS, SECONDS) as running:
        yield running


@pytest.fixture(scope="module")
def server(state: State) -> Iterator[HttpServer]:
    """A server that no delay of a test makes close a connection."""
    patient = ConnectionLimits(max_connections=8, linger_seconds=30.0)
    with serving(state, patient, 30.0) as running:
        yield running


def error(answer: bytes) -> tuple[int, dict[str, str]]:
    """Return status and error of an answer that closed the connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    assert head.lower().count(b"content-length: ") == 1
    return int(head.split()[1]), json.loads(body)["error"]


# Heads


def test_a_usual_head_with_many_headers(server: HttpServer) -> None:
    fields = b"".join(b"X-%d: %s\r\n" % (i, b"v" * 300) for i in range(98))
    assert raw(server, GET + fields + CLOSE + b"\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X: " + b"v" * 70_000 + b"\r\n\r\n",
        GET + b"X: " + b"v" * 70_000,  # and no end
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 70_000,
    ],
)
def test_a_head_that_is_too_large(server: HttpServer, head: bytes) -> None:
    status, details = error(raw(server, head))
    assert status == 431
    assert details["type"] == "invalid_request_error"


def test_a_large_head_in_small_pieces(server: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(GET)
        received = b""
        connection.setblocking(False)
        for _ in range(2000):
            try:
                connection.sendall(b"X-Y: " + b"v" * 100 + b"\r\n")
                time.sleep(0)
                received += connection.recv(65536)
            except BlockingIOError:
                continue
            except OSError:
                break
            if received:
                break
        connection.settimeout(10)
        while not received.endswith(b"}"):
            received += connection.recv(65536)
    assert error(received)[0] == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"HELLO\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        GET + b"Bad Header: x\r\n\r\n",
        GET + b" folded: x\r\n\r\n",
        POST + b"Content-Length: x\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
        POST + b"Transfer-Encoding: xchunked\r\n\r\n{}",
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n{}",
    ],
)
def test_invalid_or_ambiguous_requests(server: HttpServer, data: bytes) -> None:
    status, details = error(raw(server, data))
    assert status == 400
    assert details["message"]


def test_bad_chunks(server: HttpServer) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    for chunks in (b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}xx0\r\n\r\n", b"-2\r\n{}\r\n0\r\n\r\n"):
        answer = raw(server, head + chunks)
        assert b" 200 " not in answer


def test_a_bad_body_without_a_reader_is_answered_once(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    answer = raw(server, GET + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
    assert error(answer)[0] == 400
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_a_late_head(hasty: HttpServer) -> None:
    start = time.monotonic()
    status, details = error(raw(hasty, GET))
    assert status == 408
    assert "headers" in details["message"]
    assert time.monotonic() - start < 20


def test_a_head_in_single_bytes(hasty: HttpServer) -> None:
    """Single bytes do not extend the time limit."""
    with socket.create_connection(("127.0.0.1", hasty.port), 10) as connection:
        received = b""
        connection.settimeout(0.05)
        for drop in GET * 20:
            try:
                connection.sendall(bytes([drop]))
                received += connection.recv(4096)
                break
            except TimeoutError:
                continue
    assert b" 408 " in received


@pytest.mark.parametrize("data", [b"GET", b"\r\n", GET])
def test_a_late_head_after_a_request(hasty: HttpServer, data: bytes) -> None:
    connection, _ = until_head(hasty, GET + b"\r\n")
    with connection:
        connection.sendall(data)
        assert connection.recv(65536)[:13] == (b"" if data == b"\r\n" else b"HTTP/1.1 408 ")


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_a_connection_without_data(hasty: HttpServer, data: bytes) -> None:
    assert raw(hasty, data, 20) in (b"", b"HTTP/1.1 408")


def drip(connection: socket.socket, data: bytes) -> None:
    """Send these bytes repeatedly until the server closes the connection."""
    start = time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - start < 20:
            connection.sendall(data)
            time.sleep(0.02)


def test_endless_blank_lines(hasty: HttpServer) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), 10) as connection:
        drip(connection, b"\r\n")


# Bodies


def test_a_body_with_a_content_length_that_is_too_large(server: HttpServer) -> None:
    """The answer precedes the body."""
    connection, head = until_head(server, POST + b"Content-Length: 999999999\r\n\r\n")
    with connection:
        assert head.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_grows_too_large(server: HttpServer) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    connection, answer = until_head(server, head + chunk * 17)
    with connection:
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_large_body_of_which_the_client_sends_all(server: HttpServer) -> None:
    """It sees the answer, because the server discards the rest for a while before it closes."""
    assert ask(server, "POST", "/echo", b" " * (8 << 20)).status == 413


@pytest.mark.parametrize("size", [2 << 20, 24 << 20])
def test_an_answer_is_read_before_the_connection_closes(server: HttpServer, size: int) -> None:
    """It sends all of its body before it reads. Closing at once would lose the answer."""
    head = POST + CLOSE + b"Content-Length: %d\r\n\r\n" % size
    status, details = error(raw(server, head + b" " * size))
    assert status == 413
    assert "large" in details["message"] or "bytes" in details["message"]


@pytest.mark.parametrize("last", [b"", CLOSE])
def test_the_rest_of_a_body_has_limited_time(hasty: HttpServer, last: bytes) -> None:
    head = POST + last + b"Content-Length: 999999999\r\n\r\n"
    connection, answer = until_head(hasty, head)
    with connection:
        assert answer.startswith(b"HTTP/1.1 413 ")
        drip(connection, b" ")
    until(lambda: not hasty.listener.num_connections)


@pytest.mark.parametrize("start", [b"", b'{"text": "'])
def test_a_late_body(hasty: HttpServer, start: bytes) -> None:
    status, details = error(raw(hasty, POST + b"Content-Length: 100\r\n\r\n" + start))
    assert status == 408
    assert "body" in details["message"]


def test_concurrent_large_bodies_are_refused(server: HttpServer) -> None:
    """They are in memory until they are complete."""
    large = b'{"text": "' + b"x" * 700_000 + b'"}'
    head = POST + b"Content-Length: %d\r\n\r\n" % len(large)
    for pause in (0.1, 1.0, 5.0):  # until the server has read the first one
        with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
            slow.sendall(head + large[:-1])
            time.sleep(pause)
            reply = ask(server, "POST", "/echo", large)
            if reply.status == 200:
                continue
            assert (reply.status, reply.error["code"]) == (503, "overloaded")
            assert ask(server, "POST", "/echo", {"text": "small"}).status == 200
            slow.sendall(large[-1:])
            assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
            break
    assert reply.status == 503
    assert ask(server, "POST", "/echo", large).json == {"length": 700_000}


def test_expect_100_continue_is_answered(server: HttpServer) -> None:
    connection, head = until_head(
        server, POST + CLOSE + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    with connection:
        assert head.startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


# Connections


def test_many_requests_on_one_connection(server: HttpServer) -> None:
    body = POST + b"Content-Length: 2\r\n\r\n{}"
    answer = raw(server, (GET + b"\r\n" + body) * 10 + GET + CLOSE + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 21


def test_an_idle_connection_is_closed_and_a_used_one_is_not(hasty: HttpServer) -> None:
    began = used = time.monotonic()
    connection, answer = until_head(hasty, GET + b"\r\n")
    with connection, suppress(OSError):  # closed: the system may refuse to send
        while answer and time.monotonic() - began < 2 * SECONDS:
            time.sleep(SECONDS / 2)
            before = time.monotonic()
            connection.sendall(GET + b"\r\n")
            if answer := connection.recv(65536):
                assert answer.startswith(b"HTTP/1.1 200 ")
                used = before
        assert not answer or connection.recv(65536) == b""
    # On a busy machine, a pause may have been too long.
    assert time.monotonic() - used > 0.9 * SECONDS


def test_an_idle_connection_is_closed_for_a_new_one(server: HttpServer) -> None:
    """Silent connections do not lock out others."""
    idle = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(30)]
    try:
        assert ask(server, "GET", "/ok").status == 200
        assert server.listener.num_connections <= LIMITS.max_connections
    finally:
        for connection in idle:
            connection.close()


def test_a_connection_is_refused_if_all_others_are_busy(server: HttpServer) -> None:
    held = [
        until_head(server, b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] for _ in "12"
    ]
    body = POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    busy = [until_head(server, body)[0] for _ in range(6)]
    try:
        assert server.listener.num_connections == LIMITS.max_connections
        status, details = error(raw(server, b""))
        assert status == 503
        assert details["type"] == "server_error"
    finally:
        for connection in (*held, *busy):
            connection.close()
    until(lambda: not server.listener.num_connections)


def test_a_low_limit_of_open_files_leaves_connections(
    state: State, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "allow_files", lambda count: 64)
    with serving(state, ConnectionLimits(), 30.0) as server:
        held = [
            until_head(server, b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")[0]
            for _ in range(16)
        ]
        assert ask(server, "GET", "/ok").status == 200
        for connection in held:
            connection.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_client_that_does_not_read_is_disconnected(hasty: HttpServer, state: State) -> None:
    state.gone.clear()
    connection, _ = until_head(hasty, b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with connection:
        until(state.gone.is_set)
        before = state.sent
        time.sleep(0.1)
        assert state.sent == before
    assert ask(hasty, "GET", "/ok").status == 200


def test_a_response_that_breaks_off_is_logged_once(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(ConnectionError):
        raw(server, b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n")
    until(lambda: any("it fails" in each.getMessage() for each in caplog.records))
    assert ask(server, "GET", "/ok").status == 200  # what follows the failure has run
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 1


def test_a_port_that_is_taken_is_named(server: HttpServer) -> None:
    from kvik.errors import ConfigError

    with pytest.raises(ConfigError, match="port") as caught:
        bind("127.0.0.1", server.port)
    assert str(server.port) in caught.value.message
    with pytest.raises(ConfigError) as caught:
        bind("no.such.host.invalid", 0)
    assert caught.value.field == "host"


@pytest.mark.parametrize("close", [b"", b", close"])
def test_an_upgrade_to_http_2_is_answered_in_http_1(server: HttpServer, close: bytes) -> None:
    """Some clients send this with every first request, followed by their body."""
    head = (
        POST
        + b"Connection: Upgrade, HTTP2-Settings%b\r\nUpgrade: h2c\r\n" % close
        + b"HTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\nContent-Length: 15\r\n\r\n"
    )
    connection, answer = until_head(server, head + b'{"text": "abc"}')
    with connection:
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b'{"length":3}')
        assert (b"\r\nconnection: close" in answer) == bool(close)
        if not close:
            connection.sendall(GET + CLOSE + b"\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_body_after_an_upgrade_may_arrive_later(server: HttpServer) -> None:
    head = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 15\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        for piece in (head[:150], head[150:], b'{"text"', b': "abc"}'):
            connection.sendall(piece)
            time.sleep(0.02)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_defaults_are_those_of_the_contract() -> None:
    """The tests above use shorter ones."""
    connection, body = ConnectionLimits(), BodyLimits()
    assert (connection.max_headers, connection.max_head_bytes) == (100, 64 << 10)
    assert (connection.head_seconds, connection.idle_seconds) == (30.0, 30.0)
    assert (connection.max_connections, connection.unread_seconds) == (4096, 90.0)
    assert (body.max_bytes, body.seconds, body.max_depth) == (32 << 20, 30.0, 64)
