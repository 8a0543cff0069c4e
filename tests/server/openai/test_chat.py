"""/v1/chat/completions through OpenAI's client."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from helpers.story_site import MAX_MODEL_LEN, Site

from kvik.llm import LLM

MODEL = "stories"
TALK: Any = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me of a dog."},
]


@pytest.fixture
def chat(client: openai.OpenAI) -> Any:
    """Return a function that calls the route with the model and a conversation."""
    return partial(client.chat.completions.create, model=MODEL, messages=TALK)


def test_greedy_text_is_that_of_the_library(chat: Any, llm: LLM) -> None:
    answer = chat(temperature=0, max_tokens=40)
    params = llm.default_params.with_changes(temperature=0.0, max_tokens=40)
    (expected,) = llm.chat(TALK, params)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == expected.num_output_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + expected.num_output_tokens
    assert answer.object == "chat.completion" and answer.model == MODEL


def test_a_stream_has_the_same_text(chat: Any) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 30}
    whole = chat(**asked)
    chunks = list(chat(**asked, stream=True))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert first.delta.role == "assistant" and first.delta.content == ""
    assert last.finish_reason == whole.choices[0].finish_reason and last.delta.content is None
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert all(c.usage is None for c in chunks)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content


def test_what_a_key_keeps_in_the_cache_is_counted_when_it_is_computed(chat: Any) -> None:
    text = "A short tale of a dog that sat on a log and ate a frog. " * 4
    asked: Any = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    first, second = (chat(**asked, prompt_cache_key="dog").usage for _ in range(2))
    written = first.prompt_tokens_details.cache_write_tokens
    assert 0 < written < first.prompt_tokens
    details = second.prompt_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (written, 0)


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs(chat: Any, top: int) -> None:
    asked: Any = {
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": top,
        "frequency_penalty": 0,
        "extra_body": {"repetition_penalty": 1.0},
    }
    answer = chat(**asked).choices[0]
    shown = answer.logprobs.content
    assert len(shown) == 6
    assert b"".join(bytes(one.bytes) for one in shown).decode() == answer.message.content
    for one in shown:
        assert len(one.top_logprobs) == top
        assert one.logprob <= 0
        values = [(other.token, other.logprob) for other in one.top_logprobs]
        assert values[:1] == [(one.token, one.logprob)][:top]  # greedy
        assert values == sorted(values, key=lambda value: -value[1])


def test_many_answers_have_logprobs(chat: Any) -> None:
    answers = chat(n=20, max_tokens=2, logprobs=True, top_logprobs=1).choices
    assert [len(answer.logprobs.content) for answer in answers] == [2] * 20


def test_a_stop_string_ends_it(chat: Any) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 40}
    text = chat(**asked).choices[0].message.content or ""
    stop = text[10:14]
    cut = chat(**asked, stop=stop).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.model_extra == {"stop_reason": stop}


def test_content_in_parts_and_a_developer(chat: Any) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 8}
    plain = chat(**asked)
    parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "You tell stories."}]},
        {"role": "user", "content": [{"type": "text", "text": "Tell me of a dog."}]},
    ]
    same = chat(messages=parts, **asked)
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_the_final_message_is_continued(chat: Any, llm: LLM) -> None:
    talk: Any = [*TALK, {"role": "assistant", "content": "Once upon a time"}]
    answer = chat(
        messages=talk,
        temperature=0,
        max_tokens=12,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    prompt = llm.render_chat(TALK) + "Once upon a time"
    ids = llm.tokenizer.encode(prompt, add_special_tokens=False)
    params = llm.default_params.with_changes(temperature=0.0, max_tokens=12)
    assert answer.choices[0].message.content == llm.generate(ids, params)[0].text


def test_many_at_once_through_the_async_client(site: Site) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{site.url}/v1", api_key="none", max_retries=0
        ) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=TALK, seed=seed % 4, max_tokens=12, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            async def continued(seed: int) -> str:
                answer = await client.completions.create(
                    model=MODEL, prompt="Once", seed=seed % 4, max_tokens=12
                )
                return answer.choices[0].text

            made = [of(seed) for of in (one, continued) for seed in range(16)]
            return await asyncio.gather(*made)

    texts = asyncio.run(ask())
    for some in (texts[:16], texts[16:]):
        assert some[:4] == some[4:8] == some[8:12] == some[12:]
    assert len(set(texts[:16])) > 1


def test_fields_without_effect_are_accepted(http: httpx2.Client) -> None:
    body = {
        "messages": TALK,
        "max_tokens": 1,
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "safety_identifier": "s",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "n": None,
        "stop": None,
        "logit_bias": {"5": -100},
        "stream_options": None,
        "deadline_ms": 60000,
        "priority": 0,
        "cache_salt": "s",
        "prompt_cache_key": "k",
        "no_such_field": 1,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvik-ignored-fields"] == "no_such_field"


# Fields of vLLM and llama.cpp


def test_token_ids_are_returned(http: httpx2.Client, llm: LLM) -> None:
    body = {"messages": TALK, "n": 2, "seed": 1, "max_tokens": 6, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    prompt = llm.tokenizer.encode(llm.render_chat(TALK), add_special_tokens=False)
    assert answer["prompt_token_ids"] == prompt
    for choice in answer["choices"]:
        assert llm.tokenizer.decode(choice["token_ids"]) == choice["message"]["content"]


def test_tokens_are_named_by_id_on_request(http: httpx2.Client, llm: LLM) -> None:
    asked = {"max_tokens": 4, "seed": 2, "return_tokens_as_token_ids": True}
    body = {
        **asked,
        "messages": TALK,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    shown = choice["logprobs"]["content"]
    assert [one["token"] for one in shown] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for one in shown for top in one["top_logprobs"])
    body = {**asked, "prompt": "Once upon", "logprobs": 1, "return_token_ids": True}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    shown = choice["logprobs"]
    assert shown["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]
    offsets = [len(llm.tokenizer.decode(choice["token_ids"][:at])) for at in range(4)]
    assert shown["text_offset"] == offsets


@pytest.mark.parametrize(
    "limit", [{}, {"max_tokens": -1}, {"max_completion_tokens": -1}, {"n_predict": -1}]
)
def test_without_a_limit_an_answer_may_fill_the_context(
    http: httpx2.Client, limit: dict[str, int]
) -> None:
    talk = [{"role": "user", "content": "word " * 400}]
    body = {"messages": talk, "ignore_eos": True, **limit}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_end_of_a_conversation_is_kept(http: httpx2.Client, llm: LLM) -> None:
    talk = [{"role": "user", "content": "word " * 1000 + "Tell me of a dog."}]
    prompt = llm.tokenizer.encode(llm.render_chat(talk), add_special_tokens=False)
    body = {"messages": talk, "max_tokens": 6, "return_token_ids": True}
    for asked, kept in ((9, 9), (-1, MAX_MODEL_LEN - 6)):
        body["truncate_prompt_tokens"] = asked
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["prompt_token_ids"] == prompt[-kept:]


def test_a_template_without_tools_refuses_them(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(openai.BadRequestError, match="shows no known format of tool calls"):
        client.chat.completions.create(
            model="stories", messages=[{"role": "user", "content": "When?"}], tools=[tool]
        )


def test_a_refusal_may_be_sent_back(client: openai.OpenAI) -> None:
    ask: Any = {"role": "user", "content": "hi"}
    prompts = set[int]()
    for answer in (
        {"content": "no"},
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
    ):
        messages: Any = [ask, {"role": "assistant", **answer}, ask]
        found = client.chat.completions.create(model="", messages=messages, max_tokens=1)
        prompts.add(found.usage.prompt_tokens)
    assert len(prompts) == 1
