"""The routes of llama.cpp's server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.http_server import ask
from helpers.served_engine import FakeExecutor
from helpers.serving import Served, served

from kvik.config.server_config import ServerConfig
from kvik.server import anthropic
from kvik.server.app import openai_routes
from kvik.server.llama_server import routes
from kvik.server.route import Route
from kvik.server.server import Server
from kvik.text.infill import Markers

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    executor = FakeExecutor(token=lambda step, row: step % 26)
    with served(routes, executor, template=TEMPLATE) as serving:
        yield serving
        serving.at_rest()


def complete(server: Served, body: dict[str, Any]) -> dict[str, Any]:
    reply = ask(server.http, "POST", "/completion", body)
    assert reply.status == 200, reply.body
    return reply.json


@pytest.mark.parametrize("prompt", ["AB", [0, 1]])
def test_a_response(server: Served, prompt: Any) -> None:
    body = {"prompt": prompt, "n_predict": 5, "top_k": 3, "return_tokens": True}
    answer = complete(server, body)
    assert len(answer["content"]) == len(answer["tokens"]) == answer["tokens_predicted"] == 5
    assert (answer["prompt"], answer["tokens_evaluated"]) == ("AB", 2)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["model"], answer["truncated"], answer["has_new_line"]) == (
        "letters",
        False,
        False,
    )
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["top_k"], settings["repeat_penalty"]) == (5, 3, 1.0)
    timings = answer["timings"]
    assert timings["prompt_n"] + answer["tokens_cached"] == 2
    assert timings["predicted_n"] == 5 and timings["prompt_ms"] > 0


def test_a_gap_is_filled(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = Markers("X", "Y", "Z", files=("W",))
    monkeypatch.setattr("kvik.text.infill.FAMILIES", (markers,))
    room = server.parts.max_model_len - 3
    gap = {"input_prefix": "AB", "input_suffix": "CD", "prompt": "E", "n_predict": 3}
    other = {"filename": "F.", "text": "GH"}
    for extra, prompt, truncated in (
        ([], "XABYCDZE", False),
        ([other], "WF.GHWXABYCDZE", False),
        ([{"text": "a" * room}, other], "WF.GHWXABYCDZE", True),
    ):
        reply = ask(server.http, "POST", "/infill", {**gap, "input_extra": extra})
        assert reply.status == 200, reply.body
        assert (reply.json["prompt"], reply.json["truncated"]) == (prompt, truncated)
        assert reply.json["tokens_predicted"] == len(reply.json["content"]) == 3
    editor = {"id_slot": 0, "top_k": 40, "samplers": ["top_k", "infill"], "cache_prompt": True}
    editor |= {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 4, "stop": []}
    reply = ask(server.http, "POST", "/infill", {**gap, **editor, "response_fields": ["content"]})
    assert reply.status == 200 and "samplers" in reply.headers["x-kvik-ignored-fields"]
    reply = ask(server.http, "POST", "/infill", {**gap, "stream": True})
    assert reply.status == 200 and b'"stop":true' in reply.body
    for change, name in (
        ({"input_prefix": "", "input_suffix": ""}, "input_prefix"),
        ({"input_suffix": "a" * (room + 3)}, "input_prefix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
    ):
        reply = ask(server.http, "POST", "/infill", {**gap, **change})
        assert (reply.status, reply.error["param"]) == (400, name)


def test_a_model_without_a_tokenizer(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.parts.texts, "tokenizer", None)
    answer = complete(server, {"prompt": [0, 1], "n_predict": 2, "return_tokens": True})
    assert (answer["prompt"], len(answer["tokens"])) == ("", 2)


def test_a_stream(server: Served) -> None:
    body = {"prompt": "AB", "n_predict": 20, "stream": True, "return_tokens": True, "seed": -1}
    text = ask(server.http, "POST", "/completion", body).body.decode()
    *pieces, last = [json.loads(line[6:]) for line in text.split("\n\n") if line]
    assert all(not piece["stop"] for piece in pieces)
    assert len("".join(piece["content"] for piece in pieces)) == 20
    assert sum(len(piece["tokens"]) for piece in pieces) == pieces[-1]["tokens_predicted"] == 20
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 20)
    assert last["generation_settings"]["seed"] == -1


def test_the_reason_of_the_end(server: Served) -> None:
    answer = complete(server, {"prompt": "A", "stop": ["D"], "n_predict": 100})
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", "D")
    answer = complete(server, {"prompt": "A", "stop_token_ids": [3]})
    assert (answer["stop_type"], answer["stopping_word"]) == ("eos", "")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_computed_for_the_cache_alone(server: Served, stream: bool) -> None:
    prompt = "Q" * 40
    body = {"prompt": prompt, "n_predict": 0, "return_tokens": True, "stream": stream}
    reply = ask(server.http, "POST", "/completion", body)
    answer = json.loads(reply.body.decode().removeprefix("data: "))  # the only event of a stream
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
    assert (answer["stop_type"], answer["timings"]["predicted_n"]) == ("limit", 0)
    assert answer["generation_settings"]["n_predict"] == 0
    assert complete(server, {"prompt": prompt, "n_predict": 1})["tokens_cached"] > 0


@pytest.mark.parametrize("body", [{}, {"n_predict": -1}, {"max_tokens": -1}])
def test_without_a_limit_it_fills_the_context(server: Served, body: dict[str, int]) -> None:
    answer = complete(server, {"prompt": "AB", "ignore_eos": True, **body})
    assert answer["tokens_predicted"] == server.parts.max_model_len - 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["A", "B"]}, "prompt[0]"),
        ({"prompt": "A", "n_predict": 5, "max_tokens": 6}, "max_tokens"),
        ({"prompt": "A", "n_probs": 5}, "n_probs"),
        ({"prompt": "A", "grammar": "root ::= x"}, "grammar"),
        ({"prompt": "A", "model": "other"}, "model"),
    ],
)
def test_bad_input(server: Served, body: dict[str, Any], param: str) -> None:
    reply = ask(server.http, "POST", "/completion", body)
    assert reply.status == (404 if param == "model" else 400)
    assert reply.error["param"] == param


def test_a_conversation_is_rendered(server: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    assert ask(server.http, "POST", "/apply-template", body).json == {"prompt": "<user>Hi<bot>"}
    body["add_generation_prompt"] = False
    assert ask(server.http, "POST", "/apply-template", body).json == {"prompt": "<user>Hi"}
    reply = ask(server.http, "POST", "/apply-template", {**body, "tools": [{}]})
    assert (reply.status, reply.error["param"]) == (400, "tools")


def test_properties(server: Served) -> None:
    facts = ask(server.http, "GET", "/props").json
    assert facts["chat_template"] == TEMPLATE
    assert (facts["total_slots"], facts["model_alias"]) == (8, "letters")
    defaults = facts["default_generation_settings"]
    assert defaults["n_ctx"] == server.parts.max_model_len
    assert defaults["params"]["temperature"] == 1.0


def test_any_name_of_the_model() -> None:
    def both(parts: Server) -> list[Route]:
        return [*openai_routes(parts), *anthropic.routes(parts), *routes(parts)]

    config = ServerConfig(any_model_name=True)
    talk = {"messages": [{"role": "user", "content": "A"}]}
    with served(both, server_config=config, template=TEMPLATE) as server:
        for path, asking in (
            ("/v1/completions", {"prompt": "A"}),
            ("/completion", {"prompt": "A"}),
            ("/v1/chat/completions", talk),
            ("/v1/messages", talk),
        ):
            for asked, answered in (("gpt-4o", "gpt-4o"), ("letters", "letters"), ("", "letters")):
                body = {**asking, "max_tokens": 1, "model": asked}
                assert ask(server.http, "POST", path, body).json["model"] == answered
        assert ask(server.http, "GET", "/v1/models/gpt-4o").json["id"] == "gpt-4o"
        assert [one["id"] for one in ask(server.http, "GET", "/v1/models").json["data"]] == [
            "letters"
        ]
        server.at_rest()
