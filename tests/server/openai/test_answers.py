"""The exact form of usage and chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvik.core.types import RequestSpeculation, TokenLogprobs
from kvik.engine.output import CompletionOutput, RequestMetrics, RequestOutput, TextDelta
from kvik.server.openai.answers import ResponseHead, usage_of
from kvik.server.openai.chat import ChatFormat, ChatRequest
from kvik.server.openai.completions import CompletionFormat, CompletionRequest
from kvik.server.openai.requests import check_choices, split_prompts


def output(
    prompt: int,
    lengths: list[int],
    guessed: Sequence[RequestSpeculation | None] | None = None,
    cached: int = 0,
) -> RequestOutput:
    guessed = [None] * len(lengths) if guessed is None else guessed
    completions = [
        CompletionOutput(i, "", [1] * n, "stop", speculation=one)
        for i, (n, one) in enumerate(zip(lengths, guessed, strict=True))
    ]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * prompt,
        outputs=completions,
        num_cached_tokens=cached,
        num_preemptions=0,
        prompt_logprobs=None,
        metrics=RequestMetrics(0.0, 0.0, 0.0, 1.0),
    )


def test_a_prompt_counts_once_and_each_choice_by_itself() -> None:
    usage = usage_of([output(5, [2, 3], cached=4), output(7, [1, 1])])
    assert msgspec.to_builtins(usage) == {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    }


def guessed(*rows: tuple[int, int], seconds: float = 0.0, plain: float = 0.0) -> RequestSpeculation:
    """Return the counts of rows of (drafts, accepted)."""
    found = RequestSpeculation(seconds=seconds, plain_seconds=plain)
    for drafts, right in rows:
        found.drafts.add(drafts, right)
    return found


def test_counts_of_speculation() -> None:
    one = guessed((3, 2), (4, 3), (1, 0), seconds=2.0, plain=3.0)
    other = guessed((2, 0), seconds=1.0, plain=0.75)
    usage = usage_of([output(1, [9, 2], [one, guessed()]), output(1, [9], [other])])
    assert msgspec.to_builtins(usage.completion_tokens_details) == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 5,
    }
    assert msgspec.to_builtins(usage.speculation) == {
        "checks": 4,
        "drafted_tokens": 10,
        "accepted_tokens": 5,
        "drafted_per_position": [4, 3, 2, 1],
        "accepted_per_position": [2, 2, 1, 0],
        "mean_accepted_length": 2.25,
        "speedup": 1.25,
    }
    assert one.drafts.at == [3, 2, 2, 1]  # unchanged


def test_an_engine_without_drafts_so_far_is_shown_as_such() -> None:
    usage = msgspec.to_builtins(usage_of([output(1, [9], [guessed()])]))
    assert "completion_tokens_details" not in usage
    assert (usage["speculation"]["checks"], usage["speculation"]["drafted_per_position"]) == (0, [])
    assert usage["speculation"]["mean_accepted_length"] is None
    assert usage["speculation"]["speedup"] is None


HEADING = ResponseHead("id-1", "m", 1)
MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatFormat:
    body = msgspec.convert({"messages": MESSAGES, "stream": True, **fields}, ChatRequest)
    return ChatFormat(HEADING, body, None, [0] * 7)


def completion(**fields: Any) -> CompletionFormat:
    body = msgspec.convert({"prompt": "Hi", "stream": True, **fields}, CompletionRequest)
    echoes = ["A", "B"] if body.echo else ["", ""]
    return CompletionFormat(HEADING, body, None, [[1, 2], [3]], echoes)


def delta(text: str, tokens: int = 1, index: int = 0, **fields: Any) -> TextDelta:
    return TextDelta("r", index, text, list(range(tokens)), **fields)


def read(events: bytes) -> list[Any]:
    assert events == b"" or events.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in events.split(b"\n\n") if event]


def test_a_chat_stream_has_its_role_once() -> None:
    stream = chat()
    first = read(stream.grow(0, [delta("a")]))
    assert [event["choices"][0]["delta"] for event in first] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
    ]
    (second,) = read(stream.grow(0, [delta('"b"\n')]))
    assert second == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"content": '"b"\n'}, "logprobs": None, "finish_reason": None}
        ],
        "system_fingerprint": second["system_fingerprint"],
    }
    last = read(stream.grow(0, [delta("c", finish_reason="stop")]))
    assert [event["choices"][0]["finish_reason"] for event in last] == [None, "stop"]
    assert last[1]["choices"][0]["delta"] == {}
    assert stream.end([]) == b"data: [DONE]\n\n"


def test_tokens_without_text_make_no_event() -> None:
    stream = chat()
    stream.grow(0, [delta("a")])
    assert stream.grow(0, [delta("")]) == b""


def test_requested_usage_is_null_until_the_end() -> None:
    for stream in (chat, completion):
        wanting = stream(stream_options={"include_usage": True})
        for event in read(wanting.grow(0, [delta("a", finish_reason="stop")])):
            assert event["usage"] is None
        end = wanting.end([])
        assert end.endswith(b"data: [DONE]\n\n")
        (last,) = read(end.removesuffix(b"data: [DONE]\n\n"))
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 0
        for event in read(stream().grow(0, [delta("a", finish_reason="stop")])):
            assert "usage" not in event


def test_counts_so_far_need_include_usage() -> None:
    """As in vLLM, no chunk has usage without it."""
    for options in ({}, {"include_usage": False}):
        for stream in (chat, completion):
            counting = stream(stream_options={"continuous_usage_stats": True, **options})
            for event in read(counting.grow(0, [delta("a", finish_reason="stop")])):
                assert "usage" not in event
            assert counting.end([]) == b"data: [DONE]\n\n"


@pytest.mark.parametrize("reason", ["END", 7, None])
def test_the_last_chunk_has_the_finish_reason(reason: Any) -> None:
    for stream in (chat, completion):
        ended = delta("a", finish_reason="stop", stop_reason=reason)
        first, *_, last = read(stream().grow(0, [delta("b")]) + stream().grow(0, [ended]))
        assert last["choices"][0]["stop_reason"] == reason
        assert "stop_reason" not in first["choices"][0]


def test_counts_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for stream, prompt in ((chat, 7), (completion, 3)):
        counting = stream(stream_options=options)
        counting.grow(0, [delta("a", 2), delta("b", 3, index=1)])
        (event,) = read(counting.grow(0, [delta("c", 4)]))
        assert event["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 9,
            "total_tokens": prompt + 9,
        }


def test_choices_of_many_prompts_are_counted_through() -> None:
    stream = completion(n=2, echo=True)
    events = read(stream.grow(1, [delta("a", index=1), delta("b", index=0)]))
    assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in events] == [
        (3, "B"),
        (3, "a"),
        (2, "B"),
        (2, "b"),
    ]


def test_tokens_have_numbers_where_there_is_no_tokenizer() -> None:
    stream = chat(logprobs=True, top_logprobs=1)
    known = TokenLogprobs(5, -0.5, 1, ((5, -0.5),))
    never = TokenLogprobs(6, float("-inf"), 9, ((5, -0.1),))
    events = read(stream.grow(0, [delta("", 2, logprobs=[known, never])]))
    shown = events[-1]["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in shown] == ["token_id:5", "token_id:6"]
    assert shown[0]["bytes"] is None
    assert shown[1]["logprob"] == -9999.0  # JSON has no infinity


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", "b"], ["a", "b"]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_of_every_shape(given: Any, prompts: list[Any]) -> None:
    assert list(split_prompts("prompt", given).values()) == prompts


@pytest.mark.parametrize(
    "given", ["", [], [""], [[]], ["a", ""], [[1], []], [1, "a"], ["a", 1], [[1], 1]]
)
def test_no_prompt_is_empty_or_of_another_kind(given: Any) -> None:
    with pytest.raises(ValueError, match="input"):
        split_prompts("input", given)


def test_choices_are_bounded_in_all() -> None:
    check_choices("n", 64, 2)
    with pytest.raises(ValueError, match="130 choices"):
        check_choices("n", 65, 2)
