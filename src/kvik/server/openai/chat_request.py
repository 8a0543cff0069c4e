"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.server.openai.fields import Count, Generating, Logprobs
from kvik.text.chat_template import MAX_MESSAGES

Variable = str | int | float | bool | None


class Part(Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class Message(Struct, kw_only=True):
    """One turn. The template decides in which order the roles may come."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None


class ChatRequest(Generating, kw_only=True):
    """A conversation to answer."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None

    parallel_tool_calls: Any = None  # of tools, and there are none
