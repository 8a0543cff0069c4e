"""Common to all answers: ids, errors in the format of the API, a log line; and shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator

import pytest
from helpers.edge import KEY, edge_server
from helpers.http_server import HttpServer, ask, raw
from helpers.raw_http import read_all

from kvik.config.server_config import ServerConfig
from kvik.core.types import Handover, RequestReport
from kvik.engine.output import OutputSoFar
from kvik.server.server import Drain
from kvik.server.transfer import (
    MOVES_HEADER,
    RESUMED_HEADER,
    MovedOutput,
    Resumption,
    signed,
)


@pytest.fixture(scope="module")
def drain() -> Drain:
    return Drain()


@pytest.fixture(scope="module")
def server(drain: Drain) -> Iterator[HttpServer]:
    with edge_server(["right"], ServerConfig(), drain=drain) as running:
        yield running


def test_request_ids_are_random(server: HttpServer) -> None:
    ids = {ask(server, "GET", "/health").headers["x-kvik-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert {len(request_id) for request_id in ids} == {32}


@pytest.mark.parametrize("theirs", ["abc-DEF_1", "x" * 128])
def test_a_harmless_id_is_sent_back(server: HttpServer, theirs: str) -> None:
    reply = ask(server, "GET", "/health", x_request_id=theirs)
    assert reply.headers["x-request-id"] == theirs
    assert reply.headers["x-kvik-request-id"] != theirs


@pytest.mark.parametrize("theirs", ["", "a b", "x" * 129, "a\tb", "é", "a;b", "<script>"])
def test_an_unsafe_id_is_replaced(server: HttpServer, theirs: str) -> None:
    reply = ask(server, "GET", "/health", x_request_id=theirs)
    assert reply.status == 200
    assert reply.headers["x-request-id"] == reply.headers["x-kvik-request-id"]


# Errors


@pytest.mark.parametrize(
    ("which", "status", "code", "param", "headers"),
    [
        ("param", 400, None, "top_p", {}),
        ("context", 400, "context_length_exceeded", "prompt", {}),
        ("capacity", 400, None, "n", {}),
        ("own", 429, "rate_limit_exceeded", None, {"retry-after": "3", "x-should-retry": "true"}),
        ("all", 503, "overloaded", None, {"retry-after": "1", "x-should-retry": "true"}),
    ],
)
def test_errors_in_the_format_of_openai(
    server: HttpServer,
    which: str,
    status: int,
    code: str | None,
    param: str | None,
    headers: dict[str, str],
) -> None:
    reply = ask(server, "GET", f"/v1/refuse/{which}", **KEY)
    assert reply.status == status
    assert (reply.error["code"], reply.error["param"]) == (code, param)
    names = ("retry-after", "x-should-retry")
    assert {name: reply.headers[name] for name in names if name in reply.headers} == headers


def test_a_bug_reveals_nothing_and_is_not_retried(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        reply = ask(server, "GET", "/v1/fail", **KEY)
    assert reply.status == 500
    assert reply.headers["x-should-retry"] == "false"
    assert reply.error == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    (record,) = [r for r in caplog.records if r.name == "kvik.server.app"]
    text = record.getMessage()
    assert reply.headers["x-kvik-request-id"] in text
    assert "RuntimeError: a secret" in text
    assert all(line.startswith("    ") for line in text.splitlines()[1:])  # none can be forged


@pytest.mark.parametrize(
    ("path", "key", "status", "kind"),
    [
        ("/v1/messages", {}, 401, "authentication_error"),
        ("/v1/messages", KEY, 400, "invalid_request_error"),
        ("/v1/messages/none", KEY, 404, "not_found_error"),
        ("/v1/messages/fail", KEY, 500, "api_error"),
    ],
)
def test_errors_in_the_format_of_anthropic(
    server: HttpServer, path: str, key: dict[str, str], status: int, kind: str
) -> None:
    reply = ask(server, "POST", path, {"number": "x"}, **key)
    assert reply.status == status
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == kind
    assert reply.json["error"]["message"]
    assert reply.headers["request-id"] == reply.headers["x-kvik-request-id"]


def test_an_answer_that_fails_while_sent_has_no_end(server: HttpServer) -> None:
    head = b"GET /v1/late HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer right\r\n\r\n"
    try:
        answer = raw(server, head)
    except ConnectionResetError:
        return
    assert not answer.endswith(b"0\r\n\r\n")  # the last chunk would mark it as complete


# Clients of HTTP/1.0, and half-closed connections

EVENTS = b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def request(target: str, version: str = "1.1") -> bytes:
    fields = "Host: 127.0.0.1\r\nConnection: keep-alive\r\nAuthorization: Bearer right\r\n"
    return f"{target} HTTP/{version}\r\n{fields}\r\n".encode()


@pytest.mark.parametrize(
    ("target", "status", "body"),
    [
        ("GET /v1/stream", 200, EVENTS),
        ("HEAD /v1/stream", 200, b""),
        ("GET /health", 200, b'{"path":null}'),
        ("GET /v1/none", 404, None),
    ],
)
def test_http_1_0_has_no_chunks(
    server: HttpServer, target: str, status: int, body: bytes | None
) -> None:
    head, _, found = raw(server, request(target, "1.0")).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert b"transfer-encoding" not in head.lower()
    assert found == body if body is not None else json.loads(found)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_connection_gets_the_whole_answer(server: HttpServer, version: str) -> None:
    count = 1 if version == "1.0" else 3  # pipelined
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(request("GET /v1/stream", version) * count)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b" 200 OK\r\n") == answer.count(b"data: 2\n\n") == count
    assert version == "1.0" or answer.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "part", [b"", b"GET", request("POST /v1/echo")[:-2] + b"Content-Length: 9\r\n\r\n{"]
)
def test_a_connection_half_closed_too_early_is_dropped(server: HttpServer, part: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        assert b" 200 " not in read_all(connection)


def test_text_of_requests_is_escaped_in_the_log(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvik.access"):
        body = {"number": 1, "new\nline": "a prompt", "ünknown": 2, "numbr": 3, "a.b": 4, "text": 5}
        reply = ask(server, "POST", "/v1/echo", body, **KEY)
        ask(server, "GET", "/v1/models/%0Aforged%1b[31m?prompt=secret", **KEY)
        ask(server, "POST", "/v1/echo", {"new\nline": 1}, **KEY)
    assert reply.headers["x-kvik-ignored-fields"] == "new\\nline, \\xfcnknown, numbr, a.b, text"
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isascii() and line.isprintable() for line in lines), lines
    text = "\n".join(lines)
    assert "a prompt" not in text
    assert "secret" not in text
    assert "right" not in text
    assert text.count("the field new\\nline") == 1  # logged once
    assert "the field numbr of requests is unknown and ignored; did you mean number?" in text
    assert "the field a.b of requests is unknown" in text
    assert "the field text of requests is ignored" in text
    assert " POST /v1/echo 200 " in text


def test_a_stopping_server_refuses_new_work(server: HttpServer, drain: Drain) -> None:
    drain.start()
    try:
        reply = ask(server, "POST", "/v1/echo", {}, **KEY)
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert ask(server, "POST", "/v1/echo", {}).status == 401
        assert ask(server, "GET", "/health").status == 200  # this route does not check
    finally:
        drain.stop()
    assert ask(server, "POST", "/v1/echo", {}, **KEY).status == 200
    assert drain.num_open == 0


def test_a_stopping_server_accepts_returned_requests() -> None:
    """A request cannot fake this, because the state in it is signed."""
    report = RequestReport(90.0, 95.0, None, 100.0, 16, 1)
    output = MovedOutput.of(0, OutputSoFar([], [], False), Handover([], 7, None, report), 100.0, 0)
    resumption = Resumption("gen-1", 1, b"", None, False, [output])
    drain, token = Drain(), b"a secret of servers"
    own, foreign = (signed(resumption, each) for each in (token, b"another secret"))
    edge = ServerConfig(kv_token=token.decode())
    with edge_server(["right"], edge, drain=drain) as server:
        drain.start()
        for headers, status in (
            ({RESUMED_HEADER: own}, 200),
            ({RESUMED_HEADER: own, MOVES_HEADER: "1"}, 503),
            ({RESUMED_HEADER: foreign}, 503),
            ({RESUMED_HEADER: "1"}, 503),
        ):
            assert ask(server, "POST", "/v1/echo", {}, **KEY, **headers).status == status


async def test_waiting_for_the_last_answer() -> None:
    drain = Drain()
    assert await drain.wait(0.0)
    drain.enter()
    assert not await drain.wait(0.01)
    waiting = asyncio.ensure_future(drain.wait(10))
    await asyncio.sleep(0)
    drain.leave()
    assert await waiting
