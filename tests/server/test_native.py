"""/v1/generate over a real socket."""

from __future__ import annotations

import json

import httpx2
import pytest
from helpers.served_engine import FakeExecutor
from helpers.serving import Served, served

from kvik.server.native import routes


@pytest.fixture(scope="module")
def server():
    with served(routes, FakeExecutor(token=lambda step, row: step % 26)) as serving:
        yield serving
        serving.at_rest()


def post(server: Served, body, **extra) -> httpx2.Response:
    return httpx2.post(f"{server.http.url}/v1/generate", json=body, timeout=30, **extra)


def events(response: httpx2.Response) -> list[dict]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line]


@pytest.mark.parametrize("prompt", ["AB", [0, 1]])
def test_a_response(server, prompt):
    answer = post(server, {"prompt": prompt, "max_tokens": 5, "temperature": 0})
    assert answer.status_code == 200
    body = answer.json()
    assert len(body["text"]) == body["tokens_generated"] == 5
    assert (body["prompt_tokens"], body["finish_reason"]) == (2, "length")
    assert body["latency_ms"] > 0
    expected = 5 / body["latency_ms"] * 1e3
    assert body["tokens_per_second"] == pytest.approx(expected, rel=0.05, abs=0.1)
    assert body["request_id"].startswith("gen-")


def test_a_stream(server):
    answer = post(server, {"prompt": "AB", "max_tokens": 50, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(answer)
    assert all(piece.keys() == {"text"} for piece in pieces)
    assert len("".join(piece["text"] for piece in pieces)) == 50
    assert last["tokens_generated"] == 50
    assert last["finish_reason"] == "length"
    assert "text" not in last


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": "A" * 1000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n_predict": 0}, "n_predict"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop_token_ids": [64]}, "stop_token_ids"),
        ({"cache_salt": "\n"}, "cache_salt"),
        ({"deadline_ms": 10**15}, "deadline_ms"),
    ],
)
def test_errors_name_the_field(server, body, param):
    body = body if param.startswith("prompt") else {"prompt": "A", **body}
    answer = post(server, {**body, "stream": True})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
