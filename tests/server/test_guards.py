"""Browsers: names that lead here, and pages that may use the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.edge import KEY, Calls, edge_server
from helpers.http_server import HttpServer, ask, raw

from kvik.server.app import Edge


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


@pytest.fixture(scope="module")
def server(calls: Calls) -> Iterator[HttpServer]:
    edge = Edge(loopback=True, cors_origin=("https://good.example",))
    with edge_server(["right"], edge, calls) as running:
        yield running


@pytest.fixture(scope="module")
def keyless() -> Iterator[HttpServer]:
    with edge_server([], Edge(loopback=True)) as running:
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


def test_one_host_header(server: HttpServer) -> None:
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        head = f"GET /health HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n"
        assert raw(server, head.encode()).startswith(b"HTTP/1.1 400 ")
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_elsewhere_any_name_will_do() -> None:
    with edge_server([], Edge(loopback=False)) as running:
        assert ask(running, "GET", "/v1/models", host="gpu.example:8000").status == 200
        assert ask(running, "GET", "/v1/models", host="a b").status == 400


def test_a_page_elsewhere_cannot_drive_a_server_without_keys(keyless: HttpServer) -> None:
    """A form, or fetch without a preflight, sends text/plain or no type at all."""
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
    assert reply.status == 401  # a listed page needs a key as everybody does
    reply = ask(server, "POST", "/v1/echo", {}, **good, **KEY)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://good.example"
    assert reply.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in reply.headers


def test_every_page_if_the_operator_says_so_but_never_with_credentials() -> None:
    with edge_server([], Edge(cors_origin=("*",))) as running:
        reply = ask(running, "POST", "/v1/echo", {}, origin="https://any.example")
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in reply.headers
