"""Convert messages of Anthropic's API to a prompt, with the prefixes that cache marks pin."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.core.types import Pin
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.openai.requests import Name
from kvik.server.texts import Texts
from kvik.server.tools import ToolUse, check_results
from kvik.text.chat_template import MAX_MESSAGES


class CacheControl(Struct, kw_only=True):
    """Keeps the prompt up to this block in the prefix cache for `ttl` after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # 5m


class ContentBlock(Struct, kw_only=True):
    """A part of a message's content: text, a call of a tool, or its result."""

    type: str
    text: str | None = None
    id: str | None = None  # of a call
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a result
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    citations: Any = None  # of documents, and there are none


class MessageParam(Struct, kw_only=True):
    """A message. Consecutive messages of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class MessageTool(Struct, kw_only=True):
    """A function that the model may call, or a tool of another type, which is not supported.

    `input_schema`: JSON Schema of a function's arguments.
    """

    name: str = ""  # required of a function
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None  # "custom"
    cache_control: CacheControl | None = None
    input_examples: Any = None


class MessageToolChoice(Struct, kw_only=True):
    """Whether tools may, must ("any", or the named "tool") or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """Whether the model thinks before it answers, and the maximum number of tokens for it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Any = None


class ContextEdit(Struct, kw_only=True):
    """A change to the conversation before it is a prompt."""

    type: str
    keep: Any = None  # turns with their thoughts


class ContextManagement(Struct, kw_only=True):
    """Changes to the conversation. Only the clearing of thoughts is supported, and changes nothing,
    as prompts have none."""

    edits: list[ContextEdit] | None = None


class OutputFormat(Struct, kw_only=True):
    """Requests an answer that is JSON satisfying a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """The format of the answer, and how much the model thinks before it."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(Struct, kw_only=True):
    """A conversation whose tokens to count."""

    model: Name
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[ContentBlock] | None = None
    cache_control: CacheControl | None = None  # applies to the last block
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # a former name of its format

    @property
    def effort(self) -> str | None:
        return None if self.output_config is None else self.output_config.effort

    @property
    def variables(self) -> dict[str, object]:
        """Variables for the chat template."""
        variables: dict[str, object] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.effort is not None:
            variables["reasoning_effort"] = self.effort
        return variables


MAX_CACHE_MARKS = 4
FIVE_MINUTES, HOUR = 300.0, 3600.0
_SECONDS = {None: FIVE_MINUTES, "5m": FIVE_MINUTES, "1h": HOUR}


@dataclass(slots=True)
class ConversationTurn:
    """Consecutive messages of one role, or one result of a call."""

    role: str
    texts: list[str] = field(default_factory=list)  # one for each block
    calls: list[ContentBlock] = field(default_factory=list)  # calls by the assistant
    call_id: str | None = None  # the call that this is the result of


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A request to keep the prompt in the cache up to the end of a block."""

    turn: int
    block: int  # of that turn
    seconds: float


@dataclass(slots=True)
class Conversation:
    """The turns of a request, with its cache marks."""

    # Roles alternate; the first may be "system".
    turns: list[ConversationTurn] = field(default_factory=list)
    marks: list[CacheMark] = field(default_factory=list)  # in order

    @property
    def continues(self) -> bool:
        """Whether the model continues the last turn."""
        return self.turns[-1].role == "assistant"


def read_conversation(body: CountRequest) -> Conversation:
    """Return the conversation of a body.

    Raises:
        ParamError: a block is not text, too many are marked, or an edit is not supported.
    """
    management = body.context_management or ContextManagement()
    for edit in management.edits or ():
        if not edit.type.startswith("clear_thinking_"):
            kind = repr(edit.type[:40])
            raise ParamError("context_management", f"has an edit {kind}; only thoughts are cleared")
    conversation = Conversation()
    if body.system:
        _add(conversation, "system", "system", body.system)
    messages, last = body.messages, body.messages[-1]
    if last.role == "assistant" and not last.content:  # which the API allows here alone
        messages = messages[:-1]
    # Some clients send later system messages: they are merged into the first one.
    order = sorted(enumerate(messages), key=lambda pair: pair[1].role != "system")
    for i, message in order:
        _add(conversation, f"messages.{i}.content", message.role, message.content)
    if all(turn.role == "system" for turn in conversation.turns):  # thoughts are no turns
        raise ParamError("messages", "need a message of the user or of the assistant")
    if body.cache_control is not None:
        _mark(conversation, len(conversation.turns) - 1, body.cache_control)
    if len(conversation.marks) > MAX_CACHE_MARKS:
        raise ParamError(
            "cache_control",
            f"at most {MAX_CACHE_MARKS} blocks may have one, not {len(conversation.marks)}",
        )
    ending = conversation.turns[-1]
    if ending.calls:
        raise ParamError("messages", "must not end with a call of the assistant")
    if conversation.continues and ending.texts[-1] != ending.texts[-1].rstrip():
        raise ParamError("messages", "must not end with white space in the assistant's turn")
    called = [call.id or "" for turn in conversation.turns for call in turn.calls]
    answered = [turn.call_id for turn in conversation.turns if turn.call_id is not None]
    check_results(called, answered)
    return conversation


def plain(turns: Sequence[ConversationTurn]) -> list[Mapping[str, object]]:
    """Return the messages for the chat template."""
    return [_plain(turn) for turn in turns]


def _plain(turn: ConversationTurn) -> Mapping[str, object]:
    message: dict[str, object] = {"role": turn.role, "content": "\n".join(turn.texts)}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.input},
            }
            for call in turn.calls
        ]
    if turn.call_id is not None:
        message["tool_call_id"] = turn.call_id
    return message


def _add(
    conversation: Conversation, place: str, role: str, content: str | Sequence[ContentBlock]
) -> None:
    turns = conversation.turns
    blocks = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content
    if not blocks:
        raise ParamError(place, "must have at least one block")
    for i, block in enumerate(blocks):
        where = f"{place}.{i}"
        if block.type in ("thinking", "redacted_thinking") and role == "assistant":
            continue  # thoughts of earlier turns are not for the model
        if block.type == "tool_result" and role == "user":
            if block.tool_use_id is None:
                raise ParamError(f"{where}.tool_use_id", "is required")
            inside = block.content or ""
            texts = [inside] if isinstance(inside, str) else [_text(where, b) for b in inside]
            turns.append(ConversationTurn("tool", texts, call_id=block.tool_use_id))
        else:
            if not turns or turns[-1].role != role:
                turns.append(ConversationTurn(role))
            if block.type == "tool_use" and role == "assistant":
                if block.id is None or block.name is None or block.input is None:
                    raise ParamError(where, "needs an id, a name and an input")
                turns[-1].calls.append(block)
            else:
                turns[-1].texts.append(_text(where, block))
        if block.cache_control is not None:
            _mark(conversation, len(turns) - 1, block.cache_control)


def _text(place: str, block: ContentBlock) -> str:
    if block.type != "text":
        raise ParamError(f"{place}.type", f"{block.type[:40]!r} is not supported here")
    if block.text is None:
        raise ParamError(f"{place}.text", "is required")
    if block.citations:
        raise ParamError(f"{place}.citations", "are not supported")
    return block.text


def _mark(conversation: Conversation, turn: int, control: CacheControl) -> None:
    """Mark the last block of a turn so far."""
    block = len(conversation.turns[turn].texts) - 1
    conversation.marks.append(CacheMark(turn, block, _SECONDS[control.ttl]))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as text and as tokens."""

    text: str
    token_ids: list[int]
    pins: tuple[Pin, ...]  # in order of length


async def make_prompt(
    texts: Texts,
    conversation: Conversation,
    use: ToolUse | None = None,
    variables: Mapping[str, object] | None = None,
) -> Prompt:
    """Render and tokenise a conversation, and find the prefix of each cache mark.

    The template decides how a block is rendered. So the conversation is rendered again up to the
    mark, and the prefix is the common prefix of both texts. If a template renders the beginning of
    a conversation differently when it is alone, less is kept.

    Raises:
        ParamError: the template refuses the conversation, or it is too long.
    """
    turns, tools = conversation.turns, None if use is None else use.described()
    render = partial(texts.render, tools=tools, variables=variables)
    if conversation.continues:
        with rename_fields(continue_final_message="messages"):
            text = await texts.render_to_continue(plain(turns), tools=tools, variables=variables)
    else:
        text = await render(plain(turns), add_generation_prompt=True)
    with rename_fields(prompt="messages"):
        ids = await texts.encode(text, add_special_tokens=False)
    pins = []
    for mark in conversation.marks:
        length = await _length(texts, render, turns, mark, text, ids)
        if length:
            pins.append(Pin(length, mark.seconds))
    return Prompt(text, ids, tuple(sorted(pins, key=lambda pin: pin.num_tokens)))


async def _length(
    texts: Texts,
    render: Callable[..., Awaitable[str]],
    turns: Sequence[ConversationTurn],
    mark: CacheMark,
    text: str,
    ids: Sequence[int],
) -> int:
    """Return the number of prompt tokens up to a mark."""
    marked = turns[mark.turn]
    part = replace(marked, texts=marked.texts[: mark.block + 1])
    shown = [*turns[: mark.turn], part]
    if marked.role == "system":
        # Most templates need a message; its text must differ from that of the prompt.
        following = turns[mark.turn + 1]
        other = "b" if "".join(following.texts[:1]).lstrip().startswith("a") else "a"
        shown.append(ConversationTurn(following.role, [other]))
    try:
        beginning = await render(plain(shown), add_generation_prompt=False)
    except ParamError:
        return 0  # the template refuses the beginning alone
    length = common_length(beginning, text)
    if length == len(text):
        return len(ids)
    return common_length(await texts.encode(text[:length], add_special_tokens=False), ids)


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the common prefix, by bisection, as comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
