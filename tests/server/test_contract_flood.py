"""A flood by one key, as other clients see it over HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers.http_server import ask, until
from helpers.raw_http import connect, post, read_until
from helpers.served_engine import FakeExecutor, gated_executor
from helpers.serving import Served, served

from kvik.server.access import read_keys
from kvik.server.app import openai_routes

BODY: dict[str, Any] = {
    "prompt": [1, 2, 3, 4],
    "max_tokens": 100,
    "ignore_eos": True,
    "stream": True,
}
QUEUE = 32


def send(server: Served, key: str, body: dict[str, Any] = BODY) -> socket.socket:
    connection = connect(server.http.port)
    post(connection, "/v1/completions", body, key=key)
    return connection


@contextmanager
def flooded(executor: FakeExecutor) -> Iterator[Served]:
    """Provide a server with a blocked engine, and as many queued requests as one key may have."""
    executor.gate.clear()
    keys = read_keys(["flood", "other"])
    with served(openai_routes, executor, max_requests=QUEUE, keys=keys, max_num_seqs=4) as server:
        connections = [send(server, "flood") for _ in range(QUEUE)]
        waiting, refused = server.inner.admission, server.inner.watcher.refusals
        until(lambda: waiting.num_waiting + len(refused) == QUEUE)
        try:
            yield server
        finally:
            executor.gate.set()
            for connection in connections:
                connection.close()


def test_a_key_over_its_share_must_wait_and_another_need_not() -> None:
    executor = FakeExecutor()
    with flooded(executor) as server:
        waiting = server.inner.admission.num_waiting
        assert QUEUE / 2 < waiting < QUEUE
        body = {"prompt": [1, 2], "max_tokens": 2}
        for _ in range(3):
            reply = ask(server.http, "POST", "/v1/completions", body, authorization="Bearer flood")
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.headers["x-should-retry"] == "true"
        assert server.inner.admission.num_waiting == waiting
        other = send(server, "other", body)
        until(lambda: server.inner.admission.num_waiting == waiting + 1)
        executor.gate.set()
        assert read_until(other, b"}").startswith(b"HTTP/1.1 200 ")
        watcher = server.inner.watcher
        assert list(watcher.ended).index(watcher.arrived_ids[-1]) < 10  # before most of the flood
        other.close()


def test_each_completion_takes_a_place() -> None:
    executor = gated_executor()
    with served(openai_routes, executor, max_requests=QUEUE, max_num_seqs=4) as server:
        first = send(server, "", {**BODY, "n": 24})
        until(lambda: server.inner.admission.num_waiting == 24)
        for n, status in ((9, 503), (QUEUE, 503), (QUEUE + 1, 400)):
            body = {"prompt": [1], "max_tokens": 1, "n": n}
            reply = ask(server.http, "POST", "/v1/completions", body)
            assert reply.status == status
        assert reply.error["param"] == "n"
        several = {"prompt": [[1]] * (QUEUE + 1), "max_tokens": 1}
        assert ask(server.http, "POST", "/v1/completions", several).error["param"] == "prompt"
        inputs = {"input": [[1]] * (QUEUE + 1)}
        assert ask(server.http, "POST", "/v1/embeddings", inputs).error["param"] == "input"
        refusals = [reason for _, reason in server.inner.watcher.refusals]
        assert refusals == ["queue", "queue", "invalid", "invalid", "invalid"]
        executor.gate.set()
        assert b"[DONE]" in read_until(first, b"[DONE]")
        assert ask(server.http, "POST", "/v1/completions", {**body, "n": 9}).status == 200
        first.close()


def test_the_queue_is_bounded_in_tokens() -> None:
    executor = gated_executor()
    with served(openai_routes, executor, max_requests=QUEUE, max_num_seqs=4) as server:
        server.parts.admission._max_tokens = 500
        first = send(server, "", {"prompt": [1] * 200, "max_tokens": 1, "n": 2})
        until(lambda: server.inner.admission.waiting_tokens == 400)
        long, short = ({"prompt": [1] * count, "max_tokens": 1} for count in (200, 50))
        refused = ask(server.http, "POST", "/v1/completions", long)
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        executor.gate.set()
        assert ask(server.http, "POST", "/v1/completions", short).status == 200
        read_until(first, b'"usage"')
        first.close()
