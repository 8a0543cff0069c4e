"""/v1/completions through OpenAI's client."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from helpers.story_site import MAX_MODEL_LEN, Site

from kvik.llm import LLM
from kvik.text.infill import Markers

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


def test_a_suffix(complete: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    markers = Markers("<|system|>", "<|user|>", "<|assistant|>")
    monkeypatch.setattr("kvik.text.infill.FAMILIES", (markers,))
    gaps = [{"prompt": text, "suffix": " The end."} for text in (TEXT, "The cat sat")]
    params = llm.default_params.with_changes(temperature=0.0, max_tokens=16)
    expected = llm.generate(gaps, params)
    prompts = [gap["prompt"] for gap in gaps]
    answer = complete(prompt=prompts, suffix=" The end.", temperature=0)
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    stream = complete(prompt=TEXT, suffix=" The end.", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0].text
    for name, value in (("echo", True), ("prompt", [5, 6]), ("truncate_prompt_tokens", 5)):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(extra_body={name: value, "suffix": " The end."})
        assert caught.value.param == name


def test_beams(complete: Any, llm: LLM) -> None:
    answer = complete(n=2, max_tokens=12, extra_body={"beam_width": 3})
    params = llm.default_params.with_changes(n=2, max_tokens=12, num_beams=3)
    (expected,) = llm.generate(TEXT, params)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected.outputs]
    assert answer.usage.completion_tokens == expected.num_output_tokens


def test_the_default_limit_is_sixteen_tokens(complete: Any) -> None:
    answer = complete(extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("kind", ["texts", "ids", "both"])
def test_many_prompts_with_many_choices(complete: Any, llm: LLM, kind: str) -> None:
    """The choices of the first prompt come first, for all forms of prompts."""
    texts: list[Any] = [TEXT, "The cat sat", "Tom and Sue went to the park"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    prompts = {"texts": texts, "ids": ids, "both": [*texts[:1], *ids[1:]]}
    asked: Any = {"n": 2, "seed": 3, "max_tokens": 10}
    alone = [complete(prompt=text, **asked).choices for text in texts]
    choices = complete(prompt=prompts[kind], **asked).choices
    assert [choice.index for choice in choices] == list(range(6))
    assert [choice.text for choice in choices] == [one.text for own in alone for one in own]


@pytest.mark.parametrize("max_tokens", [0, 8])
def test_echo(complete: Any, max_tokens: int) -> None:
    text = complete(temperature=0, max_tokens=max_tokens or 1).choices[0].text
    answer = complete(temperature=0, max_tokens=max_tokens, echo=True)
    assert answer.choices[0].text == TEXT + (text if max_tokens else "")
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == max_tokens


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
        assert top[token] == value
        assert 2 <= len(top) <= 3
    text = answer.choices[0].text
    assert text.startswith(TEXT)
    for begin, token in zip(shown.text_offset, shown.tokens, strict=True):
        assert text[begin : begin + len(token)] == token


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_in_an_echo_with_special_tokens(
    complete: Any, llm: LLM, as_ids: bool, skip: bool
) -> None:
    text = "<|user|>Hello there<|endoftext|> once"
    prompt = llm.tokenizer.encode(text) if as_ids else text
    extra = {"skip_special_tokens": skip}
    answer = complete(prompt=prompt, echo=True, logprobs=0, max_tokens=2, extra_body=extra)
    (choice,) = answer.choices
    hidden = {"<|user|>", "<|endoftext|>"} if as_ids and skip else set()
    for begin, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True):
        assert token in hidden or choice.text.startswith(token, begin)


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
    body = {"prompt": [TEXT, "The cat"] * 10, "max_tokens": 1, "prompt_logprobs": 0}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 20
    for choice in choices:
        assert choice["prompt_logprobs"][0] is None
        assert all(len(entry) == 1 for entry in choice["prompt_logprobs"][1:])


def test_an_echo_has_special_tokens_on_request(http: httpx2.Client) -> None:
    body = {"prompt": [2, 400, 4], "max_tokens": 0, "echo": True}
    without = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    shown = http.post("/v1/completions", json={**body, "skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == f"<|user|>{without}<|end|>"


# Fields of vLLM and llama.cpp


def test_token_ids_are_returned(http: httpx2.Client, llm: LLM) -> None:
    body = {"prompt": [TEXT, "The cat"], "n": 2, "seed": 1, "max_tokens": 6}
    asked = {**body, "return_token_ids": True}
    choices = http.post("/v1/completions", json=asked).json()["choices"]
    prompts = [llm.tokenizer.encode(TEXT)] * 2 + [llm.tokenizer.encode("The cat")] * 2
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    for choice in choices:
        assert llm.tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert "token_ids" not in http.post("/v1/completions", json=body).text


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
