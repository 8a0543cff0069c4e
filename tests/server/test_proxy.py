"""`kvik route`: forwarding, routing, and failures of servers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.http_server import HttpServer, ask, http_server, until
from helpers.serving import served
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvik.cli.main import main
from kvik.server import health, proxy, upstreams
from kvik.server.access import Hosts
from kvik.server.app import openai_routes
from kvik.server.proxy import MovedMark, Proxy
from kvik.server.route import CLOSE_EXTENSION, BodyLimits
from kvik.server.routed_prompts import cached_share, piece_hashes, rendered
from kvik.server.transfer import (
    MOVED_HEADER,
    MOVES_HEADER,
    PREFILL_HEADER,
    RESUMED_HEADER,
    SOURCE_HEADER,
)

CHAT = "/v1/chat/completions"
LOCAL = Hosts("127.0.0.1", (), keyed=False)
Clock = Callable[[], float]


@pytest.fixture(autouse=True)
def servers_that_stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them never answer, and would be waited for."""
    monkeypatch.setattr("kvik.server.run.LAST_SECONDS", 0.05)


@dataclass
class Backend:
    """A server that records its requests and gives scripted answers."""

    name: str
    answer: Callable[[Backend, Scope, bytes, Send], Any] | None = None
    healthy: bool = True
    role: str = "both"
    store: str = ""
    models: list[str] = field(default_factory=list)
    requests: list[tuple[Scope, bytes]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b"".join([part async for part in Request(scope, receive).stream()])
        if scope["path"] in ("/health", "/v1/models"):
            status = 200 if self.healthy else 503
            content = {"object": "list", "reason": "it rests", "role": self.role}
            content["store"] = self.store
            content["data"] = [{"id": name} for name in self.models]
            await respond(send, status, json.dumps(content).encode())
            return
        self.requests.append((scope, body))
        if self.answer is None:
            await respond(send, 200, json.dumps({"from": self.name}).encode())
        else:
            await self.answer(self, scope, body, send)


async def respond(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def begin(send: Send, *parts: bytes) -> None:
    """Begin an answer without a known length."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})


def replying(status: int, *headers: tuple[bytes, bytes]) -> Any:
    """Return an empty answer."""

    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await respond(send, status, b"{}", *headers)

    return answer


@dataclass
class Site:
    front: HttpServer
    proxy: Proxy
    backends: list[Backend]
    servers: list[HttpServer]

    def post(self, prompt: str, **more: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], **more}
        return ask(self.front, "POST", CHAT, body)


@contextmanager
def site(
    *backends: Backend, timeout: float = 30.0, clock: Clock = time.monotonic
) -> Iterator[Site]:
    with ExitStack() as stack:
        servers = [stack.enter_context(http_server(app)) for app in backends]
        with in_front([server.url for server in servers], timeout, clock) as (front, made):
            yield Site(front, made, list(backends), servers)


@contextmanager
def in_front(
    urls: list[str], timeout: float = 30.0, clock: Clock = time.monotonic
) -> Iterator[tuple[HttpServer, Proxy]]:
    made = Proxy(urls, LOCAL, timeout, clock)
    with http_server(made, start=made.servers.start, close=made.servers.close) as front:
        yield front, made


# -- forwarding ----------------------------------------------------------------------------------


def test_a_request_and_its_answer_pass_through_unchanged():
    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        own = [(b"connection", b"x-own"), (b"x-own", b"1"), (b"x-a", b"b"), (b"x-a", b"c" * 30000)]
        await respond(send, 418, b"\x00\xff" + body, (b"x-request-id", b"r1"), *own)

    with site(Backend("a", answer)) as made:
        connection = HTTPConnection("127.0.0.1", made.front.port, timeout=10)
        headers = {
            "X-Request-Id": "r1",
            "Authorization": "Bearer k",
            "Connection": "x-own, keep-alive",
            "X-Own": "1",
            "TE": "trailers",
        }
        connection.request("PUT", "/v1/x%20y?a=%2F&b", b"body", headers)
        found = connection.getresponse()
        assert (found.status, found.read()) == (418, b"\x00\xffbody")
        assert found.headers["x-request-id"] == "r1" and "x-own" not in found.headers
        assert found.headers.get_all("x-a") == ["b", "c" * 30000]
        connection.request("OPTIONS", "*")
        assert connection.getresponse().status == 418
        connection.close()
        made.post("x")
        connection.request("POST", CHAT, b'{"prompt": "\xff"}')  # the server refuses it
        assert connection.getresponse().status == 418
        connection.close()
        (scope, body), (_, _), (other, _), (_, _) = made.backends[0].requests
        sent = dict(scope["headers"])
        assert (scope["method"], scope["raw_path"]) == ("PUT", b"/v1/x%20y")
        assert (scope["query_string"], body) == (b"a=%2F&b", b"body")
        assert sent[b"x-request-id"] == b"r1" and sent[b"authorization"] == b"Bearer k"
        assert sent[b"x-forwarded-for"] == b"127.0.0.1"
        assert not sent.keys() & {b"x-own", b"te"}
        assert sent[b"host"] == made.servers[0].url.removeprefix("http://").encode()
        assert len(dict(other["headers"])[b"x-request-id"]) == 32  # it had none


def test_another_host_is_refused():
    """A web page could give its own name the proxy's address (DNS rebinding)."""
    with site(Backend("a")) as made:
        for path in ("/metrics", "/v1/models"):
            assert ask(made.front, "GET", path, host="localhost:8080").status == 200
            assert ask(made.front, "GET", path, host="evil.example").status == 403


def test_a_body_that_is_too_large_is_refused_before_it_is_sent():
    head = b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\n"
    head += b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
    with (
        site(Backend("a")) as made,
        socket.create_connection(("127.0.0.1", made.front.port), timeout=10) as client,
    ):
        client.sendall(head)
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_large_bodies_are_limited_together(monkeypatch: pytest.MonkeyPatch):
    """They need no key."""
    monkeypatch.setattr(proxy, "LIMITS", BodyLimits(small_bytes=200, total_bytes=1000))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n".encode()
    with site(Backend("a")) as made:
        with socket.create_connection(("127.0.0.1", made.front.port)) as client:
            client.sendall(head + b"x" * 800)
            until(lambda: made.proxy.budget.num_bytes)
            reply = made.post("word " * 100)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert made.post("").status == 200  # a small one
        until(lambda: not made.proxy.budget.num_bytes)
        assert made.post("word " * 100).status == 200


def test_events_come_as_they_are_sent():
    gate: list[asyncio.Event] = []

    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await begin(send, b"data: 1\n\n")
        gate.append(asyncio.Event())
        await gate[0].wait()
        await send({"type": "http.response.body", "body": b"data: 2\n\n"})

    with site(Backend("a", answer)) as made:
        connection = HTTPConnection("127.0.0.1", made.front.port, timeout=10)
        connection.request("POST", CHAT, b"{}")
        found = connection.getresponse()
        assert found.read(9) == b"data: 1\n\n"

        async def release() -> None:
            gate[0].set()

        until(lambda: gate)
        made.servers[0].call(release())
        assert found.read() == b"data: 2\n\n"
        connection.close()


def test_a_slow_client_slows_the_server_down():
    sent: list[int] = []

    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await begin(send)
        for _ in range(2000):
            part = b"x" * 65536
            await send({"type": "http.response.body", "body": part, "more_body": True})
            sent.append(len(part))
        await send({"type": "http.response.body", "body": b""})

    with site(Backend("a", answer)) as made, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.connect(("127.0.0.1", made.front.port))
        client.sendall(b"GET /v1/large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        until(lambda: sent)
        still, before = 0, -1
        while still < 10:  # until no more bytes are sent
            still, before = (still + 1 if len(sent) == before else 0), len(sent)
            time.sleep(0.02)
        assert sum(sent) < 24 << 20  # of 125 MiB: the buffers of sockets


def test_the_server_is_notified_of_a_disconnect():
    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await begin(send)
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.01)

    with site(Backend("a", answer)) as made:
        with socket.create_connection(("127.0.0.1", made.front.port)) as client:
            client.sendall(b"GET /v1/endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(10)
        until(lambda: made.servers[0].listener.num_connections <= 1)
        until(lambda: made.proxy.servers.listed[0].unfinished == 0)


# -- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [2000, 30_000])  # the latter are a large body
def test_a_conversation_stays_where_it_is_and_others_spread(words: int):
    # The clock stands still, so that no server seems slow on a busy machine.
    with site(Backend("a"), Backend("b"), Backend("c"), clock=lambda: 0.0) as made:
        seen = set()
        for number in range(60):  # of 12, one in 40 runs has none at some server
            long, places = f"story {number} " * words, set()
            for turn in range(3):
                places.add(made.post(long + "x" * turn).json["from"])
                until(lambda: not any(one.unfinished for one in made.proxy.servers.listed))
            assert len(places) == 1
            seen |= places
            if len(seen) == 3:
                break
        assert seen == {"a", "b", "c"}


def test_refused_prompts_are_retried_once():
    refuse = replying(503)
    with site(Backend("a", refuse), Backend("b")) as made:
        answers = [made.post(f"{i}" * 600) for i in range(12)]
        assert {(a.status, a.json["from"]) for a in answers} == {(200, "b")}
        assert made.proxy.retries == len(made.backends[0].requests) > 0
    with site(Backend("a", refuse), Backend("b", refuse)) as made:
        assert made.post("x").status == 503  # the answer of the second server
        assert sum(len(b.requests) for b in made.backends) == 2


@pytest.mark.parametrize("status", [503, 504])  # aborted by an operator, past its deadline
def test_an_answer_that_forbids_a_retry_is_final(status: int):
    final = replying(status, (b"x-should-retry", b"false"))
    with site(Backend("a", final), Backend("b", final)) as made:
        assert made.post("x").status == status
        assert sum(len(b.requests) for b in made.backends) == 1


def test_every_server_that_has_not_begun_a_request_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 3600.0)  # no look in between

    refuse, fail = replying(503), replying(502)

    def prompts(number: int) -> list[str]:
        return [f"{i}" * 600 for i in range(number)]

    with site(*(Backend(name, refuse) for name in "abcd"), Backend("e")) as made:
        assert {made.post(prompt).json.get("from") for prompt in prompts(12)} == {"e"}
    with site(*(Backend(name, fail) for name in "abc")) as made:  # they may have begun it
        assert made.post("x").status == 502
        assert sum(len(b.requests) for b in made.backends) == 2
    with site(*map(Backend, "abcd")) as made:
        for server in made.servers[:3]:
            server.call(server.listener.close(0))
        assert {made.post(prompt).json.get("from") for prompt in prompts(4)} == {"d"}


def test_requests_lost_before_the_first_byte_are_retried_once():
    async def die(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        scope["extensions"][CLOSE_EXTENSION]()

    with site(Backend("a", die), Backend("b")) as made:
        answers = [made.post(f"{i}" * 600) for i in range(12)]
        assert {(a.status, a.json["from"]) for a in answers} == {(200, "b")}
        assert made.backends[0].requests
    with site(Backend("a", die)) as made:
        found = made.post("x")
        assert found.status == 503 and made.servers[0].url in found.error["message"]
        assert len(made.backends[0].requests) == 2
    with site(Backend("a", die), Backend("b", die), Backend("c", die)) as made:
        message = made.post("x").error["message"]
        asked = [server.url in message for server in made.servers]
        assert asked == [bool(backend.requests) for backend in made.backends]


def test_requests_lost_later_are_not_retried():
    async def die(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await begin(send, b"data: 1\n\n")
        scope["extensions"][CLOSE_EXTENSION]()

    with site(Backend("a", die), Backend("b", die)) as made:
        with socket.create_connection(("127.0.0.1", made.front.port), timeout=10) as client:
            client.sendall(b"GET /v1/x HTTP/1.1\r\nhost: localhost\r\n\r\n")
            data = b""
            while part := client.recv(1000):
                data += part
        assert b"data: 1" in data and not data.endswith(b"0\r\n\r\n")
        assert sum(len(b.requests) for b in made.backends) == 1


def test_without_servers_requests_fail_until_one_returns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 0.02)
    with site(Backend("a"), Backend("b")) as made:
        assert ask(made.front, "GET", "/health").status == 200
        made.backends[0].healthy = False
        until(lambda: not made.proxy.servers.listed[0].healthy)
        assert {made.post(f"{i}" * 600).json["from"] for i in range(8)} == {"b"}
        made.backends[1].healthy = False
        until(lambda: not made.proxy.servers.listed[1].healthy)
        found = made.post("x")
        assert found.status == 503 and "it rests" in found.error["message"]
        found = ask(made.front, "POST", "/v1/messages", {})
        assert found.json["error"]["type"] == "overloaded_error"
        assert found.headers["x-should-retry"] == "true"
        assert ask(made.front, "GET", "/health").status == 503
        made.backends[0].healthy = True
        until(lambda: made.proxy.servers.listed[0].healthy)
        assert made.post("x").json["from"] == "a"
        state = ask(made.front, "GET", "/replicas").json["replicas"]
        assert [one["reason"] for one in state] == ["", "it rests"]
        metrics = ask(made.front, "GET", "/metrics").body.decode()
        assert f'kvik_route_up{{url="{made.servers[1].url}"}} 0' in metrics


def test_a_silent_server_is_abandoned():
    async def wait(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await asyncio.sleep(30)

    with site(Backend("a", wait), timeout=0.2) as made:
        began = time.monotonic()
        assert made.post("x").status == 503
        assert time.monotonic() - began < 10


# -- over servers of kvik ------------------------------------------------------------------------


def test_over_two_servers_of_kvik():
    def routes(server: Any) -> Any:
        return [*openai_routes(server), *health.routes(server)]

    with (
        served(routes) as one,
        served(routes) as other,
        in_front([one.http.url, other.http.url]) as (front, made),
    ):
        body = {"model": "m", "prompt": "a" * 40, "max_tokens": 5, "stream": True}
        model = ask(front, "GET", "/v1/models").json["data"][0]["id"]
        alone = ask(one.http, "POST", "/v1/completions", {**body, "model": model, "stream": False})
        assert alone.status == 200
        for _ in range(4):
            found = ask(front, "POST", "/v1/completions", {**body, "model": model})
            assert found.status == 200 and found.body.endswith(b"data: [DONE]\n\n")
        assert ask(front, "POST", "/v1/completions", {"prompt": 5, "model": model}).status == 400
        assert [u.errors for u in made.servers.listed] == [0, 0]
        assert sum(u.requests for u in made.servers.listed) == 5


def test_a_stored_response_is_continued_where_it_is():
    def routes(server: Any) -> Any:
        return [*openai_routes(server), *health.routes(server)]

    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with (
        served(routes, template=template) as one,
        served(routes, template=template) as other,
        in_front([one.http.url, other.http.url]) as (front, _),
    ):
        body = {"input": "Hi", "max_output_tokens": 2}
        for home in (one, other) * 2:
            last = ask(home.http, "POST", "/v1/responses", body).json["id"]
            for _ in range(2):
                more = {**body, "previous_response_id": last}
                reply = ask(front, "POST", "/v1/responses", more)
                assert reply.status == 200, reply.body
                num_tokens = reply.json["usage"]["input_tokens"]
                more = {"input": "Hi", "previous_response_id": last}
                count = ask(front, "POST", "/v1/responses/input_tokens", more)
                assert count.json["input_tokens"] == num_tokens, count.body
                named = {"type": "item_reference", "id": reply.json["output"][0]["id"]}
                reply = ask(front, "POST", "/v1/responses", {**body, "input": [named]})
                assert reply.status == 200, reply.body
                last = reply.json["id"]
                for path in ("", "/input_items"):
                    assert ask(front, "GET", f"/v1/responses/{last}{path}").status == 200
            assert home.parts.stored.find("", last)
            assert ask(front, "DELETE", f"/v1/responses/{last}").json["deleted"] is True
            assert ask(front, "GET", f"/v1/responses/{last}").status == 404
            reply = ask(front, "POST", "/v1/responses", {**body, "previous_response_id": last})
            assert reply.error["code"] == "previous_response_not_found"


def test_only_the_server_with_the_stored_response_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 0.02)
    overloaded = replying(503, (b"retry-after", b"7"))
    at_b, unknown = (f"resp_{name * 8}{'0' * 32}" for name in ("b", "9"))
    with site(
        Backend("p", role="prefill", store="aaaaaaaa"),
        Backend("b", overloaded, role="decode", store="bbbbbbbb"),
        Backend("c", role="decode", store="cccccccc"),
    ) as made:
        prefill, holder, _ = made.backends
        for size in (3000, 300_000):
            for named in ({"previous_response_id": at_b}, {"input": [{"id": at_b}]}):
                reply = made.post("x" * size, **named)
                assert (reply.status, reply.headers["retry-after"]) == (503, "7")
        assert ask(made.front, "GET", f"/v1/responses/{at_b}").status == 503
        assert len(holder.requests) == 5 and not prefill.requests
        assert made.proxy.retries == 0
        holder.healthy = False
        until(lambda: not made.proxy.servers.listed[1].healthy)
        reply = ask(made.front, "DELETE", f"/v1/responses/{at_b}")
        assert reply.status == 503 and "it rests" in reply.error["message"]
        assert len(holder.requests) == 5
        for response_id in (unknown, "resp_x"):  # one that may say so
            reply = ask(made.front, "GET", f"/v1/responses/{response_id}")
            assert reply.json["from"] == "c"
        assert made.post("x", previous_response_id=5).json["from"] == "c"


# -- the parts -----------------------------------------------------------------------------------


def hashes_of(body: dict[str, Any]) -> list[bytes]:
    return piece_hashes(rendered(body))


def with_models(*names: str) -> Any:
    """Return the answers of a server with these models, in the words of kvik, vLLM or others."""

    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        named = scope["path"].rpartition("/models/")[2] if not body else json.loads(body)["model"]
        if named in names:
            await respond(send, 200, json.dumps({"from": backend.name}).encode())
            return
        error = {"message": f"the model '{named}' does not exist", "code": "model_not_found"}
        await respond(send, 404, json.dumps({"error": error, "from": backend.name}).encode())

    return answer


def test_a_request_goes_to_a_server_that_has_its_model() -> None:
    clock = [100.0]
    one, two = Backend("one", with_models("a", "both")), Backend("two", with_models("b", "both"))
    with site(one, two, clock=lambda: clock[0]) as made:
        for _ in range(2):
            for number in range(8):
                assert made.post(f"{number}", model="a").json == {"from": "one"}
                assert made.post(f"{number}", model="b").json == {"from": "two"}
                made.post(f"{number}", model="both")
            assert len(one.requests) + len(two.requests) <= 24 + 2  # each was asked once in vain
            assert one.requests and two.requests
            clock[0] += 60
            one.requests.clear()
            two.requests.clear()
            one.answer, two.answer = two.answer, one.answer  # as adapters may be loaded elsewhere
            one.name, two.name = two.name, one.name
        assert made.post("x", model="c").status == 404
        assert ask(made.front, "GET", "/v1/models/b").json == {"from": "two"}
        assert ask(made.front, "GET", "/v1/models/c").status == 404


def test_the_models_of_all_servers_are_listed() -> None:
    one, two, three = Backend("one"), Backend("two"), Backend("three", healthy=False)
    many = [f"{i:0500}" for i in range(1000)]  # more than one read gives
    one.models, two.models, three.models = ["a", "b"], ["b", "c", *many], ["d"]
    with site(one, two, three) as made:
        for path in ("/v1/models", "/models"):
            listed = ask(made.front, "GET", path).json
            assert [model["id"] for model in listed["data"]] == ["a", "b", "c", *many]
        two.healthy = False
        assert [m["id"] for m in ask(made.front, "GET", "/v1/models").json["data"]] == ["a", "b"]


def test_turns_of_a_conversation_share_their_first_pieces():
    system = {"role": "system", "content": "s" * 600}
    first = [system, {"role": "user", "content": "u" * 600}]
    longer = [*first, {"content": "b" * 600, "role": "assistant"}]
    one, other = (
        hashes_of({"model": "m", "messages": first}),
        hashes_of({"messages": longer, "model": "m", "temperature": 0.5}),
    )
    assert one == other[: len(one)] and len(one) >= 4
    for changed in (
        {"model": "n", "messages": longer},
        {"model": "m", "messages": longer, "tools": [{"type": "function"}]},
        {"model": "m", "messages": longer, "cache_salt": "x"},
        {"model": "m", "messages": [{"role": "system", "content": "t" * 600}]},
    ):
        assert hashes_of(changed)[0] != one[0]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "p" * 900},
        {"prompt": list(range(900))},
        {"prompt": ["p" * 900, "q"]},
        {"input": "p" * 900},
        {"input": [{"role": "user", "content": "p" * 900}]},
        {"system": "s" * 900, "messages": [{"role": "user", "content": [{"text": "x"}]}]},
        {"messages": "p" * 900},
        {"messages": [None, 5] * 200},
    ],
)
def test_any_body_has_a_prompt(body: dict[str, Any]):
    assert len(hashes_of(body)) >= 3
    assert hashes_of(body) == hashes_of(json.loads(json.dumps(body)))


@pytest.mark.parametrize(
    ("tail", "share"),
    [
        (b'{"usage":{"prompt_tokens":40,"prompt_tokens_details":{"cached_tokens":10}}}', 0.25),
        (b'"input_tokens": 8, "input_tokens_details": {"cached_tokens": 8}', 1.0),
        (b'"prompt_tokens":0,"cached_tokens":0', None),
        (b'"prompt_tokens":7', None),
        (b"data: [DONE]", None),
        (b"", None),
    ],
)
def test_the_cached_share_of_an_answer(tail: bytes, share: float | None):
    assert cached_share(tail) == share


# -- the command ---------------------------------------------------------------------------------


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["route", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["ftp://a"], "http://127.0.0.1:8000"),
        (["http://a:99999"], "http://127.0.0.1:8000"),
        (["http://a/", "http://a"], "twice"),
        (["http://a", "--timeout", "0"], "timeout"),
        (["http://a", "--port", "70000"], "port"),
        (["http://a", "--allowed-host", "a:80"], "allowed"),
        ([], "url"),
    ],
)
def test_bad_words_are_one_error(capsys: pytest.CaptureFixture[str], words: list[str], part: str):
    assert part in error_of(capsys, *words).lower()


def test_it_waits_for_servers_that_start_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 0.05)
    listening = socket.socket()  # refuses connections until the server listens
    listening.bind(("127.0.0.1", 0))

    async def wait() -> bool:
        made = Proxy([f"http://127.0.0.1:{listening.getsockname()[1]}"], LOCAL)
        starting = asyncio.ensure_future(made.servers.start())
        await asyncio.sleep(0.2)
        assert not starting.done()
        with http_server(Backend("a"), listening=listening):
            await starting
            await made.servers.close()
        return made.servers.listed[0].healthy

    assert asyncio.run(wait())


def test_a_missing_server_or_api_is_one_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(upstreams, "START_SECONDS", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        line = error_of(capsys, url, "--port", "0")
        assert url in line and "url" in line and "start one" in line

    async def errors(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 404, b'{"error": {}}')

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, b"<html>")

    async def binary(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 200, b'"\xff"')

    for app in (errors, page, binary):
        with http_server(app) as other:
            line = error_of(capsys, other.url, "--port", "0")
            assert other.url in line and "OpenAI" in line


def test_the_proxy_waits_for_a_server_that_loads_its_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 0.02)
    with site(Backend("a", healthy=False)) as made:
        assert made.post("x").status == 503
        made.backends[0].healthy = True
        until(lambda: made.proxy.servers.listed[0].healthy)
        assert made.post("x").status == 200


# -- prefill and decode ----------------------------------------------------------------------------


async def computed(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
    """Answer like a server that computes prompts."""
    if PREFILL_HEADER.encode() in dict(scope["headers"]):
        await respond(send, 200, b"{}", (SOURCE_HEADER.encode(), b"ticket"))
    else:
        await respond(send, 200, json.dumps({"from": backend.name}).encode())


def tickets(backend: Backend) -> list[bytes | None]:
    return [dict(scope["headers"]).get(SOURCE_HEADER.encode()) for scope, _ in backend.requests]


def test_a_prompt_is_computed_by_one_server_and_decoded_by_another():
    prefill, decode = Backend("p", computed, role="prefill"), Backend("d", role="decode")
    with site(prefill, decode) as made:
        forged = {PREFILL_HEADER: "1", SOURCE_HEADER: "forged"}
        body = {"model": "m", "messages": [{"role": "user", "content": "long " * 200}]}
        for _ in range(2):
            answer = ask(made.front, "POST", CHAT, body, **forged)
            assert (answer.status, answer.json["from"]) == (200, "d")
        assert tickets(decode) == [b"ticket", None]  # the second time it has the prompt
        assert [json.loads(body) for _, body in prefill.requests] == [body]
        assert made.post("short").json["from"] == "d"
        assert made.proxy.prefills == len(prefill.requests) == 1
        until(lambda: all(not one.unfinished for one in made.proxy.servers.listed))
        embed = {"model": "m", "input": "other " * 200}
        assert ask(made.front, "POST", "/v1/embeddings", embed).json["from"] == "d"
        assert len(prefill.requests) == 1


async def breaks_off(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
    raise RuntimeError("it dies")


REFUSES = replying(503, (SOURCE_HEADER.encode(), b"ticket"))


@pytest.mark.parametrize("answer", [REFUSES, breaks_off, replying(200)])
def test_without_a_prefill_server_the_decoder_computes_the_prompt(answer: Callable[..., Any]):
    prefill, decode = Backend("p", answer, role="prefill"), Backend("d", role="decode")
    with site(prefill, decode) as made:
        assert made.post("long " * 200).json["from"] == "d"
        assert len(prefill.requests) == 1 and tickets(decode) == [None]
        assert made.proxy.prefills == 0


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        (("prefill", "both"), "decode"),
        (("decode", "both"), "prefill"),
        (("prefill", "decode"), ""),
        (("both", "both"), ""),
    ],
)
def test_incompatible_roles_are_reported_once(
    roles: tuple[str, str],
    missing: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 0.01)
    asked = Counter[str]()

    @dataclass
    class Asked(Backend):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            asked[self.name] += 1
            await super().__call__(scope, receive, send)

    with site(*(Asked(name, role=role) for name, role in zip("ab", roles, strict=True))):
        until(lambda: min(asked.values()) > 5)
    warnings = [each.getMessage() for each in caplog.records if "role" in each.getMessage()]
    assert len(warnings) == bool(missing) and all(
        f"no server has --role {missing}" in t for t in warnings
    )


def test_a_disconnect_ends_the_computation_of_a_prompt():
    async def waits(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await asyncio.sleep(60)

    prefill, decode = Backend("p", waits, role="prefill"), Backend("d", role="decode")
    with site(prefill, decode) as made:
        body = json.dumps({"messages": [{"role": "user", "content": "long " * 200}]}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", made.front.port)) as client:
            client.sendall(head.encode() + body)
            until(lambda: prefill.requests)
            assert made.proxy.servers.listed[0].unfinished == 1
        until(lambda: not made.proxy.servers.listed[0].unfinished, 30)
        assert not decode.requests and made.proxy.servers.listed[0].healthy


def test_a_server_that_computes_prompts_answers_where_no_other_one_can():
    prefill, decode = Backend("p", computed, role="prefill"), Backend("d", role="decode")
    with site(prefill, decode) as made:
        decode.answer = REFUSES
        assert made.post("long " * 200).json["from"] == "p"
        assert tickets(prefill) == [None, b"ticket"]


@pytest.mark.full
def test_the_command_runs_until_it_is_stopped():
    """Also with few open files: it takes no more connections than it can forward."""

    async def wait(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        await asyncio.sleep(0.5)
        await respond(send, 200, b"{}")

    with site(Backend("a", wait), Backend("b", wait)) as made:
        urls = [server.url for server in made.servers]
        route = [sys.executable, "-m", "kvik", "route", *urls, "--port", "0"]
        command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *route]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            line = running.stdout.readline()
            assert "2 servers" in line
            front = SimpleNamespace(port=int(line.split("/v1")[0].rpartition(":")[2]))

            def post(_: int) -> None:
                with suppress(OSError, HTTPException):  # refused
                    ask(front, "POST", CHAT, {"messages": []})

            with ThreadPoolExecutor(40) as pool:
                list(pool.map(post, range(40)))
            metrics = ask(front, "GET", "/metrics").body.decode()
            running.terminate()
            assert running.wait(30) == 0
        errors = re.findall(r"kvik_route_errors_total{.*} (\d+)", metrics)
        assert errors == ["0", "0"]  # no server is blamed


# -- requests that move --------------------------------------------------------------------------

STREAM = b'data: {"text": "a"}\n\n: alive\n\ndata: {": kvik-moved "}\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 1000])
def test_the_mark_of_a_move_is_found_in_any_chunks(size: int) -> None:
    for moved in (b"", b"abc="):
        data = STREAM + (b": kvik-moved " + moved + b"\n\n\n\n" if moved else b"")
        mark, passed = MovedMark(), []
        for start in range(0, len(data), size):
            passed.append(mark.feed(data[start : start + size]))
            if not moved:  # whole events are not held back
                assert b"".join(passed).count(b"\n\n") == data[: start + size].count(b"\n\n")
        assert b"".join(passed) == STREAM
        assert mark.state == (moved or None)


def header_of(scope: Scope, name: str) -> bytes | None:
    return dict(scope["headers"]).get(name.encode())


EVENTS = (b"content-type", b"text/event-stream")


def giving(moved: bytes, *, stream: bool) -> Any:
    """Return a server that gives a request away, and accepts it back without that header."""

    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        if header_of(scope, RESUMED_HEADER) is not None:
            back = header_of(scope, MOVES_HEADER) is None
            await respond(send, 200 if back else 503, b"back", EVENTS)
            return
        assert header_of(scope, MOVES_HEADER) == b"1"
        headers = [EVENTS] if stream else [(MOVED_HEADER.encode(), b"1")]
        status = 200 if stream else 503
        await send({"type": "http.response.start", "status": status, "headers": headers})
        begun = b"data: 1\n\n: kvik-moved " if stream else b""
        for part in (begun + moved[:2], moved[2:] + b"\n\n", *[b"\n"] * 3):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b""})

    return answer


def taking(status: int) -> Any:
    async def answer(backend: Backend, scope: Scope, body: bytes, send: Send) -> None:
        assert header_of(scope, RESUMED_HEADER) is not None
        error = b'{"error": {"message": "another kv_token"}}'
        await respond(send, status, b"rest" if status == 200 else error, EVENTS)

    return answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "rest"), [(200, b"rest"), (409, b"back"), (503, b"back")])
def test_an_answer_continues_at_another_server_or_returns(
    status: int, rest: bytes, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = Backend("a", giving(b"ticket", stream=stream))
    with site(first, Backend("b", taking(status))) as made:
        made.proxy.servers._router.set_available(1, False)  # the request goes to the first server
        choose = made.proxy.servers.choose

        def chosen(request: Any, avoid: Any) -> Any:
            made.proxy.servers._router.set_available(1, True)
            return choose(request, avoid if avoid else [1])

        made.proxy.servers.choose = chosen
        answer = made.post("Where?", stream=stream)
        assert answer.status == 200
        assert answer.body == (b"data: 1\n\n" if stream else b"") + rest
        taken = made.backends[1].requests
        assert header_of(taken[0][0], RESUMED_HEADER) == b"ticket"
        assert taken[0][1] == first.requests[0][1]
        assert made.proxy.moves == 1
        until(lambda: not any(one.unfinished for one in made.proxy.servers.listed))
        url = made.servers[1].url
    warnings = [
        each.getMessage() for each in caplog.records if "cannot continue" in each.getMessage()
    ]
    assert len(warnings) == (status != 200)
    assert all(url in each and "another kv_token" in each for each in warnings)


def test_a_request_finds_a_server_that_is_available_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "HEALTH_SECONDS", 3600.0)  # no look in between
    first, second = Backend("a", replying(503), healthy=False), Backend("b")
    with site(first, second) as made:
        assert made.post("x").json["from"] == "b"
        first.answer, first.healthy = None, True
        second.answer, second.healthy = replying(503), False
        assert [made.post("x").json["from"] for _ in range(2)] == ["a", "a"]
    first, second = Backend("a", taking(200), healthy=False), Backend("b")
    second.answer = giving(b"ticket", stream=True)
    with site(first, second) as made:
        first.healthy = True
        assert made.post("x", stream=True).body == b"data: 1\n\nrest"


def test_clients_cannot_claim_that_a_request_moves() -> None:
    with site(Backend("a")) as made:
        claims = {RESUMED_HEADER: "x", MOVES_HEADER: "1"}
        answer = ask(made.front, "POST", CHAT, {}, **claims)
        assert (answer.status, answer.json) == (200, {"from": "a"})
        (scope, _), *_ = made.backends[0].requests
        assert header_of(scope, RESUMED_HEADER) is header_of(scope, MOVES_HEADER) is None
