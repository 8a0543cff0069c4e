"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import TokenLogprobs
from kvik.engine.output import CompletionOutput, RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.openai.answers import (
    FINGERPRINT,
    ChatLogprobs,
    PromptLogprobs,
    ResponseHead,
    StreamUsage,
    TokenNames,
    Usage,
    usage_of,
)
from kvik.server.openai.requests import (
    GenerationFields,
    Limit,
    Logprobs,
    asked_tokens,
    check_logprobs,
    check_output_fits,
    check_stream,
    generation_request,
    kept_tokens,
    limit_of,
    sampling_changes,
)
from kvik.server.responses import (
    DONE,
    HOLE,
    ResponseFormat,
    Template,
    encode_in_chunks,
    event,
    generation_response,
    json_event,
    offload,
)
from kvik.server.route import caller_of, post, routes_of, trace_parent_of
from kvik.server.server import Server
from kvik.server.texts import Texts
from kvik.server.unhonoured import SAMPLING, TOOLS, Table, refuse
from kvik.text.chat_template import MAX_MESSAGES

Variable = str | int | float | bool | None


class ContentPart(Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(Struct, kw_only=True):
    """A message. The template decides in which order roles may come."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationFields, kw_only=True):
    """A conversation to answer."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None

    parallel_tool_calls: Any = None  # there are no tools


_MEDIA = "only text is supported"
_REASONING = "reasoning is not controlled yet"
CHAT: Table = {
    **SAMPLING,
    "chat_template": ((), "the template is the model's own"),
    "tools": (([],), TOOLS),
    "tool_choice": (("none", "auto"), TOOLS),
    "functions": (([],), TOOLS),
    "function_call": (("none", "auto"), TOOLS),
    "modalities": ((["text"], []), _MEDIA),
    "audio": ((), _MEDIA),
    "reasoning_effort": (("none",), _REASONING),
    "thinking_token_budget": ((), _REASONING),
    "enable_thinking": ((), "put it into chat_template_kwargs"),
    "verbosity": (("medium",), "is not supported"),
    "web_search_options": ((), "there is no search"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "is for /v1/completions"),
    "mm_processor_kwargs": (({},), _MEDIA),
}
MESSAGE: Table = {
    "tool_calls": (([],), TOOLS),
    "tool_call_id": ((), TOOLS),
    "function_call": ((), TOOLS),
    "audio": ((), _MEDIA),
}


class AnswerMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None  # the stop string or stop id that ended it
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """`usage`: absent unless the request asks for it; null then in chunks without it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # in the first chunk
    prompt_token_ids: list[int] | UnsetType = UNSET  # likewise


@post("/v1/chat/completions", CHAT, answer=ChatCompletion, note="Answer a conversation.")
async def chat(server: Server, request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    model = server.served_name(body.model)
    params = chat_params(body, server.default_params)
    tenant = caller_of(request).tenant
    server.generations.check_room(tenant, params.n)
    name, max_tokens = asked_tokens(body, body.max_completion_tokens)
    most = kept_tokens(server, body.truncate_prompt_tokens, max_tokens)
    ids = await conversation_ids(server.texts.of(tenant), body.messages, body, most)
    with rename_fields(prompt="messages", max_tokens=name):
        check_output_fits(server, len(ids), max_tokens, name)
        check_logprobs(server, [ids], params, "prompt_logprobs", "top_logprobs")
        generation = await server.generations.start(
            generation_request(body, ids, params, "messages"),
            tenant,
            streaming=bool(body.stream),
            trace_parent=trace_parent_of(request),
        )
    by_id = bool(body.return_tokens_as_token_ids)
    names = TokenNames(server.texts.tokenizer, by_id=by_id)
    head = ResponseHead(f"chatcmpl-{generation.request_id}", model)
    form = ChatFormat(head, body, names, ids)
    return await generation_response(request, [generation], form, stream=bool(body.stream))


def chat_params(body: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a body. Without a limit an answer may fill the context.

    Raises:
        ParamError: a value is impossible, or nothing that the engine honours.
    """
    check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise ParamError("top_logprobs", "needs logprobs to be true")
    name, asked = asked_tokens(body, body.max_completion_tokens)
    if asked == 0:
        raise ParamError(name, "must be at least 1")
    # The default limit is for callers in Python; only that of the model's file counts here.
    own = defaults.max_tokens if defaults.max_tokens != SamplingParams().max_tokens else None
    changes = sampling_changes(body)
    changes["max_tokens"] = own if asked is None else limit_of(asked)
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    return defaults.with_changes(**changes)


# Names that a template gets anyway, or that would replace it.
_RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
_TEMPLATE_ROLES = {"developer": "system"}  # a newer name, which few templates know
_TOOL_ROLES = ("tool", "function")


class RenderOptions(Protocol):
    """Fields of a body that say how its conversation becomes a prompt.

    Attributes:
        chat_template_kwargs: variables for the template.
        add_generation_prompt: None is true, unless the final message is continued.
        continue_final_message: end where the last message does, to continue it.
        add_special_tokens: in addition to those of the template.
    """

    chat_template_kwargs: dict[str, Variable] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None


async def conversation_ids(
    texts: Texts,
    messages: Sequence[ChatMessage],
    options: RenderOptions,
    most: int | None = None,
) -> list[int]:
    """Return the token ids of a conversation, ready for the assistant's answer.

    Args:
        most: tokens to keep, from the end; None: all.

    Raises:
        ParamError: the messages are malformed or too long, or the template refuses them.
    """
    text = await conversation_text(texts, messages, options)
    with rename_fields(prompt="messages"):
        return await texts.encode(text, bool(options.add_special_tokens), most)


async def conversation_text(
    texts: Texts, messages: Sequence[ChatMessage], options: RenderOptions
) -> str:
    """Return the prompt that the chat template makes of a conversation.

    Raises:
        ParamError: the messages are malformed, or the template refuses them.
    """
    variables, continues = options.chat_template_kwargs, options.continue_final_message
    if continues and options.add_generation_prompt:
        raise ParamError("continue_final_message", "excludes add_generation_prompt")
    for name in variables or ():
        if name in _RESERVED_VARIABLES:
            raise ParamError("chat_template_kwargs", f"must not set {name}")
    plain = await offload(len(messages), lambda: [_plain(message) for message in messages])
    if continues:
        return await texts.render_to_continue(plain, variables)
    answers = options.add_generation_prompt is not False
    return await texts.render(plain, add_generation_prompt=answers, variables=variables)


def _plain(message: ChatMessage) -> dict[str, object]:
    refuse({name: getattr(message, name) for name in MESSAGE}, MESSAGE, "messages")
    if message.role in _TOOL_ROLES:
        raise ParamError("messages", f"of role {message.role!r} need tools, not supported yet")
    plain: dict[str, object] = {
        "role": _TEMPLATE_ROLES.get(message.role, message.role),
        "content": _text(message.content),
    }
    for name in ("name", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    return plain


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None:
        raise ParamError("messages", "need a content, a string or a list of text parts")
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise ParamError(
                "messages", f"have a part of type {part.type[:40]!r}; only text is supported"
            )
        if part.text is None:
            raise ParamError("messages", "have a text part without text")
    return "\n".join(part.text or "" for part in content)


class ChatFormat(ResponseFormat):
    """A chat as a `ResponseFormat`: the role first, then text, then the finish reason.

    Args:
        prompt: token ids of the whole conversation.
    """

    def __init__(
        self, head: ResponseHead, body: ChatRequest, names: TokenNames, prompt: list[int]
    ) -> None:
        self._head = head
        self._names = names
        self._logprobs = bool(body.logprobs)
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids = prompt if self._token_ids else UNSET
        self._usage = StreamUsage(body.stream_options, len(prompt))
        self._templates: dict[int, Template] = {}  # by completion, once it has begun

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=usage_of(outputs),
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=self._of_prompt(output.prompt_logprobs),
            prompt_token_ids=self._prompt_ids,
        )

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        usage = json_event(self._chunk([], usage_of(outputs))) if self._usage.final else b""
        return usage + DONE

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        logprobs = completion.logprobs or []
        return ChatChoice(
            index=completion.index,
            message=AnswerMessage(completion.text),
            logprobs=self._names.whole_chat(logprobs) if self._logprobs else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._token_ids else UNSET,
        )

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        self._usage.count(len(delta.token_ids))
        index = delta.index
        if index not in self._templates:
            text = ChunkChoice(index, Delta(content=HOLE))
            self._templates[index] = Template(self._chunk([text], self._usage.unknown))
            role = ChunkChoice(index, Delta(role="assistant", content=""))
            first = self._chunk([role], self._usage.so_far)
            first.prompt_logprobs = self._of_prompt(delta.prompt_logprobs)
            first.prompt_token_ids = self._prompt_ids
            yield event(encode_in_chunks(first))
        logprobs = self._names.chat(delta.logprobs) if self._logprobs and delta.logprobs else None
        token_ids = delta.token_ids if self._token_ids and delta.token_ids else UNSET
        if logprobs is not None or token_ids or (delta.text and self._usage.each):
            content = Delta(content=delta.text)
            yield self._event(ChunkChoice(index, content, logprobs, token_ids=token_ids))
        elif delta.text:
            yield self._templates[index].fill(delta.text)
        if delta.finish_reason is not None:
            yield self._event(
                ChunkChoice(
                    index,
                    Delta(),
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )

    def _of_prompt(
        self, logprobs: Sequence[TokenLogprobs | None] | None
    ) -> PromptLogprobs | UnsetType:
        if not self._prompt_logprobs or logprobs is None:
            return UNSET
        return self._names.prompt(logprobs)

    def _event(self, choice: ChunkChoice) -> bytes:
        return json_event(self._chunk([choice], self._usage.so_far))

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=FINGERPRINT,
        )


routes = routes_of(chat)
