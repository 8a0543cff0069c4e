"""The bodies of answers, field by field as clients of the Anthropic API read them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class CacheCreation(Struct, kw_only=True):
    """Tokens that were written and pinned, by how long they stay."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class Usage(Struct, kw_only=True):
    """The prompt is what was read from the cache, what was written into it and pinned, and
    `input_tokens`, the rest. null: not known yet, and the rest is all of it."""

    input_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    cache_creation: CacheCreation | None
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class TextBlock(Struct):
    text: str
    type: Literal["text"] = "text"


class Answer(Struct, kw_only=True):
    """The assistant's message; at the start of a stream without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(Struct):
    input_tokens: int
