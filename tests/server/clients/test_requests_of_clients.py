"""Requests of third-party programs, field by field: every one is answered.

They were taken from what these programs send; programs that are installed, or libraries that are
easy to get, run in other tests.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.http_server import Reply, ask
from helpers.story_site import Site, site_fixture
from helpers.tools import TEMPLATE, WEATHER

from kvik.server.access import read_keys

KEY = {"authorization": "Bearer right"}
CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


locked = site_fixture(keys=read_keys(["right"]))  # as people run it


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def in_parts(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


USAGE = {"include_usage": True}
COUNTS = {"include_usage": True, "continuous_usage_stats": True}
STREAM = {"stream": True, "stream_options": USAGE}
LOAD = {"max_tokens": 12, "ignore_eos": True, **STREAM}  # sent by load generators
ONCE = "Once upon a time"
CHAT_LOAD = {"messages": [in_parts(ONCE)], "max_completion_tokens": 12, "ignore_eos": True}

# program -> path, and body without the model
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "vllm bench serve",
        TEXT,
        {"prompt": ONCE, "repetition_penalty": 1.0, "logprobs": None, "temperature": 0.0, **LOAD},
    ),
    (
        "vllm bench serve, token ids",
        TEXT,
        {"prompt": [1, 5, 9, 300], "repetition_penalty": 1.0, "logprobs": 3, **LOAD},
    ),
    ("vllm bench serve, chat", CHAT, {**CHAT_LOAD, **STREAM}),
    ("vllm bench serve, embeddings", VECTORS, {"input": ONCE, "truncate_prompt_tokens": -1}),
    (
        "guidellm, chat",
        CHAT,
        {**CHAT_LOAD, "stream": True, "stream_options": COUNTS, "max_tokens": 12, "stop": None},
    ),
    (
        "guidellm, completions",
        TEXT,
        {"prompt": ONCE, "stop": None, **LOAD, "stream_options": COUNTS},
    ),
    ("guidellm, embeddings", VECTORS, {"input": "Once upon", "encoding_format": "float"}),
    ("inference-perf", TEXT, {"prompt": ONCE, **LOAD}),
    (
        "Open WebUI",
        CHAT,
        {
            "messages": [said("Be brief.", "system"), said("Hi")],
            "temperature": 0.8,
            "top_p": 0.9,
            "frequency_penalty": 0,
            "seed": 42,
            "stop": ["###"],
            **STREAM,
        },
    ),
    (
        "Open WebUI, a title",
        CHAT,
        {"messages": [said("A title for: Hi")], "stream": False, "max_completion_tokens": 50},
    ),
    (
        "LiteLLM hosted_vllm",
        CHAT,
        {
            "messages": [said("Hi")],
            "temperature": 0.2,
            "top_p": 1,
            "n": 1,
            "max_tokens": 12,
            "presence_penalty": 0,
            "user": "team-1",
            **STREAM,
        },
    ),
    ("LiteLLM hosted_vllm", VECTORS, {"input": ["one", "two"], "encoding_format": "float"}),
    (
        "LangChain ChatOpenAI",
        CHAT,
        {
            "messages": [
                said("Be brief.", "system"),
                said("Hi"),
                said("Yes?", "assistant"),
                said("Go on."),
            ],
            "temperature": 0.7,
            "n": 1,
            "stream": False,
            "max_completion_tokens": 12,
            "logprobs": True,
            "top_logprobs": 2,
            "seed": 7,
            "stop": ["\n\n"],
            "service_tier": "auto",
            "store": False,
            "metadata": {"run": "1"},
        },
    ),
    (
        "LangChain OpenAIEmbeddings",
        VECTORS,
        {"input": [[1, 5, 9], [1, 7]], "encoding_format": "base64"},
    ),
    (
        "LlamaIndex OpenAILike, chat",
        CHAT,
        {"messages": [in_parts("Hi")], "stream": False, "temperature": 0.1, "max_tokens": 12},
    ),
    (
        "LlamaIndex OpenAILike, completions",
        TEXT,
        {"prompt": "Once", "stream": True, "temperature": 0.1, "max_tokens": 12},
    ),
    (
        "lm-eval local-chat-completions",
        CHAT,
        {
            "messages": [said("Hi")],
            "max_tokens": 12,
            "temperature": 0,
            "stop": ["\n\n", "Q:"],
            "seed": 1234,
        },
    ),
    (
        "lm-eval local-completions",
        TEXT,
        {
            "prompt": [[1, 5, 9, 12], [1, 7]],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
            "seed": 1234,
        },
    ),
    (
        "Cline",
        CHAT,
        {
            "messages": [said("You are a coder. " * 15, "system"), in_parts("Hi")],
            "temperature": 0,
            **STREAM,
        },
    ),
    (
        "Continue",
        CHAT,
        {"messages": [said("Hi")], "max_tokens": 100, "stream": True, "temperature": 0.5},
    ),
    ("SageMaker, chat", "/invocations", {"messages": [said("Hi")], "max_tokens": 5}),
    ("SageMaker, text", "/invocations", {"prompt": "Once", "max_tokens": 5, **STREAM}),
    ("SageMaker, embeddings", "/invocations", {"input": ["one", "two"]}),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "path", "body"), [pytest.param(*row, id=row[0]) for row in REQUESTS]
)
def test_it_is_answered(locked: Site, program: str, path: str, body: dict[str, Any]) -> None:
    reply = ask(locked.server, "POST", path, {"model": "stories", **body}, **KEY)
    assert reply.status == 200, reply.body
    assert "x-kvik-ignored-fields" not in reply.headers  # all fields were understood
    if body.get("stream"):
        check_stream(reply, body)
    else:
        assert reply.json["usage"]["prompt_tokens"] > 0
        texts = [c.get("text", c.get("message")) for c in reply.json.get("choices", ())]
        assert texts or reply.json["data"]


FUNCTION = {"name": "get_weather", "description": "Now.", "parameters": WEATHER}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3 °C"}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

# As `REQUESTS`, for agents, with the fields reported as ignored.
AGENTS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "LangChain bind_tools",
        CHAT,
        {
            "messages": [said("Hi"), CALLED, RESULT],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "stream": False,
            "max_completion_tokens": 30,
        },
        "",
    ),
    (
        "LangChain with_structured_output",
        CHAT,
        {
            "messages": [said("Hi")],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "parallel_tool_calls": False,
            "response_format": {"type": "text"},
            "max_completion_tokens": 60,
        },
        "",
    ),
    (
        "LlamaIndex FunctionAgent",
        CHAT,
        {
            "messages": [in_parts("Hi"), CALLED, RESULT],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0.1,
            "max_tokens": 60,
            **STREAM,
        },
        "",
    ),
    (
        "Codex CLI",
        RESPONSES,
        {
            "instructions": "You are a coder.",
            "input": [
                {"type": "message", "role": "developer",
                 "content": [{"type": "input_text", "text": "Be brief."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
                {"type": "function_call", "call_id": "call_1", "name": "get_weather",
                 "namespace": "mcp__n__", "arguments": '{"city": "Oslo", "days": 1}'},
                {"type": "function_call_output", "call_id": "call_1", "output": "3"},
            ],
            "tools": [
                {"type": "namespace", "name": "mcp__n__", "description": "Weather.",
                 "tools": [{"type": "function", "defer_loading": True, **FUNCTION}]},
                {"type": "custom", "name": "apply_patch", "description": "Edits.",
                 "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}},
                {"type": "web_search"},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "thread-1",
            "client_metadata": {"turn": "1"},
            "max_output_tokens": 30,
        },
        "tools.apply_patch.format, tools.web_search, reasoning.effort",
    ),
    (
        "Claude Code",
        MESSAGES,
        {
            "system": [
                {"type": "text", "text": "You are a coder.",
                 "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "system", "content": "Be brief."},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "toolu_1", "name": "get_weather",
                     "input": {"city": "Oslo", "days": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"},
                    {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
                ]},
            ],
            "tools": [
                {"name": "get_weather", "description": "Now.", "input_schema": WEATHER},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
                {"type": "mcp_toolset", "mcp_server_name": "notes"},
            ],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "somebody"},
            "temperature": 1,
            "max_tokens": 30,
            "stream": True,
        },
        "tools.web_search_20250305, tools.mcp_toolset, output_config.effort",
    ),
]  # fmt: skip


tooled = site_fixture(template=TEMPLATE)


@pytest.mark.parametrize(
    ("program", "path", "body", "ignored"), [pytest.param(*row, id=row[0]) for row in AGENTS]
)
def test_an_agent_is_answered(
    tooled: Site, program: str, path: str, body: dict[str, Any], ignored: str
) -> None:
    reply = ask(tooled.server, "POST", path, {"model": "stories", **body})
    assert reply.status == 200, reply.body
    assert reply.headers.get("x-kvik-ignored-fields", "") == ignored


def check_stream(reply: Reply, body: dict[str, Any]) -> None:
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, end = reply.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert reasons[-1] in ("stop", "length")
    if options := body.get("stream_options"):
        *others, last = chunks
        assert last["choices"] == []
        count = last["usage"]["completion_tokens"]
        if body.get("ignore_eos"):
            assert count == body.get("max_tokens", body.get("max_completion_tokens"))
        if options.get("continuous_usage_stats"):
            seen = [chunk["usage"]["completion_tokens"] for chunk in others]
            assert seen == sorted(seen) and seen[-1] == count


# Every route that samples, with a valid body.
SAMPLING: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [said("Hi")], "max_tokens": 1},
    TEXT: {"prompt": "Once", "max_tokens": 1},
    "/v1/generate": {"prompt": "Once", "max_tokens": 1},
    "/v1/messages": {"model": "stories", "messages": [said("Hi")], "max_tokens": 1},
    "/completion": {"prompt": "Once", "n_predict": 1},
}
# Parameters of other engines: field -> a value with an effect, and some without
OTHERS: dict[str, tuple[Any, list[Any]]] = {
    "structural_tag": ("{}", [""]),
    "lora": ([{"id": 0, "scale": 0.5}], [[], None]),
    "mirostat_mode": (2, [0]),
    "xtc_probability": (0.5, [0.0]),
    "tfs_z": (0.9, [1.0, 1]),
    "top_n_sigma": (1.0, [-1]),
    "samplers": (["top_k"], [[]]),
    "repeat_last_n": (64, [-1]),
    "do_sample": (False, [True]),
    "best_of": (2, [1]),
    "use_beam_search": (True, [False]),
    "max_new_tokens": (5, [None]),
    "max_output_tokens": (5, [None]),
    "stop_regex": ("a+", [""]),
    "sampling_params": ({"temperature": 0}, [{}]),
}


@pytest.mark.parametrize("path", SAMPLING)
def test_fields_of_other_engines_are_refused_by_name(locked: Site, path: str) -> None:
    for field, (asking, harmless) in OTHERS.items():
        reply = ask(locked.server, "POST", path, {**SAMPLING[path], field: asking}, **KEY)
        assert reply.status == 400, field
        assert field in reply.json["error"]["message"]
        if path != "/v1/messages":
            assert reply.error["param"] == field
        for value in harmless:
            reply = ask(locked.server, "POST", path, {**SAMPLING[path], field: value}, **KEY)
            assert reply.status == 200, (field, value, reply.body)
            assert "x-kvik-ignored-fields" not in reply.headers


@pytest.mark.parametrize(
    ("path", "field", "value", "neutral"),
    [
        ("/v1/generate", "typical_p", 0.5, 1),
        ("/v1/generate", "truncate_prompt_tokens", 5, None),
        ("/v1/messages", "return_token_ids", True, False),
        ("/completion", "return_token_ids", True, False),
        ("/completion", "logit_bias", [[5, 1.0]], []),
        ("/v1/messages", "frequency_penalty", 1, 0),
        ("/v1/messages", "repeat_penalty", 1.1, 1.0),
        ("/v1/messages", "seed", 5, None),
        ("/v1/messages", "stop", "a", []),
        ("/v1/messages", "response_format", {"type": "json_object"}, {"type": "text"}),
        ("/v1/messages", "structured_outputs", {"choice": ["a"]}, {}),
        ("/v1/messages", "grammar", "start: /a/", ""),
        (TEXT, "max_completion_tokens", 5, None),
        (TEXT, "suffix", "the end", ""),
        ("/v1/messages", "reasoning_effort", "low", None),
        ("/v1/messages", "instructions", "Be brief.", ""),
        (RESPONSES, "chat_template_kwargs", {"enable_thinking": False}, {}),
        (RESPONSES, "messages", [said("Hi")], []),
        (TEXT, "tools", [{"type": "function", "function": {"name": "now"}}], []),
        (CHAT, "enable_thinking", False, None),
        (CHAT, "thinking", {"type": "disabled"}, {}),
        (CHAT, "instructions", "Be brief.", ""),
        (CHAT, "text", {"format": {"type": "json_object"}}, {"format": {"type": "text"}}),
    ],
)
def test_fields_of_other_routes_are_refused_by_name(
    locked: Site, path: str, field: str, value: Any, neutral: Any
) -> None:
    body = SAMPLING.get(path, {"input": "Hi", "max_output_tokens": 1})
    reply = ask(locked.server, "POST", path, {**body, field: value}, **KEY)
    assert reply.status == 400 and field in reply.json["error"]["message"]
    reply = ask(locked.server, "POST", path, {**body, field: neutral}, **KEY)
    assert reply.status == 200 and "x-kvik-ignored-fields" not in reply.headers


@pytest.mark.parametrize(
    ("path", "body", "honoured"),
    [
        (RESPONSES, {"input": "Hi", "max_output_tokens": 1}, "text.format"),
        (MESSAGES, SAMPLING[MESSAGES], "output_config.format"),
    ],
)
def test_the_field_for_structured_texts_is_named(
    locked: Site, path: str, body: dict[str, Any], honoured: str
) -> None:
    for field in ("response_format", "structured_outputs", "guided_json"):
        reply = ask(locked.server, "POST", path, {**body, field: {"type": "json_object"}}, **KEY)
        assert reply.status == 400 and honoured in reply.json["error"]["message"]


def test_fields_without_effect_on_answers_are_accepted(locked: Site) -> None:
    for path, body in SAMPLING.items():
        for field in ("rid", "guided_decoding_backend", "colour"):
            reply = ask(locked.server, "POST", path, {**body, field: "x"}, **KEY)
            assert reply.status == 200
            assert reply.headers["x-kvik-ignored-fields"] == field


@pytest.mark.full
@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/generate"])
def test_names_of_llama_cpp_are_honoured(locked: Site, path: str) -> None:
    asked = {name: SAMPLING[path][name] for name in SAMPLING[path] if name != "max_tokens"}
    asked.update(n_predict=3, repeat_penalty=1.2, temperature=0, ignore_eos=True)
    reply = ask(locked.server, "POST", path, asked, **KEY)
    assert reply.status == 200, reply.body
    count = reply.json.get("tokens_generated") or reply.json["usage"]["completion_tokens"]
    assert count == 3
    reply = ask(locked.server, "POST", path, {**asked, "n_predict": 5000}, **KEY)
    if path != "/v1/generate":  # it ends with the context
        assert (reply.status, reply.error["param"]) == (400, "n_predict")


@pytest.mark.parametrize(
    ("program", "path", "key"),
    [
        ("Open WebUI", "/v1/models", True),
        ("guidellm", "/health", False),
        ("guidellm", "/v1/models", True),
        ("lm-eval", "/tokenizer_info", True),
        ("Kubernetes", "/ready", False),
        ("SageMaker", "/ping", False),
        ("Prometheus", "/metrics", True),
    ],
)
def test_requests_before_the_first_prompt(locked: Site, program: str, path: str, key: bool) -> None:
    assert ask(locked.server, "GET", path, **KEY).status == 200
    assert ask(locked.server, "GET", path).status == (401 if key else 200)


@pytest.mark.parametrize("base", ["/v1", ""])
def test_what_is_not_stored_is_not_found_and_says_what_to_do(locked: Site, base: str) -> None:
    for method, path, hint in (
        ("POST", "/responses/compact", "previous_response_id"),
        ("POST", "/conversations", "previous_response_id"),
        ("GET", "/conversations/conv_1/items", "previous_response_id"),
        ("GET", "/chat/completions/chatcmpl-1", "send all of it"),
        ("POST", "/batches", "kvik generate"),
    ):
        missing = ask(locked.server, method, f"{base}{path}", {}, **KEY)
        assert missing.status == 404 and hint in missing.error["message"]


@pytest.mark.parametrize("path", [*SAMPLING, VECTORS])
def test_a_base_url_may_lack_its_end(locked: Site, path: str) -> None:
    body = SAMPLING.get(path, {"input": "Once"})
    for asked in (path, path.removeprefix("/v1")):
        assert ask(locked.server, "POST", asked, body, **KEY).status == 200
        assert ask(locked.server, "POST", asked, body).status == 401
        wrong = ask(locked.server, "POST", asked, {}, **KEY)
        assert wrong.status == 400
        assert ("type" in wrong.json) == (path == "/v1/messages")
    for one in ("/models", "/models/stories", "/engine"):
        assert ask(locked.server, "GET", one, **KEY).status == 200
    for method, asked, meant in (
        ("GET", "/v1/v1/models", "/v1/models"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/v1/responses/", "/v1/responses"),
    ):
        wrong = ask(locked.server, method, asked, {}, **KEY)
        assert wrong.status == 404 and f"did you mean {meant}?" in wrong.error["message"]
    assert "mean" not in ask(locked.server, "GET", "/wp-admin.php", **KEY).error["message"]
    described = ask(locked.server, "GET", "/openapi.json").json["paths"]
    assert path in described and (
        path == "/completion" or path.removeprefix("/v1") not in described
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 5},
        {"prompt": "a", "messages": [said("Hi")]},
        {"prompt": None},
        {"instances": ["a"]},
    ],
)
def test_a_shared_path_refuses_ambiguous_bodies(locked: Site, body: dict[str, Any]) -> None:
    reply = ask(locked.server, "POST", "/invocations", body, **KEY)
    assert reply.status == 400
    assert "messages" in reply.error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [said("Hi")], "temperature": -1}, "temperature"),
        ({"prompt": "Hi", "n": 10**9}, "n"),
        ({"input": ""}, "input"),
        ({"input": "Hi", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_requests_refused_as_by_other_servers(
    locked: Site, body: dict[str, Any], param: str
) -> None:
    reply = ask(locked.server, "POST", "/invocations", body, **KEY)
    assert (reply.status, reply.error["param"]) == (400, param)
