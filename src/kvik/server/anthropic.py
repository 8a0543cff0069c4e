"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import MAX_STOP_STRINGS, SamplingParams
from kvik.core.structured import Constraint, JsonSchema
from kvik.core.types import Pin, PromptUse
from kvik.engine.output import RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.generation import Generation, GenerationRequest
from kvik.server.openai.requests import Count, Name, Word
from kvik.server.responses import (
    HOLE,
    ResponseFormat,
    Template,
    generation_response,
    json_event,
    json_response,
    offload,
)
from kvik.server.route import caller_of, post, routes_of, trace_parent_of
from kvik.server.server import Server
from kvik.server.texts import Texts
from kvik.server.unhonoured import SAMPLING, TOOLS, Table, missing
from kvik.text.chat_template import MAX_MESSAGES

# Messages as a prompt, and the prefixes of it that their cache marks pin.


class CacheControl(Struct, kw_only=True):
    """The prompt up to here is kept in the prefix cache, for so long after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # 5m


class ContentBlock(Struct, kw_only=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    citations: Any = None  # of documents, and there are none


class MessageParam(Struct, kw_only=True):
    """A message. Consecutive messages of one role are one turn."""

    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class CountRequest(Struct, kw_only=True):
    """A conversation, whose tokens are counted."""

    model: Name
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[ContentBlock] | None = None
    cache_control: CacheControl | None = None  # as if it stood at the last block


class OutputFormat(Struct, kw_only=True):
    """The answer is JSON that satisfies a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """What the answer must be."""

    format: OutputFormat | None = None


class MessageRequest(CountRequest, kw_only=True):
    """A conversation to answer. An assistant's message at its end is the beginning of the answer.

    The answer ends with the context, where `max_tokens` would go beyond it. With 0 there is none:
    the prompt is computed, for the cache.
    """

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[Word], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # a former name of its format

    metadata: Any = None  # these change nothing in the answer
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    speed: Any = None


MAX_CACHE_MARKS = 4
FIVE_MINUTES, HOUR = 300.0, 3600.0
_SECONDS = {None: FIVE_MINUTES, "5m": FIVE_MINUTES, "1h": HOUR}


@dataclass(slots=True)
class ConversationTurn:
    """Consecutive messages of one role."""

    role: str
    texts: list[str] = field(default_factory=list)  # one for each block


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A wish to keep the prompt in the cache up to the end of a block."""

    turn: int
    block: int  # of that turn
    seconds: float


@dataclass(slots=True)
class Conversation:
    """The turns of a request, with its cache marks.

    Attributes:
        turns: roles alternate; the first may be "system".
        marks: in order.
    """

    turns: list[ConversationTurn] = field(default_factory=list)
    marks: list[CacheMark] = field(default_factory=list)

    @property
    def continues(self) -> bool:
        """Whether the model continues the last turn."""
        return self.turns[-1].role == "assistant"


def read_conversation(body: CountRequest) -> Conversation:
    """Return the conversation of a body.

    Raises:
        ParamError: a block is not text, or too many are marked.
    """
    conversation = Conversation()
    if body.system:
        _add(conversation, "system", "system", body.system)
    for i, message in enumerate(body.messages):
        _add(conversation, f"messages.{i}.content", message.role, message.content)
    if body.cache_control is not None:
        last = len(conversation.turns) - 1
        _mark(conversation, last, body.cache_control)
    if len(conversation.marks) > MAX_CACHE_MARKS:
        raise ParamError(
            "cache_control",
            f"at most {MAX_CACHE_MARKS} blocks may have one, not {len(conversation.marks)}",
        )
    text = conversation.turns[-1].texts[-1]
    if conversation.continues and text != text.rstrip():
        raise ParamError("messages", "must not end with white space of the assistant's")
    return conversation


def plain(turns: Sequence[ConversationTurn]) -> list[Mapping[str, object]]:
    """Return the messages for the chat template."""
    return [{"role": turn.role, "content": "\n".join(turn.texts)} for turn in turns]


def _add(
    conversation: Conversation, place: str, role: str, content: str | Sequence[ContentBlock]
) -> None:
    turns = conversation.turns
    if not turns or turns[-1].role != role:
        turns.append(ConversationTurn(role))
    for text, control in _texts(place, content):
        turns[-1].texts.append(text)
        if control is not None:
            _mark(conversation, len(turns) - 1, control)
    if not turns[-1].texts:
        raise ParamError(place, "must have at least one block")


def _texts(
    place: str, content: str | Sequence[ContentBlock]
) -> Iterator[tuple[str, CacheControl | None]]:
    if isinstance(content, str):
        yield content, None
        return
    for i, block in enumerate(content):
        if block.type != "text":
            raise ParamError(
                f"{place}.{i}.type", f"{block.type[:40]!r} is not supported yet; only text is"
            )
        if block.text is None:
            raise ParamError(f"{place}.{i}.text", "is required")
        if block.citations:
            raise ParamError(f"{place}.{i}.citations", "are not supported")
        yield block.text, block.cache_control


def _mark(conversation: Conversation, turn: int, control: CacheControl) -> None:
    """Mark the last block of a turn so far."""
    block = len(conversation.turns[turn].texts) - 1
    conversation.marks.append(CacheMark(turn, block, _SECONDS[control.ttl]))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as tokens."""

    token_ids: list[int]
    pins: tuple[Pin, ...]  # in order of length


async def make_prompt(texts: Texts, conversation: Conversation) -> Prompt:
    """Render and tokenise a conversation, and find the prefix of each cache mark.

    What a template makes of a block is up to the template. So the conversation is rendered once
    more up to the mark, and the prefix is what both texts have in common. Where a template shows
    the beginning of a conversation differently when it stands alone, less is kept.

    Raises:
        ParamError: the template refuses the conversation, or it is too long.
    """
    turns = conversation.turns
    if conversation.continues:
        with rename_fields(continue_final_message="messages"):
            text = await texts.render_to_continue(plain(turns))
    else:
        text = await texts.render(plain(turns), add_generation_prompt=True)
    with rename_fields(prompt="messages"):
        ids = await texts.encode(text, add_special_tokens=False)
    pins = []
    for mark in conversation.marks:
        length = await _length(texts, turns, mark, text, ids)
        if length:
            pins.append(Pin(length, mark.seconds))
    return Prompt(ids, tuple(sorted(pins, key=lambda pin: pin.num_tokens)))


async def _length(
    texts: Texts, turns: Sequence[ConversationTurn], mark: CacheMark, text: str, ids: Sequence[int]
) -> int:
    """Tokens of the prompt up to a mark."""
    marked = turns[mark.turn]
    shown = [*turns[: mark.turn], ConversationTurn(marked.role, marked.texts[: mark.block + 1])]
    if marked.role == "system":
        # Most templates need a message; its text must differ from that of the prompt.
        following = turns[mark.turn + 1]
        other = "b" if following.texts[0].lstrip().startswith("a") else "a"
        shown.append(ConversationTurn(following.role, [other]))
    try:
        alone = await texts.render(plain(shown), add_generation_prompt=False)
    except ParamError:
        return 0  # the template refuses the beginning alone
    length = common_length(alone, text)
    if length == len(text):
        return len(ids)
    return common_length(await texts.encode(text[:length], add_special_tokens=False), ids)


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix, by bisection: slices compare quickly."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class CacheCreation(Struct, kw_only=True):
    """Tokens that were written and pinned, by how long they stay."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct, kw_only=True):
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


class MessageResponse(Struct, kw_only=True):
    """The assistant's message; at the start of a stream without content."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    input_tokens: int


_ELSEWHERE = "this route does not take it"
COUNT: Table = {
    "tools": (([],), TOOLS),
    "tool_choice": (({"type": "auto"}, {"type": "none"}), TOOLS),
    "mcp_servers": (([],), TOOLS),
    "thinking": (({"type": "disabled"},), "thinking is not supported yet"),
    "context_management": (({},), "the context is not edited"),
}
MESSAGES: Table = {
    **SAMPLING,
    **missing(MessageRequest.__struct_fields__),
    **COUNT,
    "chat_template": ((), "the template is the model's own"),
    "chat_template_kwargs": (({},), _ELSEWHERE),
    "container": ((), "there are no containers"),
    "stop": (([], ""), "give stop_sequences"),
    "repeat_penalty": ((1,), _ELSEWHERE),
    "n_predict": ((), "give max_tokens"),
    "max_completion_tokens": ((), "give max_tokens"),
}


@dataclass(frozen=True, slots=True)
class UsageMeter:
    """Of one request.

    Attributes:
        num_prompt: tokens.
        pins: that were wanted.
        block_size: of the KV cache: what is pinned are full blocks.
    """

    num_prompt: int
    pins: Sequence[Pin]
    block_size: int

    def usage(self, used: PromptUse | None, num_output: int) -> MessageUsage:
        """`used`: None if it is not known yet."""
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
        """Of the tokens written and pinned, those up to the last mark of an hour that they reach:
        there may not have been room for a longer pin."""
        lengths = [
            min(pin.num_tokens, self.num_prompt) // self.block_size * self.block_size
            for pin in self.pins
            if pin.seconds == HOUR
        ]
        reached = [length for length in lengths if length <= read + written]
        return min(max(max(reached, default=0) - read, 0), written)


PING = json_event({"type": "ping"}, "ping")
_START = json_event(
    {"type": "content_block_start", "index": 0, "content_block": TextBlock("")},
    "content_block_start",
)
_TEXT = Template(
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": HOLE},
    },
    "content_block_delta",
)
_STOP = json_event({"type": "content_block_stop", "index": 0}, "content_block_stop")
_END = json_event({"type": "message_stop"}, "message_stop")


class MessageFormat(ResponseFormat):
    """A message as a `ResponseFormat`: one block of text.

    Args:
        max_model_len: of prompt and answer together.
    """

    heartbeat = PING

    def __init__(
        self,
        model: str,
        body: MessageRequest,
        generation: Generation,
        usage: UsageMeter,
        max_model_len: int,
    ) -> None:
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._generation = generation
        self._usage = usage
        self._stop_sequences = body.stop_sequences or ()
        self._max_model_len = max_model_len
        self._silent = body.max_tokens == 0  # the prompt is computed for the cache alone

    def whole(self, outputs: Sequence[RequestOutput]) -> MessageResponse:
        (output,) = outputs
        used = PromptUse(output.num_cached_tokens, output.num_pinned_tokens)
        if self._silent:
            return self._message(used, stop_reason="max_tokens")
        reason, sequence = self._stop(output)
        return self._message(
            used, output.num_output_tokens, [TextBlock(output.text)], reason, sequence
        )

    def begin(self) -> bytes:
        message = self._message(self._generation.prompt_use)
        start = json_event({"type": "message_start", "message": message}, "message_start")
        return start + (PING if self._silent else _START + PING)

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        if delta.text and not self._silent:
            yield _TEXT.fill(delta.text)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        message = self.whole(outputs)
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence},
            "usage": message.usage,
        }
        stop = b"" if self._silent else _STOP
        return stop + json_event(delta, "message_delta") + _END

    def _message(
        self,
        used: PromptUse | None,
        num_output: int = 0,
        content: Sequence[TextBlock] = (),
        stop_reason: StopReason | None = None,
        stop_sequence: str | None = None,
    ) -> MessageResponse:
        return MessageResponse(
            id=self._id,
            model=self._model,
            content=list(content),
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._usage.usage(used, num_output),
        )

    def _stop(self, output: RequestOutput) -> tuple[StopReason, str | None]:
        end = output.outputs[0]
        if isinstance(end.stop_reason, str) and end.stop_reason in self._stop_sequences:
            return "stop_sequence", end.stop_reason
        if end.finish_reason != "length":
            return "end_turn", None
        num_tokens = len(output.prompt_token_ids) + output.num_output_tokens
        if num_tokens >= self._max_model_len:
            return "model_context_window_exceeded", None
        return "max_tokens", None


@post(
    "/v1/messages",
    MESSAGES,
    answer=MessageResponse,
    note="Answer a conversation, in one piece or as a stream of events.",
)
async def messages(server: Server, request: Request, body: MessageRequest) -> Response:
    """Answer a conversation."""
    model = server.served_name(body.model)
    params = _params(body, server.default_params)
    tenant = caller_of(request).tenant
    server.generations.check_room(tenant, params.n)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    prompt = await make_prompt(server.texts.of(tenant), conversation)
    with rename_fields(stop="stop_sequences"):
        generation = await server.generations.start(
            GenerationRequest(prompt.token_ids, params, pins=prompt.pins, field="messages"),
            tenant,
            streaming=bool(body.stream),
            trace_parent=trace_parent_of(request),
        )
    block_size = server.engine.config.cache.block_size
    usage = UsageMeter(len(prompt.token_ids), prompt.pins, block_size)
    form = MessageFormat(model, body, generation, usage, server.max_model_len)
    return await generation_response(request, [generation], form, stream=bool(body.stream))


@post(
    "/v1/messages/count_tokens",
    COUNT,
    answer=TokenCount,
    note="How many tokens a conversation has as a prompt.",
)
async def count_tokens(server: Server, request: Request, body: CountRequest) -> Response:
    """Count the tokens that a conversation would have as a prompt."""
    server.served_name(body.model)
    conversation = await offload(len(body.messages), lambda: read_conversation(body))
    conversation.marks.clear()  # where they stand is not asked
    prompt = await make_prompt(server.texts.of(caller_of(request).tenant), conversation)
    return json_response(TokenCount(len(prompt.token_ids)))


def _params(body: MessageRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters; absent fields take the model's own defaults."""
    given = {
        "max_tokens": max(1, body.max_tokens),  # of 0 the one token is not shown
        "stop": tuple(body.stop_sequences) if body.stop_sequences else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "structured": _structured(body),
    }
    with rename_fields(stop="stop_sequences"):
        return defaults.with_changes(**{k: v for k, v in given.items() if v is not None})


def _structured(body: MessageRequest) -> Constraint | None:
    asked = None if body.output_config is None else body.output_config.format
    name = "output_config" if asked is not None else "output_format"
    if asked is not None and body.output_format is not None:
        raise ParamError("output_format", "contradicts output_config, which has a format")
    asked = asked or body.output_format
    try:
        return None if asked is None else JsonSchema(asked.schema).called(name)
    except ValueError as error:
        raise ParamError(name, str(error)) from None


routes = routes_of(messages, count_tokens)
