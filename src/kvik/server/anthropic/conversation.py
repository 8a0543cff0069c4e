"""Messages as a prompt, and the prefixes of it that their cache marks pin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.core.sampling_params import MAX_STOP_STRINGS
from kvik.core.types import Pin
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.openai.fields import Count, Name, Word
from kvik.server.texts import Texts
from kvik.text.chat_template import MAX_MESSAGES


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
    """The conversation of a body.

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
    """The messages for the chat template."""
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
