"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import MAX_INT32, SamplingParams
from kvik.core.types import TokenLogprobs
from kvik.engine.output import CompletionOutput, RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.openai.answers import (
    FINGERPRINT,
    ChatLogprobs,
    Chunks,
    PromptLogprobs,
    ResponseHead,
    TokenNames,
    Usage,
    usage_of,
)
from kvik.server.openai.conversation import (
    MEDIA,
    CalledFunction,
    Choices,
    Messages,
    ToolCall,
    ToolParam,
    Variable,
    begins_anew,
    conversation_text,
    tool_use,
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
    HOLE,
    ResponseFormat,
    Template,
    encode_in_chunks,
    event,
    generation_response,
    start_all,
)
from kvik.server.route import caller_of, post, routes_of
from kvik.server.server import Server
from kvik.server.tools import PLAIN_ANSWER, AnswerForm, check_budget
from kvik.server.unhonoured import SAMPLING, STRUCTURED, Table
from kvik.text.answer_format import AnswerFormat, AnswerReader
from kvik.text.tokenizer import Tokenizer
from kvik.text.tool_calls import AnswerDelta

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationFields, kw_only=True):
    """A conversation to answer."""

    messages: Messages
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Choices | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None


CHAT: Table = {
    **SAMPLING,
    "chat_template": ((), "the template is the model's own"),
    "functions": (([],), "give tools"),
    "function_call": (("none", "auto"), "give tool_choice"),
    "modalities": ((["text"], []), MEDIA),
    "audio": ((), MEDIA),
    "enable_thinking": ((), "put it into chat_template_kwargs"),
    **dict.fromkeys(("reasoning", "thinking"), (({},), "give reasoning_effort")),
    **dict.fromkeys(("instructions", "system"), (("", []), "give a message of the role system")),
    "text": (({}, {"format": {"type": "text"}}), STRUCTURED),
    "verbosity": (("medium",), "is not supported"),
    "web_search_options": ((), "there is no search"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "is for /v1/completions"),
    "mm_processor_kwargs": (({},), MEDIA),
}


class AnswerMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the thought before the answer
    reasoning: str | UnsetType = UNSET  # the same under another name


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


class FunctionPiece(Struct, omit_defaults=True):
    name: str = ""
    arguments: str | UnsetType = UNSET


class ToolCallPiece(Struct):
    """A part of a call: first its id, type and name, then its arguments in pieces."""

    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """A chunk. `usage` is absent unless requested; if requested, null in chunks without it."""

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
    model, defaults = server.served(body.model)
    params = chat_params(body, defaults)
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, params.n)
    name, max_tokens = asked_tokens(body, body.max_completion_tokens)
    keep = kept_tokens(server, body.truncate_prompt_tokens, max_tokens)
    use = tool_use(
        body.tools, body.tool_choice, single=body.parallel_tool_calls is False, texts=server.texts
    )
    texts = server.texts.of(tenant)
    if body.reasoning_effort is not None:
        body.chat_template_kwargs = effort_variables(
            body.reasoning_effort, texts.form, body.chat_template_kwargs
        )
    prompt = await conversation_text(texts, body.messages, body, use)
    budget = body.thinking_token_budget
    check_budget("thinking_token_budget", budget, texts.form)
    answer = AnswerForm.behind(prompt, texts.form, use, anew=begins_anew(body), budget=budget)
    params = answer.constrained(params)
    with rename_fields(prompt="messages"):
        ids = await texts.encode(prompt, bool(body.add_special_tokens), keep)
    with rename_fields(prompt="messages", max_tokens=name):
        check_output_fits(server, len(ids), max_tokens, name)
        check_logprobs(server, [ids], params, "prompt_logprobs", "top_logprobs")
        requests = [generation_request(body, ids, params, "messages", answer)]
        (generation,) = await start_all(server, request, requests, stream=body.stream)
    head = ResponseHead(f"chatcmpl-{generation.request_id}", model, generation.created)
    form = ChatFormat(head, body, server.texts.tokenizer, ids, answer)
    return await generation_response(request, [generation], form, body.stream)


def chat_params(body: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a body. An answer without a limit may fill the context.

    Raises:
        ParamError: a value is invalid, or the engine does not honour it.
    """
    check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise ParamError("top_logprobs", "needs logprobs to be true")
    name, max_tokens = asked_tokens(body, body.max_completion_tokens)
    if max_tokens == 0:
        raise ParamError(name, "must be at least 1")
    changes = sampling_changes(body)
    changes["max_tokens"] = own_limit(defaults) if max_tokens is None else limit_of(max_tokens)
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    return defaults.with_changes(**changes)


def own_limit(defaults: SamplingParams) -> int | None:
    """Return the token limit from the model's file. The built-in default is for Python callers."""
    return defaults.max_tokens if defaults.max_tokens != SamplingParams().max_tokens else None


def effort_variables(
    effort: Effort, form: AnswerFormat, chosen: dict[str, Variable] | None
) -> dict[str, Variable]:
    """Return `chosen`, the request's template variables, and those that set how much to think.

    A variable in `chosen` takes precedence.

    Raises:
        ParamError: the model has no thoughts, and the request asks for some.
    """
    if not form.thinks and effort != "none":
        raise ParamError("reasoning_effort", "this model has no thoughts")
    if not form.thinks:
        return chosen or {}
    variables: dict[str, Variable] = {"enable_thinking": effort != "none"}
    if effort != "none":
        variables["reasoning_effort"] = effort
    return variables | (chosen or {})


class ChatFormat(ResponseFormat):
    """The `ResponseFormat` of chats: first the role, then text, then the finish reason.

    Args:
        prompt: token ids of the whole conversation.
        answer: what the answer may contain besides text.
    """

    def __init__(
        self,
        head: ResponseHead,
        body: ChatRequest,
        tokenizer: Tokenizer | None,
        prompt: list[int],
        answer: AnswerForm = PLAIN_ANSWER,
    ) -> None:
        self._answer = answer
        count = answer.count_thoughts
        self._chunks = Chunks(head, ChatChunk, body.stream_options, len(prompt), count)
        self._parsers: dict[int, AnswerReader] = {}  # by completion
        self._head = head
        self._names = TokenNames(tokenizer, by_id=bool(body.return_tokens_as_token_ids))
        self._logprobs = bool(body.logprobs)
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids = prompt if self._token_ids else UNSET
        self._templates: dict[int, Template] = {}  # by completion, once it has begun

    def complete(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(completion) for completion in output.outputs],
            usage=usage_of(outputs, self._answer.count_thoughts),
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=self._of_prompt(output.prompt_logprobs),
            prompt_token_ids=self._prompt_ids,
        )

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._chunks.end(outputs)

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        logprobs = completion.logprobs or []
        parser = self._answer.parser()
        message = _message(parser.push(completion.text, ends=True))
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._names.whole_chat(logprobs) if self._logprobs else None,
            finish_reason=self._reason(completion.finish_reason, parser),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._token_ids else UNSET,
        )

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        self._chunks.count(len(delta.token_ids))
        index, reason = delta.index, delta.finish_reason
        if index not in self._templates:
            self._parsers[index] = self._answer.parser()
            hole = ChunkChoice(index, Delta(content=HOLE))
            self._templates[index] = Template(self._chunks.chunk([hole]))
            role = ChunkChoice(index, Delta(role="assistant", content=""))
            first = self._chunks.of(role)
            first.prompt_logprobs = self._of_prompt(delta.prompt_logprobs)
            first.prompt_token_ids = self._prompt_ids
            yield event(encode_in_chunks(first))
        logprobs = self._names.chat(delta.logprobs) if self._logprobs and delta.logprobs else None
        token_ids = delta.token_ids if self._token_ids and delta.token_ids else UNSET
        parser = self._parsers[index]
        deltas = parser.push(delta.text, ends=reason is not None)
        text = "".join([part.text for part in deltas])
        thought = "".join([part.thought for part in deltas])
        if thought:
            reasoning = Delta(reasoning_content=thought, reasoning=thought)
            yield self._chunks.event(ChunkChoice(index, reasoning))
        if logprobs is not None or token_ids or (text and self._chunks.with_usage):
            content = Delta(content=text)
            yield self._chunks.event(ChunkChoice(index, content, logprobs, token_ids=token_ids))
        elif text:
            yield self._templates[index].fill(text)
        for part in deltas:
            if part.index >= 0:
                yield self._chunks.event(ChunkChoice(index, Delta(tool_calls=[_piece(part)])))
        if reason is not None:
            yield self._chunks.event(
                ChunkChoice(
                    index,
                    Delta(),
                    finish_reason=self._reason(reason, parser),
                    stop_reason=delta.stop_reason,
                )
            )

    def _reason(self, reason: str, parser: AnswerReader) -> str:
        """Return the finish reason; a call of a named function keeps that of a text, as at
        OpenAI."""
        use = self._answer.use
        called = parser.num_calls > 0 and use is not None and not use.named
        return "tool_calls" if called and reason == "stop" else reason

    def _of_prompt(
        self, logprobs: Sequence[TokenLogprobs | None] | None
    ) -> PromptLogprobs | UnsetType:
        if not self._prompt_logprobs or logprobs is None:
            return UNSET
        return self._names.prompt(logprobs)


def _message(deltas: Sequence[AnswerDelta]) -> AnswerMessage:
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name:
            calls.append(ToolCall(id=delta.id, function=CalledFunction(name=delta.name)))
        elif delta.index >= 0:
            calls[delta.index].function.arguments += delta.arguments
    text = "".join(delta.text for delta in deltas)
    thought = "".join(delta.thought for delta in deltas) or UNSET
    return AnswerMessage(
        text or (None if calls else ""),
        tool_calls=calls or UNSET,
        reasoning_content=thought,
        reasoning=thought,
    )


def _piece(delta: AnswerDelta) -> ToolCallPiece:
    if delta.name:
        function = FunctionPiece(name=delta.name, arguments="")
        return ToolCallPiece(delta.index, function, delta.id, "function")
    return ToolCallPiece(delta.index, FunctionPiece(arguments=delta.arguments))


routes = routes_of(chat)
