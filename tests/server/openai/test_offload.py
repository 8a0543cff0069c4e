"""Long work is done outside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import pytest

from kvik.server import responses as module
from kvik.server.openai import chat, completions, conversation, embeddings, responses, tokenize
from kvik.server.responses import offload
from kvik.server.stored_responses import ResponseStore

TALK = {"messages": [{"role": "user", "content": "A dog"}] * 3, "max_tokens": 4}
ASKED = {"input": "A dog", "max_output_tokens": 4, "seed": 0}
ASKED["include"] = ["message.output_text.logprobs"]


def test_long_work_is_done_in_a_thread() -> None:
    async def threads() -> list[threading.Thread]:
        sizes = (module.INLINE_ITEMS, module.INLINE_ITEMS + 1)
        return [await offload(size, threading.current_thread) for size in sizes]

    brief, much = asyncio.run(threads())
    assert brief is threading.current_thread()
    assert much is not brief


@pytest.mark.parametrize(
    ("place", "name", "path", "body"),
    [
        (
            chat.ChatFormat,
            "complete",
            "/v1/chat/completions",
            {**TALK, "logprobs": True, "top_logprobs": 2},
        ),
        (chat.ChatFormat, "complete", "/v1/chat/completions", {**TALK, "prompt_logprobs": 1}),
        (
            completions.CompletionFormat,
            "complete",
            "/v1/completions",
            {"prompt": "A dog", "logprobs": 2, "max_tokens": 4},
        ),
        (
            completions.CompletionFormat,
            "_first_choice",
            "/v1/completions",
            {"prompt": "A dog", "echo": True, "logprobs": 2, "stream": True},
        ),
        (responses.ResponseEvents, "complete", "/v1/responses", ASKED),
        (responses.ResponseEvents, "end", "/v1/responses", {**ASKED, "stream": True}),
        (completions, "_echo", "/v1/completions", {"prompt": [5, 6, 7], "echo": True}),
        (conversation, "_plain", "/v1/chat/completions", TALK),
        (conversation, "_plain", "/tokenize", {"messages": TALK["messages"]}),
        (embeddings, "normalise", "/v1/embeddings", {"input": "A dog"}),
        (
            tokenize.TokenNames,
            "name",
            "/tokenize",
            {"prompt": "A big dog", "return_token_strs": True},
        ),
    ],
)
def test_which_work_this_is(
    http: httpx2.Client,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    path: str,
    body: dict[str, Any],
) -> None:
    seen = []
    genuine = getattr(place, name)

    def watched(*arguments: Any) -> Any:
        seen.append(threading.current_thread().name)
        return genuine(*arguments)

    monkeypatch.setattr(module, "INLINE_ITEMS", 2)
    monkeypatch.setattr(place, name, watched)
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert seen and "http-server" not in seen


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_by_the_event_loop(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    seen, genuine = [], ResponseStore.add

    def add(*arguments: Any) -> None:
        seen.append(threading.current_thread().name)
        genuine(*arguments)

    monkeypatch.setattr(module, "INLINE_ITEMS", 2)
    monkeypatch.setattr(ResponseStore, "add", add)
    assert http.post("/v1/responses", json={**ASKED, "stream": stream}).status_code == 200
    assert seen == ["http-server"]
