"""Figures of drafts in answers, from the engine through every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from helpers.drafting import CHECK, MAKING, PLAIN, DraftingExecutor, drafting_config
from helpers.serving import Served, served

from kvik.server import native
from kvik.server.app import openai_routes
from kvik.server.native import Generated
from kvik.server.openai.chat import ChatCompletion
from kvik.server.openai.completions import Completion
from kvik.server.route import Route
from kvik.server.server import Server

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "AB"}]}
KINDS = {
    "/v1/generate": ({"prompt": "AB"}, Generated),
    "/v1/completions": ({"prompt": "AB"}, Completion),
    "/v1/chat/completions": (CHAT, ChatCompletion),
}
# The first of 16 tokens comes with the prompt; each check accepts two drafts.
CHECKS, TOKENS = 5, 16
ONE = {
    "checks": CHECKS,
    "drafted_tokens": 18,
    "accepted_tokens": 10,
    "drafted_per_position": [5, 5, 4, 4],
    "accepted_per_position": [5, 5, 0, 0],
    "mean_accepted_length": 3.0,
    "speedup": (TOKENS - 1) * PLAIN / (CHECKS * (MAKING + CHECK)),
}


def table(parts: Server) -> list[Route]:
    return [*native.routes(parts), *openai_routes(parts)]


@pytest.fixture(scope="module")
def guessing() -> Iterator[Served]:
    executor = DraftingExecutor(lambda step, row: step % 26, right=lambda row: 2)
    with served(table, executor, template=TEMPLATE, config=drafting_config()) as serving:
        yield serving
        serving.at_rest()


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with served(table, template=TEMPLATE) as serving:
        yield serving


def post(server: Served, path: str, **more: object) -> httpx2.Response:
    body = {**KINDS[path][0], "max_tokens": TOKENS, "ignore_eos": True, **more}
    answer = httpx2.post(server.http.url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def last(answer: httpx2.Response) -> dict[str, Any]:
    """Return the event with the usage."""
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return json.loads(events[-1])


def usage(path: str, body: dict[str, Any]) -> dict[str, Any]:
    return body if path == "/v1/generate" else body["usage"]


@pytest.mark.parametrize("path", KINDS)
def test_an_answer_reports_its_drafts(guessing, path):
    answer = post(guessing, path)
    whole = usage(path, answer.json())
    assert whole["speculation"] == ONE
    msgspec.json.decode(answer.content, type=KINDS[path][1])  # matches the schema
    options = {} if path == "/v1/generate" else {"stream_options": {"include_usage": True}}
    assert usage(path, last(post(guessing, path, stream=True, **options)))["speculation"] == ONE
    if path != "/v1/generate":
        assert whole["completion_tokens_details"] == {
            "accepted_prediction_tokens": 10,
            "rejected_prediction_tokens": 8,
        }


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_its_usage_without_the_drafts(guessing, stream):
    body = {"input": "AB", "max_output_tokens": TOKENS, "stream": stream}
    answer = httpx2.post(guessing.http.url + "/v1/responses", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    whole = answer.json() if not stream else last(answer)["response"]
    assert whole["usage"]["output_tokens"] == TOKENS
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_counts_are_of_all_choices(guessing):
    found = usage("/v1/completions", post(guessing, "/v1/completions", n=2).json())["speculation"]
    for name in ("checks", "drafted_tokens", "accepted_tokens"):
        assert found[name] == 2 * ONE[name]
    assert found["accepted_per_position"] == [10, 10, 0, 0]
    assert found["mean_accepted_length"] == 3.0


@pytest.mark.parametrize("path", KINDS)
def test_a_request_can_disable_drafts(guessing, path):
    found = usage(path, post(guessing, path, speculation=False).json())
    assert not {"speculation", "completion_tokens_details"} & found.keys()
    assert usage(path, post(guessing, path, speculation=True).json())["speculation"] == ONE


@pytest.mark.parametrize("path", KINDS)
def test_an_engine_without_speculation_shows_none(plain, path):
    assert "speculation" not in usage(path, post(plain, path).json())
