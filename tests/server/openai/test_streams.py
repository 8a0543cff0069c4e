"""The chunks of a stream, joined, are the response to the same request."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from kvik.engine import wire

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "Once upon a time there was a small"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me of a dog."}]},
    TEXT: {"prompt": PROMPT},
}
COUNTS = {"include_usage": True, "continuous_usage_stats": True}
DRAWN = {"n": 3, "temperature": 1.0, "seed": 7}
MANY = {**DRAWN, "n": 2, "prompt": [PROMPT, "The cat", "Tom and Sue went to the park"]}
SCORED = {"echo": True, "logprobs": 2, "prompt_logprobs": 1}


def join(one: Any, other: Any) -> Any:
    """Return two parts of a choice as one."""
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, dict):
        return {name: join(one.get(name), other.get(name)) for name in one | other}
    return one + other if isinstance(one, str | list) else other


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Return the choices, none of which continues after its end, and what is known of the
    prompt."""
    whole: dict[str, Any] = {}
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            before = choices.get(choice["index"], {})
            assert before.get("finish_reason") is None
            choices[choice["index"]] = join(before, choice)
        assert not {"prompt_logprobs"} & whole.keys() & chunk.keys()
        whole |= {name: chunk[name] for name in chunk if name.startswith("prompt_")}
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_null(one) for name, one in value.items() if one is not None}
    return value


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (CHAT, {**DRAWN, "return_token_ids": True}),
        (CHAT, {"logprobs": True, "top_logprobs": 3, "return_tokens_as_token_ids": True}),
        (CHAT, {**DRAWN, "logprobs": True, "prompt_logprobs": 1}),
        (CHAT, {"stop": [".", "zzz"], "max_tokens": 40}),
        (TEXT, {"logprobs": 1, "echo": True}),
        (TEXT, {**MANY, "return_token_ids": True}),
        (TEXT, {**MANY, **SCORED}),
        (TEXT, {**MANY, **SCORED, "n": 1, "max_tokens": 0}),
    ],
    ids=str,
)
def test_a_stream_joins_to_the_response(
    http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, path: str, changes: dict[str, Any]
) -> None:
    """In however many parts the engine sends log probabilities of the prompt."""
    body = {**BODIES[path], "temperature": 0, "max_tokens": 12, **changes}
    whole = http.post(path, json=body).json()
    usage = whole["usage"]
    expected = {name: whole[name] for name in whole if name.startswith("prompt_")}
    expected["choices"] = [without_null(choice) for choice in whole["choices"]]
    for values, options in ((1, None), (1000, COUNTS)):
        monkeypatch.setattr(wire, "MAX_VALUES", values)
        asked = {**body, "stream": True, "stream_options": options}
        *lines, done, end = http.post(path, json=asked).text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert len({chunk["id"] for chunk in chunks}) == 1
        if options is not None:
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            last = chunks.pop()
            assert last["choices"] == [] and last["usage"].keys() == usage.keys()
            assert last["usage"]["total_tokens"] == usage["total_tokens"]
        assert len(chunks) > len(whole["choices"])
        found = joined(chunks)
        for choice in found["choices"]:
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
        found["choices"] = [without_null(choice) for choice in found["choices"]]
        assert found == expected
