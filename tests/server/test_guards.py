"""Protection against browsers: host names of the server, and origins of pages."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest
from helpers import chromium
from helpers.edge import KEY, Calls, edge_server
from helpers.http_server import HttpServer, ask, raw

from kvik.config.server_config import ServerConfig


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


@pytest.fixture(scope="module")
def server(calls: Calls) -> Iterator[HttpServer]:
    edge = ServerConfig(cors_origin=("https://good.example",))
    with edge_server(["right"], edge, calls) as running:
        yield running


@pytest.fixture(scope="module")
def keyless() -> Iterator[HttpServer]:
    with edge_server([], ServerConfig()) as running:
        yield running


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("kvik.localhost:80", 200),
        ("[::1]:8000", 200),
        ("127.9.9.9", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.1", 403),
        ("", 400),
        ("a b", 400),
        ("127.0.0.1@evil.example", 400),
        ("127.0.0.1/x", 400),
    ],
)
def test_on_a_loopback_address_another_name_is_refused(
    server: HttpServer, host: str, status: int
) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert raw(server, head.encode()).startswith(f"HTTP/1.1 {status} ".encode())


def test_duplicate_host_headers_are_refused(server: HttpServer) -> None:
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        head = f"GET /health HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n"
        assert raw(server, head.encode()).startswith(b"HTTP/1.1 400 ")
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


OWN_NAME = socket.gethostname()


@pytest.mark.parametrize(
    ("keys", "edge", "known", "unknown"),
    [
        # A page of another site cannot send the key.
        (["right"], ServerConfig(host=""), ["gpu.example:8000", "10.0.0.1"], []),
        (
            [],
            ServerConfig(host=""),
            ["10.0.0.1:80", "[fd00::1]:80", "localhost", OWN_NAME, OWN_NAME.upper()],
            ["gpu.example", "10.0.0.1.evil.example", f"{OWN_NAME}.evil.example"],
        ),
        (
            [],
            ServerConfig(host="", allowed_host=("gpu.example", "OTHER.")),
            ["gpu.example:80", "GPU.example.", "other", "10.0.0.1", "localhost"],
            ["x.gpu.example", "evil.example"],
        ),
        (
            ["right"],
            ServerConfig(host="", allowed_host=("gpu.example",)),
            ["gpu.example"],
            ["evil.example"],
        ),
        ([], ServerConfig(host="", allowed_host=("*",)), ["any.example"], []),
        (
            [],
            ServerConfig(allowed_host=("gpu.example",)),
            ["gpu.example", "localhost"],
            ["evil.example", "10.0.0.1", OWN_NAME],
        ),
    ],
)
def test_names_under_which_a_server_is_reached(
    keys: list[str], edge: ServerConfig, known: list[str], unknown: list[str]
) -> None:
    with edge_server(keys, edge) as running:
        for name in known:
            assert ask(running, "GET", "/v1/models", host=name, **KEY).status == 200, name
        for name in unknown:
            reply = ask(running, "GET", "/health", host=name, **KEY)
            assert reply.status == 403, name
            assert "--allowed-host" in reply.error["message"]
        assert ask(running, "GET", "/v1/models", host="a b").status == 400


def test_a_page_elsewhere_cannot_drive_a_server_without_keys(keyless: HttpServer) -> None:
    """A form, or fetch without a preflight, sends text/plain or no content type."""
    reply = ask(keyless, "POST", "/v1/echo", "{}", content_type="text/plain")
    assert reply.status == 415
    reply = ask(keyless, "POST", "/v1/echo", "{}", content_type=None)
    assert reply.status == 415
    reply = ask(keyless, "POST", "/v1/echo", {}, origin="https://evil.example")
    assert reply.status == 403
    assert "access-control-allow-origin" not in reply.headers
    own = {"origin": "http://127.0.0.1:1234", "host": "127.0.0.1:1234"}
    assert ask(keyless, "POST", "/v1/echo", {}, **own).status == 200
    preflight = {"origin": "https://evil.example", "access_control_request_method": "POST"}
    reply = ask(keyless, "OPTIONS", "/v1/echo", **preflight)
    assert reply.status in (403, 405)
    assert "access-control-allow-origin" not in reply.headers


def test_pages_that_the_operator_lists(server: HttpServer, calls: Calls) -> None:
    del calls[:]
    good = {"origin": "https://good.example"}
    reply = ask(
        server,
        "OPTIONS",
        "/v1/echo",
        **good,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type",
    )
    assert (reply.status, calls) == (204, [])
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    reply = ask(server, "POST", "/v1/echo", {}, **good)
    assert reply.status == 401  # a listed page needs a key too
    reply = ask(server, "POST", "/v1/echo", {}, **good, **KEY)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://good.example"
    assert reply.headers["vary"] == "origin"
    exposed = reply.headers["access-control-expose-headers"].split(", ")
    assert {"request-id", "kvik-unenforced", "x-kvik-degraded"} <= {*exposed}
    assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origin", ["https://good.example", "*"])
@pytest.mark.parametrize(
    ("target", "fields", "status"),
    [
        ("OPTIONS /v1/echo", "Access-Control-Request-Method: POST\r\n", 204),
        ("GET /v1/models", "Authorization: Bearer right\r\n", 200),
        ("GET /v1/models", "", 401),
        ("GET /none", "Authorization: Bearer right\r\n", 404),
        ("GET /v1/fail", "Authorization: Bearer right\r\n", 500),
        ("GET /v1/stream", "Authorization: Bearer right\r\n", 200),
        ("GET /v1/models", f"X-Large: {'a' * (65 << 10)}\r\n", 431),  # refused by the connection
    ],
)
def test_every_answer_names_the_origin_once(
    origin: str, target: str, fields: str, status: int
) -> None:
    """A browser refuses an answer with two such headers."""
    head = (
        f"{target} HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://good.example\r\n"
        f"{fields}Connection: close\r\n\r\n"
    )
    with edge_server(["right"], ServerConfig(cors_origin=(origin,))) as running:
        answer = raw(running, head.encode())
    lines = answer.partition(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert lines[0].split()[1] == str(status)
    named = [line for line in lines if line.startswith("access-control-allow-origin:")]
    assert named == [f"access-control-allow-origin: {origin}"]
    names = [line.partition(":")[0] for line in lines[1:]]
    assert len(names) == len(set(names)), names
    assert "access-control-allow-credentials" not in names


@pytest.mark.full
@pytest.mark.skipif(chromium.find() is None, reason="there is no Chromium")
@pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux alone")
def test_a_page_of_another_origin_in_a_browser() -> None:
    program = chromium.find()
    script = """fetch(%r, {method: "POST", body: "{\\"number\\": 7}", headers: {
        authorization: "Bearer right", "content-type": "application/json"}})
        .then(answer => answer.json()).then(value => value.number, error => String(error))"""
    with edge_server([], ServerConfig()) as page, chromium.Browser(program) as browser:
        browser.go(page.url + "/health")
        with edge_server(["right"], ServerConfig(cors_origin=(page.url,))) as listed:
            assert browser.evaluate(script % f"{listed.url}/v1/echo") == 7
        with edge_server(["right"], ServerConfig()) as unlisted:
            assert "TypeError" in browser.evaluate(script % f"{unlisted.url}/v1/echo")
