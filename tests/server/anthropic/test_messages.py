"""/v1/messages through Anthropic's client."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import pytest
from helpers.http_server import HttpServer
from helpers.story_site import NAMES, Site

MODEL = NAMES[0]
TALK: Any = [{"role": "user", "content": "Tell me of a dog."}]
PLAIN: Any = {"model": MODEL, "messages": TALK}
# This version of the client has no argument for the temperature; older ones have one.
COLD: Any = {"extra_body": {"temperature": 0.0}}
GREEDY: Any = PLAIN | COLD


def events_of(server: HttpServer, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and data of a stream's events."""
    answer = httpx2.post(f"{server.url}/v1/messages", json={**body, "stream": True}, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for text in answer.text.split("\n\n")[:-1]:
        name, data = text.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        events.append((name[7:], json.loads(data[6:])))
    return events


def test_an_answer(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**GREEDY, max_tokens=20, system="You tell stories.")
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    (block,) = answer.content
    assert block.type == "text" and block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.output_tokens == 20
    assert answer.usage.cache_creation_input_tokens == 0
    assert answer._request_id


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (
            {"system": "You tell stories.", "messages": TALK},
            "<|system|>You tell stories.<|end|><|user|>Tell me of a dog.<|end|><|assistant|>",
        ),
        (
            {"messages": [*TALK, {"role": "assistant", "content": "Once there was a dog named"}]},
            "<|user|>Tell me of a dog.<|end|><|assistant|>Once there was a dog named",
        ),
        *(
            (
                {"messages": [*TALK, {"role": "assistant", "content": nothing}]},
                "<|user|>Tell me of a dog.<|end|><|assistant|>",
            )
            for nothing in ("", [])
        ),
    ],
    ids=["system", "prefilled", "prefilled with nothing", "prefilled with no block"],
)
def test_the_prompt_is_the_rendered_conversation(
    client: anthropic.Anthropic, site: Site, body: Any, prompt: str
) -> None:
    usage = client.messages.create(model=MODEL, max_tokens=1, **body, **COLD).usage
    tokenizer = site.parts.texts.tokenizer
    count = len(tokenizer.encode(prompt, False))
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count


def test_a_stream_has_the_same_text(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**GREEDY, max_tokens=30)
    with client.messages.stream(**GREEDY, max_tokens=30) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    (block,) = whole.content
    assert block.type == "text" and "".join(pieces) == block.text
    assert len(pieces) > 1
    assert final.content[0].type == "text" and final.content[0].text == block.text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.id != whole.id


def test_the_events_and_their_order(server: HttpServer) -> None:
    events = events_of(server, {**PLAIN, "temperature": 0.0, "max_tokens": 10})
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert all(data["type"] == name for name, data in events)
    message = events[0][1]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["output_tokens"] == 0
    start = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    assert events[1][1] == start
    assert events[2][1] == {"type": "ping"}
    for _, data in events[3:-3]:
        assert (
            data["index"] == 0 and data["delta"]["type"] == "text_delta" and data["delta"]["text"]
        )
    assert events[-3][1] == {"type": "content_block_stop", "index": 0}
    end = events[-2][1]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 10
    for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
        assert end["usage"][name] == message["usage"][name] is not None
    assert events[-1][1] == {"type": "message_stop"}


def test_a_stop_sequence_is_reported_and_not_shown(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**GREEDY, max_tokens=40)
    assert whole.content[0].type == "text"
    text = whole.content[0].text
    word = text.split()[4]
    answer = client.messages.create(**GREEDY, max_tokens=40, stop_sequences=["@@@", word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert answer.content[0].type == "text"
    assert answer.content[0].text == text[: text.index(word)]
    with client.messages.stream(**GREEDY, max_tokens=40, stop_sequences=[word]) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", word)


@pytest.mark.full
def test_an_answer_that_ends_by_itself(client: anthropic.Anthropic, site: Site) -> None:
    """Every end except a stop sequence is the end of the turn."""
    answer = client.messages.create(
        **GREEDY, max_tokens=400, system="Be brief.", stop_sequences=["@@@"]
    )
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens < 400


def test_the_end_of_the_context_ends_an_answer(client: anthropic.Anthropic) -> None:
    """Clients request as much as the largest models generate."""
    talk: Any = [{"role": "user", "content": "dog " * 485}]
    count = client.messages.count_tokens(model=MODEL, messages=talk).input_tokens
    assert count < 512
    answer = client.messages.create(model=MODEL, messages=talk, max_tokens=8_000, **COLD)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert count + answer.usage.output_tokens == 512


async def _abort_all(site: Site) -> None:
    site.parts.generations.abort_all("the server is being stopped")


def test_a_failure_in_the_middle_is_an_event(client: anthropic.Anthropic, site: Site) -> None:
    with client.messages.stream(**GREEDY, max_tokens=400) as stream:
        for _ in stream.text_stream:
            site.server.call(_abort_all(site))
            break
        with pytest.raises(anthropic.APIStatusError, match="being stopped") as error:
            stream.until_done()
    assert error.value.body == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "the server is being stopped",
            "details": {"error_code": "aborted"},
        },
    }
    site.at_rest()


def test_a_disconnected_reader_ends_the_request(client: anthropic.Anthropic, site: Site) -> None:
    with client.messages.stream(**GREEDY, max_tokens=450) as stream:
        next(iter(stream.text_stream))
    site.at_rest()


def test_consecutive_messages_of_one_role_are_one(client: anthropic.Anthropic) -> None:
    one = client.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": "A dog.\nA cat."}]
    )
    two = client.messages.count_tokens(
        model=MODEL,
        messages=[{"role": "user", "content": "A dog."}, {"role": "user", "content": "A cat."}],
    )
    assert one == two


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "system": [{"type": "text", "text": "You tell stories."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Of a horse, please."}]}
        ],
    }
    count = client.messages.count_tokens(**asked)
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert usage.input_tokens == count.input_tokens > 10


def test_metadata_and_unknown_fields_do_no_harm(client: anthropic.Anthropic) -> None:
    answer = client.messages.with_raw_response.create(
        **PLAIN,
        max_tokens=2,
        metadata={"user_id": "somebody"},
        service_tier="auto",
        extra_body={"moon_phase": "full"},
    )
    assert answer.headers["x-kvik-ignored-fields"] == "moon_phase"


@pytest.mark.parametrize("missing", ["anthropic-version", "x-api-key"])
def test_headers_that_are_not_needed_may_be_missing(server: HttpServer, missing: str) -> None:
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    del headers[missing]
    body = {**PLAIN, "max_tokens": 1}
    answer = httpx2.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["request-id"]
