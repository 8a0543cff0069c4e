"""Reactions of real clients to each error: they retry exactly where that may help."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from helpers.http_server import HttpServer, http_server
from helpers.served_engine import gated_executor
from helpers.serving import Served, served
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.server_config import ServerConfig
from kvik.errors import (
    CapacityError,
    KvikError,
    Overflow,
    OverloadError,
    ParamError,
    UnavailableError,
)
from kvik.server.access import Keys
from kvik.server.app import App, openai_routes
from kvik.server.errors import HttpError, aborted, deadline_exceeded, failed, model_not_found
from kvik.server.route import Route
from kvik.server.server import Drain

# name -> how it is raised, its status, and whether a client should retry
ERRORS: dict[str, tuple[Callable[[], Exception], int, bool]] = {
    "param": (lambda: ParamError("top_p", "must be in (0, 1]"), 400, False),
    "long": (lambda: ParamError("prompt", "is too long", overflow=Overflow(8, 9)), 400, False),
    "capacity": (lambda: CapacityError("n", "never fits"), 400, False),
    "other": (lambda: KvikError("field", "is wrong"), 400, False),
    "key": (lambda: HttpError(401, "no key"), 401, False),
    "model": (lambda: model_not_found("gpt-9", ["m"]), 404, False),
    "late": (lambda: HttpError(408, "the body is late"), 408, False),
    "large": (lambda: HttpError(413, "too large"), 413, False),
    "kind": (lambda: HttpError(415, "not JSON"), 415, False),
    "share": (lambda: OverloadError("queue", "your share", 1.2, of_caller=True), 429, True),
    "queue": (lambda: OverloadError("queue", "is full", 0.7, of_caller=False), 503, True),
    "starting": (lambda: UnavailableError("engine", "is being loaded"), 503, True),
    "stopped": (lambda: aborted("the server is being stopped", retry=True), 503, True),
    "aborted": (lambda: aborted("an operator ended it", retry=False), 503, False),
    "engine": (lambda: failed("gen-1"), 500, False),
    "deadline": (deadline_exceeded, 504, False),
    "bug": (lambda: RuntimeError("a bug"), 500, False),
}
SAID: Any = {"role": "user", "content": "Hi"}
SECONDS = {"share": 2.0, "queue": 1.0, "starting": 1.0, "stopped": 1.0}  # of Retry-After


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.fixture(scope="module")
def server(seen: Counter[str]) -> Iterator[HttpServer]:
    async def refuse(request: Request) -> Response:
        which = request.path_params["which"]
        seen[which] += 1
        raise ERRORS[which][0]()

    paths = ("/{which}/chat/completions", "/{which}/v1/messages")
    routes = [Route(path, refuse) for path in paths]
    with http_server(App(routes, Keys(), Drain(), ServerConfig(host=""))) as running:
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which clients would have waited; they go on at once."""
    found: list[float] = []
    clock = SimpleNamespace(**{**vars(time), "sleep": found.append})
    for library in ("openai", "anthropic"):
        monkeypatch.setattr(f"{library}._base_client.time", clock)
    return found


def call_openai(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="x", max_retries=1) as client:
        client.chat.completions.create(model="m", messages=[SAID])


def call_anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=1) as client:
        client.messages.create(model="m", messages=[SAID], max_tokens=1)


@pytest.mark.parametrize(
    ("call", "which"),
    [
        *((call_openai, which) for which in ERRORS),
        *((call_anthropic, which) for which in ("param", "share", "engine", "deadline")),
    ],
)
def test_each_client_retries_where_that_may_help(
    server: HttpServer,
    seen: Counter[str],
    waits: list[float],
    call: Callable[[str], None],
    which: str,
) -> None:
    seen.clear()
    _, status, again = ERRORS[which]
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        call(f"{server.url}/{which}")
    assert caught.value.status_code == status
    assert seen[which] == (2 if again else 1)
    assert sum(waits) == SECONDS.get(which, 0.0)


def by_an_operator(server: Served) -> None:
    generations = server.inner.generations
    (request_id,) = generations.live
    assert generations.abort(request_id) and not generations.abort("unknown")


def with_the_server(server: Served) -> None:
    server.inner.generations.abort_all("the server is being stopped")


@pytest.mark.parametrize(("end", "again"), [(by_an_operator, False), (with_the_server, True)])
def test_requests_ended_from_outside(
    waits: list[float], end: Callable[[Served], None], again: bool
) -> None:
    """Requests ended by an operator are not sent again; those that end with the server are, and
    succeed on another server."""
    executor = gated_executor()

    def act() -> None:
        while not server.inner.generations.live:
            time.sleep(0.01)
        server.http.call(_now(end, server))
        executor.gate.set()

    with served(openai_routes, executor) as server:
        client = openai.OpenAI(base_url=f"{server.http.url}/v1", api_key="x", max_retries=2)
        thread = threading.Thread(target=act)
        thread.start()
        asked: Any = {"model": "letters", "prompt": [1, 2], "max_tokens": 3}
        with client:
            if again:
                assert client.completions.create(**asked).usage
                assert waits == [1.0]  # the time of Retry-After
            else:
                with pytest.raises(openai.InternalServerError) as caught:
                    client.completions.create(**asked)
                assert (caught.value.status_code, caught.value.code) == (503, "aborted")
        thread.join()
        assert len(server.inner.watcher.arrived_ids) == 1 + again


async def _now(end: Callable[[Served], None], server: Served) -> None:
    end(server)


def test_a_retry_may_reach_another_server_than_the_drained_one() -> None:
    """A balancer of connections decides anew only for a new one."""
    with served(openai_routes) as server, httpx2.Client(base_url=server.http.url) as client:
        assert "connection" not in client.get("/v1/models").headers
        server.parts.drain.start()
        answer = client.get("/v1/models")
        assert (answer.status_code, answer.headers["connection"]) == (503, "close")


def test_requests_to_a_drained_server_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(openai_routes) as server:
        drain = server.parts.drain
        drain.start()
        clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: drain.stop()})
        monkeypatch.setattr("openai._base_client.time", clock)
        client = openai.OpenAI(base_url=f"{server.http.url}/v1", api_key="x", max_retries=2)
        with client:
            answer = client.completions.create(model="letters", prompt=[1, 2], max_tokens=3)
        assert answer.usage and answer.usage.completion_tokens == 3
