"""/tokenize, /detokenize, /tokenizer_info and the list of models."""

from __future__ import annotations

import anthropic
import httpx2
import openai
import pytest
from helpers.story_site import Site

from kvik.llm import LLM

TEXT = "The dog 🐕 <|end|> barked."
TALK = [{"role": "user", "content": "Hi"}]


def test_a_round_trip(http: httpx2.Client, llm: LLM) -> None:
    answer = http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == llm.tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert answer["token_strs"][0] == "The"
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": TEXT, "content": TEXT}


def test_the_fields_of_llama_cpp(http: httpx2.Client, llm: LLM) -> None:
    for special in (False, True):
        body = {"content": TEXT, "add_special": special}
        expected = llm.tokenizer.encode(TEXT, add_special_tokens=special)
        assert http.post("/tokenize", json=body).json()["tokens"] == expected


def test_an_empty_text_has_no_tokens(http: httpx2.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json()["prompt"] == ""


def test_a_conversation_is_tokenised_as_for_a_chat(http: httpx2.Client, llm: LLM) -> None:
    answer = http.post("/tokenize", json={"messages": TALK}).json()
    rendered = llm.render_chat(TALK)
    assert answer["tokens"] == llm.tokenizer.encode(rendered, add_special_tokens=False)
    chat = http.post("/v1/chat/completions", json={"messages": TALK, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    without = {"messages": TALK, "add_generation_prompt": False}
    assert http.post("/tokenize", json=without).json()["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": TALK}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special": True}, "add_special"),
        ("tokenize", {"content": "a b " * 1_000_000}, "content"),
        ("tokenize", {"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ("tokenize", {"messages": TALK, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("detokenize", {"tokens": [2048]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [1] * 513}, "tokens"),
    ],
)
def test_bad_input(http: httpx2.Client, path: str, body: object, param: str) -> None:
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition("[")[0] == param


def test_tokenizer_info(http: httpx2.Client, llm: LLM) -> None:
    answer = http.get("/tokenizer_info").json()
    assert answer["eos_token"] == llm.tokenizer.eos_token
    assert answer["chat_template"] == llm.tokenizer.chat_template
    assert "<|end|>" in answer["special_tokens"]


def test_models(client: openai.OpenAI, site: Site) -> None:
    listed = list(client.models.list())
    assert [one.id for one in listed] == ["stories", "org/stories"]
    assert listed[0].object == "model" and listed[0].created == site.parts.started > 0
    assert client.models.retrieve("stories").id == "stories"
    extra = client.models.retrieve("org/stories").model_extra
    assert extra.items() >= {"root": "stories", "parent": None, "max_model_len": 512}.items()
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("../stories")
    assert caught.value.code == "model_not_found"


def test_models_for_the_other_client(site: Site) -> None:
    with anthropic.Anthropic(base_url=site.url, api_key="none", max_retries=0) as client:
        listed = list(client.models.list())
        one = client.models.retrieve("org/stories")
    assert [model.id for model in listed] == ["stories", "org/stories"]
    assert (one.type, one.display_name, one.lifecycle) == ("model", "org/stories", "active")
    assert int(one.created_at.timestamp()) == site.parts.started
