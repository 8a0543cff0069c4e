"""Tool calls on the chat route, with the real client and a model that generates nonsense."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from helpers.story_site import site_fixture
from helpers.tools import TEMPLATE, WEATHER
from jsonschema import validate

from kvik.server.app import openai_routes
from kvik.server.route import DEFAULT_LIMITS

SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ASKED: list[Any] = [{"role": "user", "content": "Is it warm?"}]
ONLY_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
ONLY_NOW = {"type": "function", "function": {"name": "now"}}  # takes no arguments


site = site_fixture(openai_routes, template=TEMPLATE)


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 120, "seed": 1, **changes}
    return client.chat.completions.create(model="stories", **body)


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"get_weather", "now"}, "tool_calls"),
        (ONLY_WEATHER, {"get_weather"}, "stop"),
        (ONLY_NOW, {"now"}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [ONLY_WEATHER]},
            },
            {"get_weather"},
            "tool_calls",
        ),
    ],
    ids=["required", "named", "without arguments", "allowed"],
)
def test_a_call_that_must_come_is_valid(
    client: openai.OpenAI, choice: Any, names: set[str], reason: str
) -> None:
    for seed in range(2):
        answer = ask(client, tool_choice=choice, parallel_tool_calls=False, seed=seed, n=2)
        for one in answer.choices:
            (call,) = one.message.tool_calls
            assert one.message.content is None and one.finish_reason == reason
            assert call.function.name in names and call.id.startswith("call_")
            validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_text_is_text(client: openai.OpenAI, choice: str) -> None:
    answer = ask(client, tool_choice=choice, temperature=0).choices[0]
    assert answer.message.content and not answer.message.tool_calls
    assert answer.finish_reason in ("stop", "length")


def test_a_stream_tells_a_call_once_and_then_its_arguments(client: openai.OpenAI) -> None:
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    whole = ask(client, **asked).choices[0].message.tool_calls[0].function
    pieces = [
        piece
        for chunk in ask(client, stream=True, **asked)
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
    ]
    first, *rest = pieces
    assert first.id and first.type == "function"
    assert (first.function.name, first.function.arguments) == (whole.name, "")
    assert all(one.id is None and one.function.name is None for one in rest)
    assert "".join(one.function.arguments for one in rest) == whole.arguments
    with client.chat.completions.stream(
        model="stories", messages=ASKED, tools=TOOLS, max_tokens=120, **asked
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == whole.arguments


def test_an_agent_continues_with_results(client: openai.OpenAI) -> None:
    messages = list(ASKED)
    for turn in range(2):
        answer = ask(
            client,
            messages=messages,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=turn,
            max_tokens=70,
        )
        call = answer.choices[0].message.tool_calls[0]
        messages.append(answer.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "It is."})
    last = ask(client, messages=messages, tool_choice="none", max_tokens=10)
    assert last.choices[0].message.content


def test_a_continued_answer_has_the_tools_in_its_prompt(client: openai.OpenAI) -> None:
    begun = {
        "messages": [*ASKED, {"role": "assistant", "content": "Well,"}],
        "extra_body": {"continue_final_message": True},
    }
    with_tools, without = (
        ask(client, tools=tools, max_tokens=1, **begun).usage.prompt_tokens
        for tools in (TOOLS, None)
    )
    assert with_tools > without + 20


def test_a_text_beside_tools_satisfies_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for choice in ("auto", "none"):
        answer = ask(client, response_format=form, tool_choice=choice, n=2, temperature=1.5)
        for one in answer.choices:
            if one.finish_reason != "length":
                assert bool(one.message.content) != bool(one.message.tool_calls)
            if one.finish_reason == "stop":
                validate(json.loads(one.message.content), schema)
    answer = ask(client, response_format=form, tool_choice="required", parallel_tool_calls=False)
    assert answer.choices[0].message.tool_calls and not answer.choices[0].message.content


def test_what_is_not_enforced_is_told(client: openai.OpenAI) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    raw = client.chat.completions.with_raw_response.create(
        model="stories",
        messages=ASKED,
        tools=[{"type": "function", "function": tool}],
        max_tokens=1,
    )
    assert raw.headers["kvik-unenforced"] == "f: not at /properties/a"


ODD = {"type": "function", "function": {"name": "odd name"}}
REMOTE = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "http://x"}}}
STRICT = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"not": {}}},
}
RESULT = {"role": "tool", "tool_call_id": "nobody", "content": "yes"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [ODD]}, "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [REMOTE]}, "tools"),
        ({"tools": [STRICT]}, "tools"),
        ({"tools": [dict(ODD, function={"name": f"f{i}"}) for i in range(129)]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": [*ASKED, RESULT]}, "messages"),
        ({"messages": [*ASKED, {"role": "tool", "content": "yes"}]}, "messages"),
    ],
    ids=str,
)
def test_bad_input_names_its_field(client: openai.OpenAI, changes: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **changes)
    assert caught.value.param == param


def send_back(client: openai.OpenAI, *arguments: str) -> Any:
    """Return the answer after calls with these arguments, and their results."""
    calls = [
        {"id": f"{i}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "no"} for call in calls]
    messages = [*ASKED, {"role": "assistant", "tool_calls": calls}, *results]
    return client.chat.completions.create(model="", messages=messages, max_tokens=1)


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Os', "[1]", "none", f'{{"days": 1{"0" * 30}}}', r'{"city": "\ud83d"}'],
)
def test_what_a_model_wrote_may_be_sent_back(client: openai.OpenAI, arguments: str) -> None:
    assert send_back(client, arguments).usage.completion_tokens == 1


def test_values_of_arguments_count_as_values_of_the_body(client: openai.OpenAI) -> None:
    many = json.dumps({"days": [{}] * (DEFAULT_LIMITS.max_keys // 2)})
    commas = json.dumps({"city": "," * DEFAULT_LIMITS.max_values})
    for arguments, code in ((many, many), None), ((many, commas), "context_length_exceeded"):
        with pytest.raises(openai.BadRequestError) as caught:
            send_back(client, *arguments)
        assert caught.value.code == code
