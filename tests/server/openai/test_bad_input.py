"""Bad input is a 400 that names its parameter, and leaks nothing. One row per kind."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx2
import pytest
from helpers.bad_parameters import BAD
from helpers.story_site import Site

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"prompt": "Hi", "max_tokens": 1}
HUGE = "9" * 400  # neither a 64-bit integer nor a float
VOCAB = 2048
STRICT = '{"type": "json_schema", "json_schema": {"strict": true, "schema": {"not": {}}}}'

# Refused by both routes: the field, and its value as JSON text. For sampling parameters, one
# invalid value shows that the name reaches `param`.
BOTH = [
    *((name, json.dumps(values[0])) for name, values in BAD.items()),
    # too large, or impossible for this model
    ("num_beams", "1000000"),
    ("use_beam_search", "true"),
    ("max_tokens", "512"),  # the context, which includes the prompt
    ("min_tokens", "2"),  # more than max_tokens
    ("logit_bias", '{"99999": 1}'),
    ("logit_bias", json.dumps({str(i): 1 for i in range(100_000)})),
    ("allowed_token_ids", f"[{VOCAB}]"),
    ("bad_words", f"[[{VOCAB}]]"),
    ("bad_words", json.dumps(["word " * 200] * 100)),
    ("stop_token_ids", f"[{VOCAB}]"),
    ("stop", json.dumps([str(i) for i in range(10_000)])),
    ("stop", json.dumps("a" * (1 << 20))),
    ("seed", str(2**63)),
    ("priority", str(2**40)),
    ("deadline_ms", "0"),
    ("cache_salt", json.dumps("a" * 129)),
    ("prompt_cache_retention", '"forever"'),
    ("prompt_cache_key", json.dumps("k" * 1000)),
    # constraints on the text
    ("response_format", '{"type": "json_schema"}'),
    ("response_format", '{"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x"}}}'),
    ("response_format", STRICT),
    ("guided_json", '"{"'),
    ("guided_regex", '"("'),
    ("guided_regex", json.dumps("a" * 300_000)),
    ("guided_choice", '[""]'),
    ("guided_grammar", '"start: nothing"'),
    ("structured_outputs", '{"rgex": "a"}'),
    # known fields that would change the answer
    ("logits_processors", '["os.system"]'),
    ("truncate_prompt_tokens", "0"),
    ("truncate_prompt_tokens", "100000"),
    ("return_token_ids", "1"),
    # streams
    ("stream_options", '{"include_usage": true}'),
    ("stream", '"yes"'),
    ("model", "5"),
]
CHAT_ONLY = [
    ("messages", "[]"),
    ("messages", '[{"role": "robot", "content": "Hi"}]'),
    ("messages", '[{"content": "Hi"}]'),
    ("messages", '[{"role": "user"}]'),
    ("messages", '[{"role": "user", "content": 5}]'),
    (
        "messages",
        '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    ),
    ("messages", '[{"role": "user", "content": [{"type": "text"}]}]'),
    ("messages", '[{"role": "tool", "content": "5", "tool_call_id": "a"}]'),
    ("messages", '[{"role": "assistant", "tool_calls": [{"id": "a"}]}]'),
    ("messages", '[{"role": "assistant", "content": "Once", "prefix": true}]'),
    ("messages", '[{"role": "assistant", "content": "Once", "partial": true}]'),
    ("messages", json.dumps([{"role": "user", "content": "word " * 2_000_000}])),
    ("top_logprobs", "5"),  # without logprobs
    ("max_completion_tokens", "0"),
    ("max_completion_tokens", "600"),
    ("tools", json.dumps([{"type": "function", "function": {"name": f"f{i}"}} for i in range(9)])),
    ("tools", '{"$ref": "#"}'),
    ("tool_choice", '"required"'),
    ("tool_choice", '{"type": "function", "function": {"name": "missing"}}'),
    ("functions", '[{"name": "f"}]'),
    ("function_call", '{"name": "f"}'),
    ("chat_template", '"{{ 1 }}"'),
    ("chat_template_kwargs", '{"chat_template": "{{ 1 }}"}'),
    ("chat_template_kwargs", '{"a": {"b": 1}}'),
    ("continue_final_message", "5"),
    ("modalities", '["audio"]'),
    ("reasoning_effort", '"high"'),  # of a model without reasoning
    ("thinking_token_budget", "5"),
    ("verbosity", '"low"'),
    ("web_search_options", "{}"),
    ("documents", '[{"text": "a"}]'),
    ("echo", "true"),
]
TEXT_ONLY = [
    ("prompt", '""'),
    ("prompt", "[-1]"),
    ("prompt", f"[{VOCAB}]"),
    ("prompt", '{"a": 1}'),
    ("prompt", str([[1]] * 129)),
    ("prompt", json.dumps("word " * 5_000_000)),
    ("prompt", json.dumps("\U0001f415" * 2_500_000, ensure_ascii=False)),
    ("best_of", "1000000000"),
    ("suffix", '" the end"'),
    ("prompt_embeds", '"AAAA"'),
    ("logprobs", "true"),
]
ROWS = [
    # The routes have the same fields, so each gets every other row.
    *(("chat/completions", CHAT, *row) for row in BOTH[::2]),
    *(("completions", TEXT, *row) for row in BOTH[1::2]),
    *(("chat/completions", CHAT, *row) for row in CHAT_ONLY),
    *(("completions", TEXT, *row) for row in TEXT_ONLY),
]


def with_field(base: dict[str, Any], field: str, value: str) -> str:
    rest = json.dumps({name: base[name] for name in base if name != field})
    return f'{rest[:-1]}, "{field}": {value}}}'


def ids(value: object) -> str:
    return str(value)[:40] if isinstance(value, str) else ""


@pytest.mark.parametrize(("path", "base", "field", "value"), ROWS, ids=ids)
def test_it_is_refused_by_name(
    http: httpx2.Client, path: str, base: dict[str, Any], field: str, value: str
) -> None:
    started = time.monotonic()
    answer = post(http, path, with_field(base, field, value))
    assert time.monotonic() - started < 10
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.split(r"[.\[]", error["param"] or "")[0] == field, error
    assert error["type"] == "invalid_request_error"
    assert field in error["message"] and len(error["message"]) < 1100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("logprobs", "1e400"),
        ("n", HUGE),
    ],
    ids=ids,
)
def test_invalid_numbers(http: httpx2.Client, field: str, value: str) -> None:
    answer = post(http, "completions", with_field(TEXT, field, value))
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat/completions", "{}", 400),
        ("chat/completions", json.dumps({"messages": [{"role": "user"}] * 100_000}), 400),
        ("completions", '{"prompt": "\\ud800"}', 400),
        ("completions", '{"model": "gpt-9", "prompt": "a"}', 404),
        ("embeddings", '{"input": "a", "dimensions": 7}', 400),
        ("embeddings", '{"input": "a", "encoding_format": "int8"}', 400),
        ("embeddings", '{"input": "a", "pooling": "median"}', 400),
        ("embeddings", '{"input": "a", "model": "gpt-9"}', 404),
    ],
    ids=ids,
)
def test_invalid_requests(http: httpx2.Client, path: str, body: str, status: int) -> None:
    answer = post(http, path, body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


LONG_CHAT = [{"role": "user", "content": "word " * 600}]


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("completions", {"prompt": [1] * 600}, "616 tokens (600 in the prompt, 16 in the"),
        ("completions", {"prompt": [1] * 500, "max_tokens": 13}, "513 tokens (500 in the prompt,"),
        ("chat/completions", {"messages": LONG_CHAT}, "in the messages, 1 in the completion)"),
        ("chat/completions", {"messages": LONG_CHAT, "max_tokens": 7}, ", 7 in the completion)"),
        ("chat/completions", {**CHAT, "max_tokens": 600}, "in the messages, 600 in the completion"),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}]}, "more"),
        ("embeddings", {"input": [1] * 600}, "600 tokens in the input"),
        ("completions", {"prompt": [[1] * 600] * 2}, "600 in the prompt[0]"),
        ("completions", {"prompt": [[1], [1] * 510], "max_tokens": 3}, "510 in the prompt[1]"),
    ],
    ids=ids,
)
def test_both_counts_of_a_prompt_that_is_too_long(
    http: httpx2.Client, path: str, body: dict[str, Any], counts: str
) -> None:
    answer = http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    # LangChain checks the code, LiteLLM these words; others read the counts.
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 512 tokens." in error["message"]
    assert counts in error["message"]


def test_log_probabilities_of_prompts_are_named_as_given(http: httpx2.Client) -> None:
    """Beams have none; otherwise a stream may buffer some."""
    many = {"prompt": [[1] * 500] * 128, "max_tokens": 1}
    for body, field in (
        ({"prompt": [1], "num_beams": 2, "max_tokens": 0, "echo": True}, "echo"),
        ({"prompt": [1], "num_beams": 2, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": [1], "n": 128, "max_tokens": 500, "logprobs": 100}, "logprobs"),
        ({**many, "prompt_logprobs": 100}, "prompt_logprobs"),
        ({**many, "echo": True, "logprobs": 100}, "logprobs"),
    ):
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    chat = {**CHAT, "n": 128, "max_tokens": 500, "logprobs": True, "top_logprobs": 100}
    error = http.post("/v1/chat/completions", json=chat).json()["error"]
    assert error["param"] == "top_logprobs"


def test_texts_of_any_characters_are_read(http: httpx2.Client) -> None:
    for text in ("a\x00b", "\u202e\ufeff", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\ufffd"):
        answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": 1, "echo": True})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"].startswith(text)


def test_a_key_that_is_no_token_id_is_called_a_key(http: httpx2.Client) -> None:
    answer = post(http, "completions", with_field(TEXT, "logit_bias", '{"the": 1}'))
    message = "logit_bias: a key of the object: expected `int`, got `str`"
    assert answer.json()["error"]["message"] == message


def test_nothing_is_left_behind(site: Site) -> None:
    site.at_rest()


def post(http: httpx2.Client, path: str, body: str) -> httpx2.Response:
    headers = {"content-type": "application/json"}
    return http.post(f"/v1/{path}", content=body.encode("utf-8", "surrogatepass"), headers=headers)
