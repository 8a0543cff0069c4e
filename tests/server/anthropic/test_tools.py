"""Tools in Anthropic's API, with the real client and a model that generates nonsense."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import httpx2
import msgspec
import pytest
from helpers.story_site import Site, site_fixture
from helpers.tools import TEMPLATE, WEATHER
from jsonschema import validate

from kvik.engine.output import CompletionOutput, RequestMetrics, RequestOutput
from kvik.server.anthropic import MessageFormat, MessageRequest, UsageMeter, routes
from kvik.server.tools import AnswerForm, Function, ToolUse

MODEL = "stories"
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "Of a city.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}},
]
USER: Any = {"role": "user", "content": "Is it warm?"}
GREEDY = {"temperature": 0}
ONE = {"type": "any", "disable_parallel_tool_use": True}


site = site_fixture(routes, template=TEMPLATE)


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "tools": TOOLS, "max_tokens": 90, **changes}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (ONE, {"get_weather", "now"}),
        ({"type": "tool", "name": "get_weather"}, {"get_weather"}),
    ],
    ids=["any", "tool"],
)
def test_a_call_that_must_come_is_valid(
    client: anthropic.Anthropic, choice: Any, names: set[str]
) -> None:
    for _ in range(2):
        answer = client.messages.create(**asked(tool_choice=choice))
        (block,) = answer.content
        assert block.type == "tool_use" and block.id.startswith("toolu_")
        assert answer.stop_reason == "tool_use" and block.name in names
        if block.name == "get_weather":
            validate(block.input, WEATHER)


@pytest.mark.parametrize("kind", ["auto", "none"])
def test_text_is_text(client: anthropic.Anthropic, kind: str) -> None:
    body = asked(tool_choice={"type": kind}, extra_body=GREEDY, max_tokens=30)
    answer = client.messages.create(**body)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**body) as stream:
        assert stream.get_final_message().content[0].text == answer.content[0].text


def test_a_stream_builds_the_same_blocks(client: anthropic.Anthropic) -> None:
    body = asked(tool_choice=ONE, extra_body=GREEDY)
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert [(b.name, b.input) for b in final.content] == [(b.name, b.input) for b in whole.content]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"max_tokens": 30}, "max_tokens"), ({"stop_sequences": ["city"]}, "stop_sequence")],
)
def test_a_call_that_is_cut_off_has_no_input(
    client: anthropic.Anthropic, limit: dict[str, Any], reason: str
) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    answer = client.messages.create(**asked(tool_choice=choice, extra_body=GREEDY) | limit)
    (block,) = answer.content
    assert (answer.stop_reason, block.name, block.input) == (reason, "get_weather", {})


def test_half_a_character_in_a_call_is_replaced(site: Site) -> None:
    body = MessageRequest(model=MODEL, messages=[], max_tokens=9)
    use = ToolUse.of(site.parts.texts.form, [Function("now", parameters={"type": "object"})])
    call = r'{"name": "now", "arguments": {"\ud83d": ["a\ud83d\ude00", "\ude00"], "big": 1%s}}'
    text = f"<tool_call>\n{call % ('0' * 30)}\n</tool_call>"
    form = MessageFormat(
        MODEL, body, None, UsageMeter(1, (), 1), 99, AnswerForm(use, site.parts.texts.form)
    )
    output = RequestOutput(
        "",
        None,
        [1],
        [CompletionOutput(0, text, [1], "stop")],
        0,
        0,
        None,
        RequestMetrics(0, 0, 0, 0),
    )
    answer = msgspec.json.decode(msgspec.json.encode(form.complete([output])))
    assert answer["content"][0]["input"] == {"?": ["a😀", "?"], "big": 10**30}


def test_text_after_a_call_stays_there(client: anthropic.Anthropic) -> None:
    body = asked(tool_choice={"type": "any"}, extra_body=GREEDY)
    orders = []
    for length in range(56, 76, 8):  # some end within the name of a second call, which is text
        body["max_tokens"] = length
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message()
        orders.append([block.type for block in whole.content])
        assert orders[-1] == [block.type for block in final.content]
    assert ["tool_use", "text"] in orders


def test_an_agent_continues_with_results(client: anthropic.Anthropic) -> None:
    first = client.messages.create(**asked(tool_choice=ONE))
    (call,) = first.content
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "It is."}],
        "cache_control": {"type": "ephemeral"},
    }
    messages = [
        USER,
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    body = asked(messages=messages, tool_choice={"type": "none"}, max_tokens=8)
    assert client.messages.create(**body).content[0].type == "text"
    del body["max_tokens"]
    counted = client.messages.count_tokens(**body).input_tokens
    del body["tools"], body["tool_choice"]
    assert counted > client.messages.count_tokens(**body).input_tokens


def test_a_prompt_that_ends_with_an_answer_has_the_tools(client: anthropic.Anthropic) -> None:
    begun: Any = [USER, {"role": "assistant", "content": "Well,"}]
    with_tools, without = (
        client.messages.count_tokens(model=MODEL, messages=begun, tools=tools).input_tokens
        for tools in (TOOLS, [])
    )
    assert with_tools > without + 20


def test_a_tool_runner_sends_whole_conversations(client: anthropic.Anthropic) -> None:
    """It offers to have them kept by the server, and needs to know that this one does not."""
    sent: list[Any] = []
    hooks = {"request": [lambda request: sent.append(json.loads(request.content))]}

    @anthropic.beta_tool
    def now(zone: Literal["utc"]) -> str:
        """Return the time."""
        return f"noon in {zone}"

    asked = {"model": MODEL, "messages": [USER], "max_tokens": 90, "tool_choice": ONE}
    with httpx2.Client(event_hooks=hooks, timeout=60) as http:
        messages = client.copy(http_client=http).beta.messages
        runner = messages.tool_runner(**asked, tools=[now], max_iterations=2)
        answers = [answer.stop_reason for answer in runner]
    assert answers == ["tool_use"] * 2
    assert [len(body["messages"]) for body in sent if "thread" not in body] == [1, 3]


def test_tools_of_the_host_are_left_out_and_told(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "Is it warm?"}]
    search: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    body: dict[str, Any] = {"model": "stories", "max_tokens": 4, "messages": asked}
    raw = client.messages.with_raw_response.create(**body, tools=[search])
    assert raw.headers["x-kvik-ignored-fields"] == "tools.web_search_20250305"
    used, counted = (
        client.messages.count_tokens(model="stories", messages=asked, tools=tools).input_tokens
        for tools in ([*TOOLS, search], TOOLS)
    )
    assert used == counted


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tools": []}, "tool_choice: needs tools"),
        ({"tool_choice": {"type": "tool"}}, "needs the name"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "not one of the tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "comes twice"),
        ({"tools": [{"name": "a b", "input_schema": WEATHER}]}, "a name has"),
        ({"tools": [{"name": "a"}]}, "a needs an input_schema"),
    ],
    ids=str,
)
def test_bad_input_names_its_field(site: Site, changes: dict[str, Any], word: str) -> None:
    body = {**asked(tool_choice=ONE), **changes}
    answer = httpx2.post(f"{site.url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 400 and word in answer.json()["error"]["message"]


def test_an_answer_satisfies_a_schema(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL,
        messages=[USER],
        max_tokens=90,
        output_config={"format": {"type": "json_schema", "schema": WEATHER}},
    )
    validate(json.loads(answer.content[0].text), WEATHER)
