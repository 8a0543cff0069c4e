"""`/v1/responses`, with the real client and a model that generates nonsense."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx2
import openai
import pytest
from helpers.story_site import Site, site_fixture, story_site
from helpers.tools import MESSAGES, WEATHER
from jsonschema import validate

from kvik.server.app import openai_routes

# Reasons only on request.
TEMPLATE = (
    MESSAGES + "{% if add_generation_prompt %}assistant: <think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
FUNCTION: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": WEATHER}
NOTE: dict[str, Any] = {"type": "custom", "name": "note", "description": "Keep a text."}
SPACE: dict[str, Any] = {"type": "namespace", "name": "mcp__geo__", "description": "Places."}
SPACE["tools"] = [{**FUNCTION, "name": "now"}, {"type": "custom", "name": "keep"}]
ASKED = "Is it warm?"


site = site_fixture(openai_routes, template=TEMPLATE)


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    body = {"input": ASKED, "max_output_tokens": 60, **changes}
    more = body.pop("extra_body", {}) | {"seed": 1}
    return client.responses.create(model="stories", extra_body=more, **body)


def streamed(client: openai.OpenAI, **changes: Any) -> tuple[list[Any], Any]:
    """Return the events of a stream, and the response that its last one holds."""
    events = list(ask(client, stream=True, **changes))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    return events, events[-1].response


def test_a_text(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, instructions="Be brief.", metadata={"run": "7"})
    (message,) = answer.output
    assert message.type == "message" and message.role == "assistant"
    assert answer.output_text and answer.metadata == {"run": "7"}
    assert answer.status == "incomplete" and message.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    # The client does not check what it gets: its type may lack a field.
    type(answer).model_validate(answer.to_dict(mode="json"))
    usage = answer.usage
    assert usage.output_tokens == 60 and usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + 60
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ASKED},
    ]
    chat = client.chat.completions.create(
        model="stories",
        messages=messages,
        max_tokens=60,
        temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert chat.choices[0].message.content == answer.output_text


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    events, last = streamed(client, temperature=0)
    whole = ask(client, temperature=0)
    assert last.output_text == whole.output_text
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text and len(pieces) > 5
    assert events[-1].type == "response.incomplete" and last.usage.output_tokens == 60
    assert events[-2].item == last.output[-1] and last.output[-1].status == "incomplete"
    kinds = [event.type for event in events if "delta" not in event.type][2:-1]
    assert kinds == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    whole, (events, last) = ask(client, **asked), streamed(client, **asked)
    (part,) = whole.output[0].content
    assert "".join(token.token for token in part.logprobs) == part.text
    chat = client.chat.completions.create(
        model="stories",
        messages=[{"role": "user", "content": ASKED}],
        max_tokens=60,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    expected = [token.model_dump() for token in chat.choices[0].logprobs.content]
    assert [token.model_dump() for token in part.logprobs] == expected and len(expected) == 60
    type(whole).model_validate(whole.to_dict(mode="json"))
    assert last.output[0].content[0].logprobs == part.logprobs
    for kind in ("delta", "done"):
        parts = [event for event in events if event.type == f"response.output_text.{kind}"]
        values = [token.logprob for event in parts for token in event.logprobs]
        assert values == [token.logprob for token in part.logprobs]
    bare = ask(client, include=["message.output_text.logprobs"], max_output_tokens=2)
    assert [token.top_logprobs for token in bare.output[0].content[0].logprobs] == [[], []]


def test_the_client_gathers_a_stream(client: openai.OpenAI) -> None:
    tools: list[Any] = [FUNCTION]
    with client.responses.stream(
        model="stories",
        input=ASKED,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        answer = stream.get_final_response()
    assert answer.status == "completed"
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "get_weather"
    validate(json.loads(call.arguments), WEATHER)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_and_custom_tools(client: openai.OpenAI, stream: bool) -> None:
    body: dict[str, Any] = {"max_output_tokens": 150}
    for name, kind, namespace in (
        ("get_weather", "function", None),
        ("note", "custom", None),
        ("now", "function", "mcp__geo__"),
        ("keep", "custom", "mcp__geo__"),
    ):
        choice = {"type": kind, "name": name}
        body |= {"tools": [FUNCTION, NOTE] if namespace is None else [SPACE], "tool_choice": choice}
        if stream:
            events, answer = streamed(client, **body)
            done = [one for one in events if one.type == "response.output_item.done"]
            assert [one.item for one in done] == answer.output
        else:
            answer = ask(client, **body)
        (call,) = answer.output
        assert (call.name, call.namespace) == (name, namespace)
        assert call.call_id and call.id != call.call_id
        if kind == "function":
            assert call.type == "function_call"
            validate(json.loads(call.arguments), WEATHER)
        else:  # its input may be truncated
            assert call.type == "custom_tool_call" and call.input


def test_a_conversation_with_calls_and_thoughts(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        temperature=0,
        max_output_tokens=9,
        tools=[{**SPACE, "tools": [FUNCTION]}, NOTE],
        tool_choice="none",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "function_call",
                "call_id": "a",
                "name": "get_weather",
                "namespace": "mcp__geo__",
                "arguments": '{"city": "Oslo"}',
            },
            {"type": "custom_tool_call", "call_id": "b", "name": "note", "input": "It is."},
            {"type": "function_call_output", "call_id": "a", "output": "cold"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "kept"},
        ],
    )
    calls: list[Any] = [
        ("a", "mcp__geo__get_weather", '{"city": "Oslo"}'),
        ("b", "note", '{"input": "It is."}'),
    ]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ASKED},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": given}}
                for id_, name, given in calls
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold"},
        {"role": "tool", "tool_call_id": "b", "content": "kept"},
    ]
    text = {"type": "string"}
    note = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    tools: list[Any] = [
        {"type": "function", "function": {"name": "mcp__geo__get_weather", "parameters": WEATHER}},
        {
            "type": "function",
            "function": {
                "name": "note",
                "description": NOTE["description"],
                "parameters": note | {"additionalProperties": False},
            },
        },
    ]
    chat = client.chat.completions.create(
        model="stories", messages=messages, tools=tools, tool_choice="none", temperature=0,
        max_tokens=9, extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert chat.usage and chat.usage.prompt_tokens == answer.usage.input_tokens
    assert chat.choices[0].message.content == answer.output_text


def test_a_thought_is_an_item(client: openai.OpenAI) -> None:
    events, streaming = streamed(client, reasoning={"effort": "low"}, temperature=0)
    answer = ask(client, reasoning={"effort": "low"}, temperature=0)
    for one in (answer, streaming):
        (thought,) = one.output
        assert thought.type == "reasoning" and thought.content[0].text
    pieces = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == answer.output[0].content[0].text


def test_a_schema(client: openai.OpenAI) -> None:
    form: dict[str, Any] = {
        "type": "json_schema",
        "name": "place",
        "schema": WEATHER,
        "strict": True,
    }
    answer = ask(client, text={"format": form})
    assert answer.status == "completed"
    validate(json.loads(answer.output_text), WEATHER)
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "tools": [FUNCTION]}, "include"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=body)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "changes",
    [
        {"instructions": "Be brief.", "reasoning": {"effort": "low"}},
        {"tools": [NOTE], "truncation": "auto"},
        {"tools": [FUNCTION], "tool_choice": "none", "parallel_tool_calls": False},
        {"input": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "No."}]},
    ],
)
def test_tokens_are_counted_as_they_are_used(client: openai.OpenAI, changes: Any) -> None:
    count = client.responses.input_tokens.count(**{"input": ASKED, "model": "stories", **changes})
    assert count.input_tokens == ask(client, **changes).usage.input_tokens
    assert count.object == "response.input_tokens"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ASKED, "conversation": "conv_1"}, "conversation"),
        ({"input": ASKED, "tool_choice": "required"}, "tool_choice"),
        ({"input": "Is " * 3000}, "input"),
    ],
)
def test_what_cannot_be_counted(client: openai.OpenAI, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model="stories", **body)
    assert caught.value.param == param


def test_fields_without_effect_are_reported(site: Site) -> None:
    body = {
        "input": ASKED,
        "max_output_tokens": 2,
        "text": {"verbosity": "low"},
        "tools": [{**NOTE, "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
        "tool_choice": "none",
    }
    answer = httpx2.post(f"{site.url}/v1/responses", json=body)
    assert answer.headers["x-kvik-ignored-fields"] == "tools.note.format, text.verbosity"


def test_an_effort_is_reported_as_ignored_without_reasoning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING, "kvik.access"),
        story_site(openai_routes, template="{{ messages[-1].content }}") as plain,
    ):
        body = {"input": ASKED, "max_output_tokens": 2, "reasoning": {"effort": "low"}}
        answer = httpx2.post(f"{plain.url}/v1/responses", json=body)
    assert answer.headers["x-kvik-ignored-fields"] == "reasoning.effort"
    # The site of the module may still log requests of the tests before.
    (line,) = (message for message in caplog.messages if "reasoning.effort" in message)
    assert "unknown" not in line and "mean" not in line


def test_tools_of_the_host_are_left_out_and_told(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "web_search"}, {"type": "file_search", "vector_store_ids": []}]
    tools += [{"type": "a\r\nset-cookie: é\0"}, *({"type": f"t{i}"} for i in range(50))]
    raw = client.responses.with_raw_response.create(
        model="stories", input=ASKED, tools=tools, max_output_tokens=4
    )
    ignored = raw.headers["x-kvik-ignored-fields"]
    assert "tools.web_search" in ignored and "tools.file_search" in ignored
    assert r"tools.a\r\nset-cookie: \xe9\x00" in ignored and len(ignored) < 400
    answer = raw.parse()
    assert answer.output_text and answer.tools == []
