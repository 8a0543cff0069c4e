"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import MAX_STOP_STRINGS, SamplingParams
from kvik.core.structured import Constraint, JsonSchema
from kvik.core.types import Pin, PromptUse
from kvik.engine.output import RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.anthropic_prompt import (
    HOUR,
    CountRequest,
    MessageToolChoice,
    make_prompt,
    read_conversation,
)
from kvik.server.errors import HttpError, rename_fields
from kvik.server.generation import Generation, GenerationRequest
from kvik.server.openai.requests import Count, Word
from kvik.server.responses import (
    HOLE,
    ResponseFormat,
    Template,
    generation_response,
    json_event,
    json_response,
    offload,
    start_all,
)
from kvik.server.route import caller_of, context_of, post, routes_of
from kvik.server.server import Server
from kvik.server.texts import Texts
from kvik.server.tools import AnswerForm, Function, ToolUse, check_budget
from kvik.server.unhonoured import NOTHING_KEPT, SAMPLING, Table, missing
from kvik.text.tool_calls import AnswerDelta
from kvik.text.tool_grammar import ToolMode


class MessageRequest(CountRequest, kw_only=True):
    """A conversation to answer. The answer continues an assistant's message at its end. If
    `max_tokens` exceeds the context, the answer ends with the context. With 0 there is no answer:
    the prompt is computed for the cache."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[Word], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None

    metadata: Any = None  # these change nothing in the answer
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    speed: Any = None


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class CacheCreation(Struct, kw_only=True):
    """Tokens that were written and pinned, by their lifetime."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct, kw_only=True):
    """Token counts. The prompt consists of tokens read from the cache, tokens written to it and
    pinned, and the rest, `input_tokens`. null: not known yet; `input_tokens` is then the whole
    prompt."""

    input_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    cache_creation: CacheCreation | None
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class AnswerBlock(Struct, kw_only=True):
    """A part of an answer: text, a thought, or a call of a tool with its id, name and input."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


def text_block(text: str) -> AnswerBlock:
    return AnswerBlock(type="text", text=text)


SIGNATURE = "kvik"  # clients send it back; it is ignored


def thinking_block(thought: str) -> AnswerBlock:
    return AnswerBlock(type="thinking", thinking=thought, signature=SIGNATURE if thought else "")


def call_block(call: AnswerDelta, arguments: dict[str, Any]) -> AnswerBlock:
    made = call.id.replace("call_", "toolu_", 1)
    return AnswerBlock(type="tool_use", id=made, name=call.name, input=arguments)


class MessageResponse(Struct, kw_only=True):
    """The assistant's message; without content at the start of a stream."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


_ELSEWHERE = "this route does not have it"
COUNT: Table = {"mcp_servers": (([],), "there are no other servers")}
MESSAGES: Table = {
    **SAMPLING,
    **missing(MessageRequest.__struct_fields__, "output_config.format"),
    **COUNT,
    "chat_template": ((), "the template is the model's own"),
    "chat_template_kwargs": (({},), _ELSEWHERE),
    **dict.fromkeys(
        ("enable_thinking", "reasoning", "reasoning_effort"),
        (({},), "give thinking or output_config.effort"),
    ),
    "instructions": (("",), "give system"),
    "container": ((), "there are no containers"),
    "thread": ((), NOTHING_KEPT),
    "stop": (([], ""), "give stop_sequences"),
    "repeat_penalty": ((1,), _ELSEWHERE),
}


@dataclass(frozen=True, slots=True)
class UsageMeter:
    """Computes the usage of one request."""

    num_prompt: int  # tokens of the prompt
    pins: Sequence[Pin]  # requested pins
    block_size: int  # block size of the KV cache, since only full blocks are pinned

    def usage(self, used: PromptUse | None, num_output: int) -> MessageUsage:
        """Return the usage. `used`: None if it is not known yet."""
        if used is None:
            return MessageUsage(
                input_tokens=self.num_prompt,
                cache_creation_input_tokens=None,
                cache_read_input_tokens=None,
                cache_creation=None,
                output_tokens=num_output,
            )
        read, written = used.num_cached_tokens, used.num_pinned_tokens
        hour = self._for_an_hour(read, written)
        return MessageUsage(
            input_tokens=self.num_prompt - read - written,
            cache_creation_input_tokens=written,
            cache_read_input_tokens=read,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=written - hour, ephemeral_1h_input_tokens=hour
            ),
            output_tokens=num_output,
        )

    def _for_an_hour(self, read: int, written: int) -> int:
        """Return how many of the written and pinned tokens stay for an hour: those up to the last
        one-hour mark that was reached, as there may not have been room for a longer pin."""
        lengths = [
            min(pin.num_tokens, self.num_prompt) // self.block_size * self.block_size
            for pin in self.pins
            if pin.seconds == HOUR
        ]
        reached = [length for length in lengths if length <= read + written]
        return min(max(max(reached, default=0) - read, 0), written)


PING = json_event({"type": "ping"}, "ping")


# Type of a block -> the type of its deltas, and their field.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _piece(index: int, kind: str, name: str) -> Template:
    """Return the event of a piece of a block."""
    event = {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: HOLE}}
    return Template(event, "content_block_delta")


_END = json_event({"type": "message_stop"}, "message_stop")


class MessageFormat(ResponseFormat):
    """A message as a `ResponseFormat`: a block of text, then one for each call.

    Args:
        answer: what the answer may have in addition to text.
        max_model_len: limit of prompt and answer together.
    """

    heartbeat = PING

    def __init__(
        self,
        model: str,
        body: MessageRequest,
        generation: Generation,
        usage: UsageMeter,
        max_model_len: int,
        answer: AnswerForm,
    ) -> None:
        self._plain = answer.plain
        self._parser = answer.parser()
        self._open, self._kind = -1, ""  # the block being written, and its type
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._generation = generation
        self._usage = usage
        self._stop_sequences = body.stop_sequences or ()
        self._max_model_len = max_model_len
        self._silent = body.max_tokens == 0  # the prompt is only computed for the cache

    def complete(self, outputs: Sequence[RequestOutput]) -> MessageResponse:
        (output,) = outputs
        content = [] if self._silent else _blocks(self._parser.push(output.text, ends=True))
        return self._message(self._final_usage(output), content, *self._stop(output))

    def begin(self) -> bytes:
        message = self._message(self._usage.usage(self._generation.prompt_use, 0))
        start = [json_event({"type": "message_start", "message": message}, "message_start")]
        if self._plain and not self._silent:
            start += self._begin_block(text_block(""))
        return b"".join([*start, PING])

    def failed(self, error: HttpError) -> bytes:
        return json_event(error.body(anthropic=True), "error")

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        if self._silent:
            return
        for part in self._parser.push(delta.text, ends=delta.finish_reason is not None):
            if part.name:
                yield from self._begin_block(call_block(part, {}))
            elif part.thought and self._kind != "thinking":
                yield from self._begin_block(thinking_block(""))
            elif part.text and self._kind != "text":
                yield from self._begin_block(text_block(""))
            if piece := part.thought or part.text or part.arguments:
                yield self._piece.fill(piece)

    def _begin_block(self, block: AnswerBlock) -> Iterator[bytes]:
        yield from self._end_block()
        self._open, self._kind = self._open + 1, block.type
        self._piece = _piece(self._open, *_DELTAS[block.type])
        start = {"type": "content_block_start", "index": self._open, "content_block": block}
        yield json_event(start, "content_block_start")

    def _end_block(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            yield _piece(self._open, "signature_delta", "signature").fill(SIGNATURE)
        if self._open >= 0:
            stop = {"type": "content_block_stop", "index": self._open}
            yield json_event(stop, "content_block_stop")

    def _last_events(self) -> Iterator[bytes]:
        if self._open < 0:  # an answer without a block is one empty text, as in one piece
            yield from self._begin_block(text_block(""))
        yield from self._end_block()

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        (output,) = outputs
        reason, sequence = self._stop(output)
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._final_usage(output),
        }
        stop = b"" if self._silent else b"".join(self._last_events())
        return stop + json_event(delta, "message_delta") + _END

    def _message(
        self,
        usage: MessageUsage,
        content: Sequence[AnswerBlock] = (),
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
    ) -> MessageResponse:
        return MessageResponse(
            id=self._id,
            model=self._model,
            content=list(content),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )

    def _final_usage(self, output: RequestOutput) -> MessageUsage:
        used = PromptUse(output.num_cached_tokens, output.num_pinned_tokens)
        return self._usage.usage(used, 0 if self._silent else output.num_output_tokens)

    def _stop(self, output: RequestOutput) -> tuple[StopReason, str | None]:
        end = output.outputs[0]
        if self._silent:
            return "max_tokens", None
        if isinstance(end.stop_reason, str) and end.stop_reason in self._stop_sequences:
            return "stop_sequence", end.stop_reason
        if end.finish_reason != "length":
            return "tool_use" if self._parser.num_calls else "end_turn", None
        num_tokens = len(output.prompt_token_ids) + output.num_output_tokens
        if num_tokens >= self._max_model_len:
            return "model_context_window_exceeded", None
        return "max_tokens", None


def _blocks(deltas: Sequence[AnswerDelta]) -> list[AnswerBlock]:
    """Return the blocks of a whole answer, in the order of a stream. Truncated arguments become
    {}."""
    blocks = []
    for _, group in groupby(deltas, key=lambda delta: (delta.index, bool(delta.thought))):
        part = list(group)
        text = "".join(delta.thought + delta.text + delta.arguments for delta in part)
        if part[0].index >= 0:
            blocks.append(call_block(part[0], _arguments(text)))
        else:
            blocks.append(thinking_block(text) if part[0].thought else text_block(text))
    return blocks or [text_block("")]


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:
        return {}
    # An escape may be half a character, which cannot be encoded.
    valid: dict[str, Any] = json.loads(
        json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace")
    )
    return valid


def tool_use(request: Request, body: CountRequest, texts: Texts) -> ToolUse | None:
    """Return the tools of a body; None without tools. Tools that the server would have to run are
    left out, and a response header lists them.

    Raises:
        ParamError: they cannot be used, or there is a choice without tools.
    """
    choice = body.tool_choice or MessageToolChoice(type="auto")
    client_types = (None, "custom")
    tools = [tool for tool in body.tools or () if tool.type in client_types]
    hosted = [f"tools.{tool.type}" for tool in body.tools or () if tool.type not in client_types]
    context_of(request).ignore(hosted)
    functions = []
    for tool in tools:
        if tool.input_schema is None:
            raise ParamError("tools", f"{tool.name[:80]} needs an input_schema")
        strict = bool(tool.strict)
        functions.append(Function(tool.name, tool.description or "", tool.input_schema, strict))
    if choice.type == "tool" and choice.name is None:
        raise ParamError("tool_choice", "needs the name of a tool")
    named = choice.type == "tool"
    choices: Mapping[str, ToolMode] = {"any": "required", "tool": "required", "none": "none"}
    return ToolUse.of(
        texts.form,
        functions,
        choice=choices.get(choice.type, "auto"),
        allowed=[choice.name or ""] if named else None,
        single=named or bool(choice.disable_parallel_tool_use),
    )


@post(
    "/v1/messages",
    MESSAGES,
    answer=MessageResponse,
    note="Answer a conversation, in one piece or as a stream of events.",
)
async def messages(server: Server, request: Request, body: MessageRequest) -> Response:
    """Answer a conversation."""
    model, defaults = server.served(body.model)
    params = _params(body, defaults)
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, params.n)
    use = tool_use(request, body, server.texts)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    texts = server.texts.of(tenant)
    budget = _thinking(request, body, texts)
    prompt = await make_prompt(texts, conversation, use, body.variables)
    anew = not conversation.continues
    answer = AnswerForm.behind(prompt.text, texts.form, use, anew=anew, budget=budget)
    params = answer.constrained(params)
    with rename_fields(stop="stop_sequences"):
        generation_request = GenerationRequest(
            prompt.token_ids,
            params,
            pins=prompt.pins,
            chat=True,
            marks=answer.marks,
            unenforced=() if use is None else use.unenforced,
            field="messages",
        )
        (generation,) = await start_all(server, request, [generation_request], stream=body.stream)
    block_size = server.engine.config.cache.block_size
    usage = UsageMeter(len(prompt.token_ids), prompt.pins, block_size)
    form = MessageFormat(model, body, generation, usage, server.max_model_len, answer)
    return await generation_response(request, [generation], form, body.stream)


@post(
    "/v1/messages/count_tokens",
    COUNT,
    answer=TokenCount,
    note="How many tokens a conversation has as a prompt.",
)
async def count_tokens(server: Server, request: Request, body: CountRequest) -> Response:
    """Count the tokens that a conversation would have as a prompt."""
    server.served(body.model)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    conversation.marks.clear()  # the count does not need them
    texts = server.texts.of(caller_of(request).tenant)
    _thinking(request, body, texts)
    prompt = await make_prompt(texts, conversation, tool_use(request, body, texts), body.variables)
    return json_response(TokenCount(len(prompt.token_ids)))


def _thinking(request: Request, body: CountRequest, texts: Texts) -> int | None:
    """Return the maximum number of tokens of a thought; None: no limit. If the model has no
    thoughts, a response header lists the effort.

    Raises:
        ParamError: thoughts are requested but the model has none, or they cannot be limited.
    """
    if body.effort is not None and not texts.form.thinks:
        context_of(request).ignore(["output_config.effort"])
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        return None
    if not texts.form.thinks and thinking.type == "enabled":
        raise ParamError("thinking", "this model has no thoughts")
    check_budget("thinking", thinking.budget_tokens, texts.form)
    return thinking.budget_tokens


def _params(body: MessageRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters; absent fields take the model's own defaults."""
    fields = {
        "max_tokens": max(1, body.max_tokens),  # for 0, the one token is not shown
        "stop": tuple(body.stop_sequences) if body.stop_sequences else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "structured": _structured(body),
    }
    with rename_fields(stop="stop_sequences"):
        return defaults.with_changes(**{k: v for k, v in fields.items() if v is not None})


def _structured(body: MessageRequest) -> Constraint | None:
    output_format = None if body.output_config is None else body.output_config.format
    name = "output_config" if output_format is not None else "output_format"
    if output_format is not None and body.output_format is not None:
        raise ParamError("output_format", "contradicts output_config, which has a format")
    output_format = output_format or body.output_format
    try:
        return None if output_format is None else JsonSchema(output_format.schema).called(name)
    except ValueError as error:
        raise ParamError(name, str(error)) from None


routes = routes_of(messages, count_tokens)
