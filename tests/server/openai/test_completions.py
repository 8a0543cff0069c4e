"""/v1/completions through OpenAI's client."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from helpers.story_site import MAX_MODEL_LEN, Site

from kvik.engine import wire
from kvik.llm import LLM

MODEL = "stories"
TEXT = "Once upon a time there was a small"


@pytest.fixture
def complete(client: openai.OpenAI) -> Any:
    """Return a function that calls the route with the model and a prompt."""
    return partial(client.completions.create, model=MODEL, prompt=TEXT)


def test_greedy_text_is_that_of_the_library(complete: Any, llm: LLM) -> None:
    answer = complete(temperature=0, max_tokens=40)
    params = llm.default_params.with_changes(temperature=0.0, max_tokens=40)
    (expected,) = llm.generate(TEXT, params)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == expected.num_output_tokens


def test_a_seed_draws_as_in_the_library(complete: Any, llm: LLM) -> None:
    answer = complete(seed=11, max_tokens=30, extra_body={"top_k": 50, "min_p": 0.01})
    changes: Any = {"seed": 11, "max_tokens": 30, "top_k": 50, "min_p": 0.01}
    assert (
        answer.choices[0].text
        == llm.generate(TEXT, llm.default_params.with_changes(**changes))[0].text
    )


def test_the_default_limit_is_sixteen_tokens(complete: Any) -> None:
    answer = complete(extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("kind", ["texts", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_with_many_choices(complete: Any, llm: LLM, kind: str, stream: bool) -> None:
    """The choices of the first prompt come first, for all forms of prompts."""
    texts = [TEXT, "The cat sat", "Tom and Sue went to the park"]
    prompts: Any = texts if kind == "texts" else [llm.tokenizer.encode(text) for text in texts]
    asked: Any = {"n": 2, "seed": 3, "max_tokens": 10}
    alone = [complete(prompt=text, **asked).choices for text in texts]
    expected = [choice.text for choices in alone for choice in choices]
    if not stream:
        choices = complete(prompt=prompts, **asked).choices
        assert [choice.index for choice in choices] == list(range(6))
        assert [choice.text for choice in choices] == expected
        return
    grown, ended = [""] * 6, set()
    for chunk in complete(prompt=prompts, stream=True, **asked):
        for choice in chunk.choices:
            grown[choice.index] += choice.text
            if choice.finish_reason:
                ended.add(choice.index)
    assert grown == expected and ended == set(range(6))


@pytest.mark.parametrize("stream", [False, True])
def test_echo(complete: Any, stream: bool) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 8}
    text = complete(**asked).choices[0].text
    if stream:
        chunks = complete(**asked, echo=True, stream=True)
        assert "".join(c.choices[0].text for c in chunks) == TEXT + text
    else:
        assert complete(**asked, echo=True).choices[0].text == TEXT + text


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echoed_logprobs_are_the_prompts_own(complete: Any, llm: LLM, max_tokens: int) -> None:
    """The form in which benchmarks score texts."""
    ids = llm.tokenizer.encode(TEXT)
    answer = complete(prompt=[ids], echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)
    shown = answer.choices[0].logprobs
    lengths = {len(shown.token_logprobs), len(shown.tokens), len(shown.text_offset)}
    assert lengths == {len(ids) + max_tokens} == {len(shown.top_logprobs)}
    assert shown.token_logprobs[0] is None and shown.top_logprobs[0] is None
    (scored,) = llm.score([ids], top=2)
    expected = [one.logprob for one in scored.prompt_logprobs if one is not None]
    assert shown.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-4)
    for token, value, top in zip(
        shown.tokens[1:], shown.token_logprobs[1:], shown.top_logprobs[1:], strict=True
    ):
        assert top is not None and top[token] == value
        assert 2 <= len(top) <= 3
    text = answer.choices[0].text
    assert text.startswith(TEXT)
    for begin, token in zip(shown.text_offset, shown.tokens, strict=True):
        assert text[begin : begin + len(token)] == token


def test_nothing_is_generated_with_max_tokens_0(complete: Any) -> None:
    answer = complete(echo=True, max_tokens=0)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 0


def test_logprobs_of_a_stream_join_to_those_of_the_response(complete: Any) -> None:
    asked: Any = {
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": 1,
    }
    whole = complete(**asked).choices[0].logprobs
    tokens: list[str] = []
    offsets: list[int] = []
    for chunk in complete(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            tokens += chunk.choices[0].logprobs.tokens or []
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert tokens == whole.tokens and offsets == whole.text_offset


@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_echoes_its_prompt_like_a_response(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, max_tokens: int, at_once: int
) -> None:
    """In the first chunk of each choice, in however many parts the engine sends it."""
    monkeypatch.setattr(wire, "MAX_VALUES", at_once)
    body: dict[str, Any] = {
        "prompt": [TEXT, "The cat"],
        "n": 1 if max_tokens == 0 else 2,
        "seed": 3,
        "echo": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "max_tokens": max_tokens,
    }
    whole = http.post("/v1/completions", json=body).json()["choices"]
    lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    chunks = [choice for event in events for choice in event["choices"]]
    assert lines[-2] == "data: [DONE]"
    for expected in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
        assert "".join(chunk["text"] for chunk in mine) == expected["text"]
        assert mine[0]["text"] == body["prompt"][expected["index"] // body["n"]]
        assert mine[0]["prompt_logprobs"] == expected["prompt_logprobs"]
        assert not any("prompt_logprobs" in chunk for chunk in mine[1:])
        shown = [chunk["logprobs"] for chunk in mine if chunk["logprobs"]]
        assert shown[0]["token_logprobs"][0] is None and len(shown[0]["tokens"]) > 1
        for name, values in expected["logprobs"].items():
            assert [value for one in shown for value in one[name]] == values, name


def test_bytes_of_a_character_are_escaped(complete: Any, llm: LLM) -> None:
    """A character of several tokens: their bytes join, and offsets count characters."""
    text = "a 🐕 b"
    ids = llm.tokenizer.encode(text)
    answer = complete(prompt=ids, echo=True, logprobs=0, max_tokens=0)
    shown = answer.choices[0].logprobs
    escaped = [token for token in shown.tokens if token.startswith("bytes:")]
    assert "".join(escaped).replace("bytes:", "") == "\\xf0\\x9f\\x90\\x95"
    assert answer.choices[0].text == text
    assert shown.text_offset[-1] == text.index(" b")
    assert shown.top_logprobs is None


def test_a_banned_word_and_a_bias(complete: Any, llm: LLM) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 12}
    text = complete(**asked).choices[0].text
    word = text.split()[0]
    banned = complete(**asked, extra_body={"bad_words": [word]})
    assert word not in banned.choices[0].text.split()[:1]
    token = llm.tokenizer.encode(" dog")[0]
    biased = complete(**asked, logit_bias={str(token): 100})
    assert biased.choices[0].text == llm.tokenizer.decode([token] * 12)
    allowed = complete(**asked, extra_body={"allowed_token_ids": [token]})
    assert set(llm.tokenizer.encode(allowed.choices[0].text)) <= {token}


def test_min_tokens_and_ignore_eos(complete: Any) -> None:
    answer = complete(max_tokens=30, extra_body={"min_tokens": 30})
    assert answer.usage.completion_tokens == 30


def test_a_disconnected_reader_frees_everything(site: Site) -> None:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=MODEL,
            prompt=[TEXT, TEXT + " dog"],
            n=2,
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    site.at_rest()


def test_prompt_logprobs(http: httpx2.Client) -> None:
    body = {"prompt": [TEXT, "The cat"], "max_tokens": 1, "prompt_logprobs": 0}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    for choice in choices:
        assert choice["prompt_logprobs"][0] is None
        assert all(len(entry) == 1 for entry in choice["prompt_logprobs"][1:])


def test_an_echo_has_special_tokens_on_request(http: httpx2.Client) -> None:
    body = {"prompt": [2, 400, 4], "max_tokens": 0, "echo": True}
    without = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    shown = http.post("/v1/completions", json={**body, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == f"<|user|>{without}<|end|>"


# Fields of vLLM and llama.cpp


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned(http: httpx2.Client, llm: LLM, stream: bool) -> None:
    body = {"prompt": [TEXT, "The cat"], "n": 2, "seed": 1, "max_tokens": 6, "stream": stream}
    reply = http.post("/v1/completions", json={**body, "return_token_ids": True})
    prompts = [llm.tokenizer.encode(TEXT)] * 2 + [llm.tokenizer.encode("The cat")] * 2
    if not stream:
        choices = reply.json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == prompts
        for choice in choices:
            assert llm.tokenizer.decode(choice["token_ids"]) == choice["text"]
        return
    ids: list[list[int]] = [[], [], [], []]
    texts: list[str] = [""] * 4
    of_prompt: list[list[int]] = [[]] * 4
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
                ids[choice["index"]] += choice.get("token_ids", [])
                if "prompt_token_ids" in choice:
                    of_prompt[choice["index"]] = choice["prompt_token_ids"]
    assert of_prompt == prompts
    assert [llm.tokenizer.decode(one) for one in ids] == texts


def test_token_ids_are_left_out_otherwise(http: httpx2.Client) -> None:
    text = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 2}).text
    assert "token_ids" not in text


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_end_of_a_prompt_is_kept(http: httpx2.Client, llm: LLM, as_ids: bool) -> None:
    ids = llm.tokenizer.encode("word " * 5000 + TEXT)
    prompt = ids if as_ids else "word " * 5000 + TEXT
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    for asked, kept in ((3, 3), (-1, MAX_MODEL_LEN - 4)):
        reply = http.post("/v1/completions", json={**body, "truncate_prompt_tokens": asked}).json()
        (choice,) = reply["choices"]
        assert choice["prompt_token_ids"] == ids[-kept:]
        assert reply["usage"]["prompt_tokens"] == kept
        same = http.post("/v1/completions", json={**body, "prompt": ids[-kept:]}).json()
        assert same["choices"][0]["text"] == choice["text"]
    body = {**body, "truncate_prompt_tokens": 3, "echo": True}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"].startswith(llm.tokenizer.decode(ids[-3:]))
    short = {**body, "prompt": TEXT, "truncate_prompt_tokens": 100}
    (choice,) = http.post("/v1/completions", json=short).json()["choices"]
    assert choice["text"].startswith(TEXT)


def test_texts_and_ids_in_one_request(complete: Any, llm: LLM) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 6}
    ids = llm.tokenizer.encode("The cat")
    mixed = complete(prompt=[TEXT, ids], **asked).choices
    alone = [complete(prompt=one, **asked).choices[0].text for one in (TEXT, "The cat")]
    assert [choice.text for choice in mixed] == alone
