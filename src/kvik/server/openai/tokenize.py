"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.errors import ParamError
from kvik.server.errors import HttpError, rename_fields
from kvik.server.openai.answers import TokenNames
from kvik.server.openai.conversation import (
    Messages,
    ToolParam,
    Variable,
    conversation_text,
    tool_use,
)
from kvik.server.openai.requests import Name, TokenId, prompt_ids
from kvik.server.responses import json_response, offload
from kvik.server.route import caller_of, get, post, routes_of
from kvik.server.server import Server
from kvik.server.unhonoured import Table


class TokenizeRequest(Struct, kw_only=True):
    """A text, or a conversation that the chat template renders."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    content: Annotated[str, Meta(description="the text, as llama.cpp names it")] | None = None
    add_special: (
        Annotated[bool, Meta(description="with content: add special tokens; default false")] | None
    ) = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    tools: list[ToolParam] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]


TOKENIZE: Table = {"chat_template": ((), "the template is the model's own")}


class Tokenized(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str
    content: str  # the same under llama.cpp's name


class TokenizerInfo(Struct, kw_only=True):
    """The data a client needs to tokenise and render as this server does."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    vocab_size: int
    max_model_len: int
    special_tokens: list[str]


@post("/tokenize", TOKENIZE, answer=Tokenized, note="Token ids of a text or a conversation.")
async def tokenize(server: Server, request: Request, body: TokenizeRequest) -> Response:
    """Return the token ids of a text, which may be empty, or of a conversation."""
    server.served(body.model)
    inputs = [value for value in (body.prompt, body.messages, body.content) if value is not None]
    if len(inputs) != 1:
        raise ParamError("prompt", "must be the only one given of prompt, messages and content")
    if body.add_special is not None and body.content is None:
        raise ParamError("add_special", "is for content; with prompt, use add_special_tokens")
    texts = server.texts.of(caller_of(request).tenant)
    if body.messages is not None:
        use = tool_use(body.tools, None, single=False, texts=texts)
        text = await conversation_text(texts, body.messages, body, use)
        with rename_fields(prompt="messages"):
            ids = await texts.encode(text, bool(body.add_special_tokens))
    elif body.content is not None:
        with rename_fields(prompt="content"):
            ids = await prompt_ids(texts, body.content, bool(body.add_special))
    else:
        ids = await prompt_ids(texts, body.prompt or "", body.add_special_tokens)
    token_strs: list[str] | UnsetType = UNSET
    if body.return_token_strs:
        names = TokenNames(server.texts.tokenizer)
        token_strs = await offload(len(ids), lambda: [names.name(token) for token in ids])
    answer = Tokenized(
        count=len(ids), max_model_len=server.max_model_len, tokens=ids, token_strs=token_strs
    )
    return json_response(answer)


@post("/detokenize", answer=Detokenized, note="Text of token ids.")
async def detokenize(server: Server, request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of tokens, including special tokens."""
    server.served(body.model)
    limit, vocab_size = server.max_model_len, server.engine.config.model.vocab_size
    if len(body.tokens) > limit:
        raise ParamError("tokens", f"at most {limit} (max_model_len), not {len(body.tokens)}")
    if max(body.tokens, default=0) >= vocab_size:
        raise ParamError("tokens", f"must be in 0..{vocab_size - 1}, not {max(body.tokens)}")
    tokens, texts = body.tokens, server.texts
    text = await offload(len(tokens), lambda: texts.decode(tokens, skip_special_tokens=False))
    return json_response(Detokenized(text, text))


@get("/tokenizer_info", answer=TokenizerInfo, note="Special tokens, chat template and sizes.")
async def tokenizer_info(server: Server, request: Request) -> Response:
    """Return the data a client needs to tokenise and render as this server does."""
    tokenizer = server.texts.tokenizer
    if tokenizer is None:
        raise HttpError(404, "this model has no tokenizer", code="no_tokenizer")
    answer = TokenizerInfo(
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        vocab_size=tokenizer.vocab_size,
        max_model_len=server.max_model_len,
        special_tokens=[tokenizer.token(token) for token in sorted(tokenizer.special_ids)],
    )
    return json_response(answer)


routes = routes_of(tokenize, detokenize, tokenizer_info)
