"""Reasoning separated from answers, on the chat route and Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from helpers.story_site import every_route, story_site
from helpers.tools import TEMPLATE as TOOLS

# The prompt opens the reasoning, unless disabled.
TEMPLATE = (
    "{{ reasoning_effort }}"
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% if enable_thinking == false %}\n</think>\n\n"
    "{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module")
def thinking() -> Iterator[httpx2.Client]:
    with story_site(every_route, template=TEMPLATE) as site:
        with httpx2.Client(base_url=site.url, timeout=60) as made:
            yield made
        site.at_rest()


def chat(http: httpx2.Client, **changes: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": 12, "temperature": 0, **changes}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_thought_that_the_prompt_begins(thinking: httpx2.Client) -> None:
    message = chat(thinking, reasoning_effort="max").json()["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"]
    assert message["reasoning"] == message["reasoning_content"]
    text = chat(thinking, stream=True).text
    assert '"reasoning_content":' in text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_may_be_sent_back_under_either_name(thinking: httpx2.Client, name: str) -> None:
    thought = {name: "One that takes many tokens of the prompt."}
    # null: as some servers answer if the thought was cut off
    answers = ({"content": ""}, {"content": "", **thought}, {"content": None, **thought})
    without, empty, null = (
        chat(thinking, messages=[*ASKED, {"role": "assistant", **answer}, *ASKED])
        for answer in answers
    )
    count = empty.json()["usage"]["prompt_tokens"]
    assert count > without.json()["usage"]["prompt_tokens"]
    assert null.json()["usage"]["prompt_tokens"] == count


def test_without_a_thought_there_is_an_answer(thinking: httpx2.Client) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    message = chat(thinking, **kwargs).json()["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message
    choice = chat(thinking, guided_choice=["yes", "no"], **kwargs).json()["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")


def test_constraints_on_answers_do_not_apply_to_thoughts(thinking: httpx2.Client) -> None:
    message = chat(thinking, guided_choice=["yes", "no"]).json()["choices"][0]["message"]
    assert message["content"] == "" and len(message["reasoning_content"]) > 4


def test_a_continued_answer_begins_no_thought(thinking: httpx2.Client) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "There was"}]
    body = {"messages": messages, "continue_final_message": True}
    message = chat(thinking, **body).json()["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message


def test_thinking_blocks(thinking: httpx2.Client) -> None:
    body: dict[str, Any] = {"model": "stories", "messages": ASKED, "max_tokens": 12}
    answer = thinking.post("/v1/messages", json=body).json()
    (block,) = answer["content"]
    assert block["type"] == "thinking" and block["thinking"] and block["signature"]
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "Well."}]}
    body["messages"] = [*ASKED, said, {"role": "user", "content": "And?"}]
    assert thinking.post("/v1/messages", json=body).status_code == 200
    stream = thinking.post("/v1/messages", json={**body, "stream": True}).text
    assert stream.index("thinking_delta") < stream.index("signature_delta")
    assert stream.count("content_block_start") == stream.count("content_block_stop") == 2, stream


def test_tokens_are_counted_with_the_effort(thinking: httpx2.Client) -> None:
    body = {"model": "stories", "messages": ASKED, "output_config": {"effort": "medium"}}
    count = thinking.post("/v1/messages/count_tokens", json=body)
    assert "x-kvik-ignored-fields" not in count.headers
    usage = thinking.post("/v1/messages", json={**body, "max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] == count.json()["input_tokens"]


def test_a_stream_that_ends_behind_an_opening_marker_is_as_in_one_piece() -> None:
    function = {"type": "function", "name": "now", "parameters": {"type": "object"}}
    asked = {"tools": [function], "tool_choice": "required", "seed": 1, "max_output_tokens": 4}
    tool = {"name": "now", "input_schema": {"type": "object"}}
    body: Any = {"tools": [tool], "tool_choice": {"type": "any"}, "extra_body": {"top_k": 1}}
    body |= {"model": "stories", "messages": ASKED, "max_tokens": 4}  # "<think>"
    with (
        story_site(every_route, template=TOOLS + "{# <think></think> #}") as site,
        httpx2.Client(base_url=site.url, timeout=60) as http,
        Anthropic(base_url=site.url, api_key="none") as client,
    ):
        events = http.post("/v1/responses", json={"input": ASKED, "stream": True, **asked}).text
        assert json.loads(events.split("data: ")[-1])["response"]["output"] == []
        assert http.post("/v1/responses", json={"input": ASKED, **asked}).json()["output"] == []
        with client.messages.stream(**body) as stream:
            streamed = [(block.type, block.text) for block in stream.get_final_message().content]
        whole = [(block.type, block.text) for block in client.messages.create(**body).content]
        assert streamed == whole == [("text", "")]
