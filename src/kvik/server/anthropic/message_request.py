"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.core.sampling_params import MAX_STOP_BYTES, MAX_STOP_STRINGS
from kvik.server.openai.fields import MAX_INT32, Name
from kvik.text.chat_template import MAX_MESSAGES

StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]


class CacheControl(Struct, kw_only=True):
    """The prompt up to here is kept in the prefix cache, for so long after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # 5m


class Block(Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    citations: Any = None  # of documents, and there are none


class Message(Struct, kw_only=True):
    """One turn. Turns of one role that follow each other are one."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class CountRequest(Struct, kw_only=True):
    """A conversation, whose tokens are counted."""

    model: Name
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    cache_control: CacheControl | None = None  # as if it stood at the last block


class MessageRequest(CountRequest, kw_only=True):
    """A conversation to answer. An assistant's message at its end is the beginning of the answer.

    The answer ends with the context, where `max_tokens` would go beyond it. With 0 there is none:
    the prompt is computed, for the cache.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None

    metadata: Any = None  # these change nothing in the answer
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    speed: Any = None
