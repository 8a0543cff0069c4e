"""Answers if the engine fails, before and after they have begun."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx2
import openai
import pytest
from helpers.http_server import ask
from helpers.served_engine import FakeExecutor
from helpers.serving import served
from helpers.story_site import Site
from openai.types.responses import ResponseErrorEvent

from kvik.errors import GroupLost
from kvik.server.app import openai_routes
from kvik.text.tokenizer import Tokenizer

LONG = {"max_tokens": 300, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], **LONG}
TEXT = {"prompt": "Once upon a time", **LONG}
# An answer of more than 60 tokens.
STORY = {"type": "json_schema", "name": "x", "schema": {"type": "string", "minLength": 800}}
SECRET = "a secret of the machine"
ROUTES = [("chat/completions", CHAT), ("completions", TEXT)]


@pytest.fixture(autouse=True)
def healthy(http: httpx2.Client) -> None:
    """An engine whose steps fail several times in a row is abandoned."""
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def fail_at(site: Site, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the engine's step of this number from now fail."""
    executor, count = site.engine.executor, [0]
    submit = executor.submit

    def failing(plan: Any) -> object:
        count[0] += 1
        if count[0] == step:
            raise RuntimeError(SECRET)
        return submit(plan)

    monkeypatch.setattr(executor, "submit", failing)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_before_the_first_token_it_has_its_own_status(
    site: Site,
    http: httpx2.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    """It has the id under which the reason is logged, not the reason."""
    fail_at(site, monkeypatch, 1)
    answer = http.post(f"/v1/{path}", json={**body, "stream": stream})
    assert answer.status_code == 500, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert SECRET not in answer.text
    found = re.fullmatch(r"the engine failed in this request \((gen-\w+)\)", error["message"])
    assert found and any(found[1] in line and SECRET in line for line in caplog.messages)
    site.at_rest()


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_in_a_stream_it_is_one_event_and_the_end(
    site: Site,
    http: httpx2.Client,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    fail_at(site, monkeypatch, 60)
    answer = http.post(f"/v1/{path}", json={**body, "stream": True, "n": 2})
    assert answer.status_code == 200
    events = [json.loads(e.removeprefix("data: ")) for e in answer.text.split("\n\n") if e]
    assert "[DONE]" not in answer.text and SECRET not in answer.text
    assert set(events[-1]) == {"error"}
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert events[-1]["error"]["code"] == "engine_error"
    assert all("choices" in event for event in events[:-1])
    assert len(events) > 2
    site.at_rest()


def test_in_a_stream_of_a_response_it_is_an_event_of_this_api(
    site: Site, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(site, monkeypatch, 60)
    body = {"input": "Hi", "stream": True, "temperature": 0, "text": {"format": STORY}}
    answer = http.post("/v1/responses", json=body)
    events = [json.loads(e.partition("data: ")[2]) for e in answer.text.split("\n\n") if e]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert f"event: {events[-1]['type']}\n" in answer.text
    last = ResponseErrorEvent.model_validate(events[-1], strict=True)
    assert last.code == "engine_error" and last.message == events[-1]["error"]["message"]
    site.at_rest()


def test_the_client_raises_the_error_of_the_stream(
    site: Site, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(site, monkeypatch, 60)
    asked: Any = {"model": "stories", "prompt": "Once", "max_tokens": 300, "stream": True}
    with pytest.raises(openai.APIError):
        for _ in client.completions.create(**asked, extra_body={"ignore_eos": True}):
            pass
    fail_at(site, monkeypatch, 60)
    asked = {"model": "stories", "input": "Hi", "text": {"format": STORY}, "stream": True}
    with pytest.raises(openai.APIError, match="the engine failed"):
        for _ in client.responses.create(**asked):
            pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_rank_is_named(stream: bool) -> None:
    """Other information from an ending engine is only logged."""

    class Lossy(FakeExecutor):
        def submit(self, plan: Any) -> object:
            if plan.step == 3:
                self.lost = "rank 1 has ended with signal 9"
                raise GroupLost("tensor_parallel_size", self.lost)
            return super().submit(plan)

    with served(openai_routes, Lossy()) as server:
        body = {"prompt": [1, 2], "max_tokens": 9, "stream": stream}
        answer = ask(server.http, "POST", "/v1/completions", body)
    if stream:
        *_, last = (event for event in answer.body.decode().split("\n\n") if event)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert re.fullmatch(
            r"the engine failed in this request \(gen-\w+\): rank 1 has ended with signal 9",
            error["message"],
        )
    else:
        assert (answer.status, answer.headers["x-should-retry"]) == (503, "true")
        error = answer.error
        assert error["message"].startswith("the engine failed (rank 1 has ended with signal 9)")
    assert error["code"] == "engine_error"


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_time_in_the_tokenizer_counts_towards_the_deadline(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    encode = Tokenizer.encode

    def slow(tokenizer: Tokenizer, *args: Any) -> list[int]:
        time.sleep(0.3)
        return encode(tokenizer, *args)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    asked = {**body, "max_tokens": 1, "deadline_ms": 250}
    assert http.post(f"/v1/{path}", json=asked).status_code in (503, 504)
