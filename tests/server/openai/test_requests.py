"""Bodies of requests as sampling parameters and prompts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Pin
from kvik.errors import ParamError
from kvik.server.openai.chat import ChatCompletion, ChatRequest, chat_params
from kvik.server.openai.completions import Completion, CompletionRequest, completion_params
from kvik.server.openai.embeddings import EmbeddingRequest
from kvik.server.openai.requests import generation_request
from kvik.server.openai.tokenize import TokenizeRequest
from kvik.server.pages import form_fields

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": MESSAGES, **fields}, ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "Hi", **fields}, CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "pins"),
    [
        ({}, ()),
        ({"prompt_cache_retention": "in_memory"}, ()),
        ({"prompt_cache_key": "k"}, (Pin(3, 300.0),)),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, (Pin(3, 300.0),)),
        ({"prompt_cache_retention": "24h"}, (Pin(3, 3600.0),)),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "1h"}, (Pin(3, 3600.0),)),
    ],
)
def test_prompts_to_be_kept_are_pinned(fields: dict[str, str], pins: tuple[Pin, ...]) -> None:
    wish = generation_request(completion(**fields), [1, 2, 3], SamplingParams(), "prompt")
    assert wish.pins == pins


def test_fields_of_the_queue() -> None:
    body = chat(priority=-3, cache_salt="tea", deadline_ms=500)
    wish = generation_request(body, [1, 2], SamplingParams(), "messages")
    assert (wish.priority, wish.cache_salt, wish.deadline_ms) == (-3, "tea", 500)


def test_missing_fields_take_the_models_defaults() -> None:
    defaults = SamplingParams(temperature=0.3, top_k=7, min_p=0.1, max_tokens=99)
    assert chat_params(chat(), defaults) == defaults
    assert chat_params(chat(), SamplingParams()).max_tokens is None
    assert chat_params(chat(max_tokens=9, max_completion_tokens=3), defaults).max_tokens == 3
    params = completion_params(completion(top_k=0), defaults)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.3, 0, 16)


def test_null_means_missing() -> None:
    names = [f.encode_name for f in msgspec.structs.fields(ChatRequest) if f.name != "messages"]
    body = chat(**dict.fromkeys(names))
    assert chat_params(body, SamplingParams()) == chat_params(chat(), SamplingParams())


def test_every_parameter_reaches_the_engine() -> None:
    given: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.2,
        "typical_p": 0.8,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {5: 1.0},
        "allowed_token_ids": [5, 6],
        "bad_words": ["cat", [1, 2]],
        "min_tokens": 3,
        "max_tokens": 9,
        "stop": ["x"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "seed": 4,
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "speculation": False,
    }
    expected = SamplingParams(**given)
    assert completion_params(completion(**given), SamplingParams()) == expected
    assert chat_params(chat(**given), SamplingParams()) == expected
    logprobs = chat_params(chat(logprobs=True, top_logprobs=4), SamplingParams()).logprobs
    assert logprobs == 4


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "max_tokens"),
    ],
)
def test_contradictory_fields(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ParamError) as caught:
        completion_params(completion(**fields), SamplingParams())
    assert caught.value.field == field


def test_no_alternatives_differ_from_no_logprobs() -> None:
    assert chat_params(chat(logprobs=True, top_logprobs=0), SamplingParams()).logprobs == 0
    assert completion_params(completion(logprobs=0), SamplingParams()).logprobs == 0
    for fields in ({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}):
        assert chat_params(chat(**fields), SamplingParams()).logprobs is None


def test_best_of_must_equal_n() -> None:
    completion_params(completion(n=3, best_of=3), SamplingParams())
    completion_params(completion(best_of=1), SamplingParams())


@pytest.mark.parametrize(("make", "params"), [(chat, chat_params), (completion, completion_params)])
def test_names_of_llama_cpp(make: Any, params: Any) -> None:
    known = params(make(repetition_penalty=1.3, max_tokens=9), SamplingParams())
    assert params(make(repeat_penalty=1.3, n_predict=9), SamplingParams()) == known
    assert params(make(n_predict=-1), SamplingParams()).max_tokens is None
    params(make(n_predict=9, max_tokens=9), SamplingParams())
    for field, other in (("repetition_penalty", "repeat_penalty"), ("max_tokens", "n_predict")):
        with pytest.raises(ParamError) as caught:
            params(make(**{field: 2, other: 3}), SamplingParams())
        assert caught.value.field == other


def test_the_schema_has_the_bounds() -> None:
    kinds = [ChatRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest]
    _, parts = msgspec.json.schema_components([*kinds, ChatCompletion, Completion])
    fields = parts["ChatRequest"]["properties"]
    bounds, null = fields["n"]["anyOf"]
    assert (bounds["type"], bounds["minimum"], bounds["maximum"]) == ("integer", 1, 128)
    assert bounds["description"] and null == {"type": "null"}
    assert parts["ChatRequest"]["required"] == ["messages"]


def test_the_form_has_the_bounds_of_the_schema() -> None:
    _, parts = msgspec.json.schema_components([CompletionRequest])
    fields = parts["CompletionRequest"]["properties"]
    shown = {row["name"]: row["limits"] for row in form_fields()}
    assert {"temperature", "top_p", "max_tokens", "seed"} <= set(shown)
    for name, limits in shown.items():
        bounds, _ = fields[name]["anyOf"]
        if name == "max_tokens":  # the form omits it in place of -1
            assert bounds["minimum"] == -1
        elif "max" in limits:
            low = bounds.get("minimum", bounds.get("exclusiveMinimum"))
            assert (limits["min"], limits["max"]) == (low, bounds["maximum"])
        else:
            assert name == "seed"
