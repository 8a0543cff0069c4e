"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvik.server.openai.chat_request import Message, Variable
from kvik.server.openai.fields import Name, TokenId
from kvik.text.chat_template import MAX_MESSAGES


class TokenizeRequest(Struct, kw_only=True):
    """A text, or a conversation that the chat template renders."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]
