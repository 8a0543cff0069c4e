"""Refusals in Anthropic's format that name the field."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import httpx2
import pytest
from helpers.http_server import HttpServer
from helpers.story_site import NAMES

MODEL = NAMES[0]
USER: Any = {"role": "user", "content": "A dog."}
GOOD: Any = {"model": MODEL, "max_tokens": 2, "messages": [USER]}
EPHEMERAL = {"type": "ephemeral"}
MARKED = {"type": "text", "text": "A dog.", "cache_control": EPHEMERAL}

THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}


def content(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("temperature", {"temperature": 1.1}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -1}),
    ("stop_sequences", {"stop_sequences": ["x"] * 17}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": []}]}),
    ("messages.0.content.0.type", content({"type": "image", "source": {"type": "base64"}})),
    ("messages.0.content.1.type", content(MARKED, {"type": "document"})),
    ("x", content({"type": "tool_result", "tool_use_id": "x", "content": "5"})),
    ("tool_use_id", content({"type": "tool_result", "content": "5"})),
    ("messages.0.content.0.type", content({"type": "tool_use", "id": "x", "name": "f"})),
    ("messages", {"messages": [{"role": "system", "content": "x"}]}),
    ("messages", {"messages": [{"role": "assistant", "content": [THOUGHT]}]}),
    ("messages", {"messages": [{"role": "assistant", "content": [THOUGHT]}], "system": [MARKED]}),
    ("messages.0.content.0.text", content({"type": "text"})),
    ("system.0.type", {"system": [{"type": "image"}]}),
    ("tools", {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses_2025"}]}}),
    ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ("output_config", {"output_config": {"format": {"type": "json_schema"}}}),
    ("cache_control", content(*[MARKED] * 5)),
    ("cache_control", {**content(*[MARKED] * 4), "cache_control": EPHEMERAL}),
    ("ttl", content({**MARKED, "cache_control": {"type": "ephemeral", "ttl": "1d"}})),
    ("type", content({**MARKED, "cache_control": {"type": "persistent"}})),
    ("messages", {"messages": [USER, {"role": "assistant", "content": "Once "}]}),
]


@pytest.mark.parametrize(("field", "changes"), BAD, ids=lambda v: str(v)[:40])
def test_bad_input_names_its_field(server: HttpServer, field: str, changes: dict[str, Any]) -> None:
    answer = httpx2.post(f"{server.url}/v1/messages", json={**GOOD, **changes}, timeout=60)
    assert answer.status_code == 400
    body = answer.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]


@pytest.mark.parametrize("words", [600, 9000])
def test_a_prompt_that_is_too_long(server: HttpServer, words: int) -> None:
    """LiteLLM, LangChain and coding agents look for these words."""
    long = {"messages": [{"role": "user", "content": "dog " * words}]}
    answer = httpx2.post(f"{server.url}/v1/messages", json={**GOOD, **long}, timeout=60)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    found = re.search(r"prompt is too long: (?:more than )?(\d+) tokens > (\d+) maximum", message)
    assert found, message
    assert int(found[1]) > int(found[2]) >= 511


@pytest.mark.parametrize(
    "harmless",
    [
        {"tools": []},
        {"thinking": {"type": "disabled"}},
        {"stop_sequences": []},
        {"system": []},
        {"top_k": 0},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ],
)
def test_fields_without_effect_are_accepted(server: HttpServer, harmless: dict[str, Any]) -> None:
    answer = httpx2.post(f"{server.url}/v1/messages", json={**GOOD, **harmless}, timeout=60)
    assert answer.status_code == 200


def test_counting_refuses_the_same(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        client.messages.count_tokens(
            model=MODEL, messages=[USER], tools=[{"name": "f", "input_schema": {"type": "object"}}]
        )
