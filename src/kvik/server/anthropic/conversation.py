"""System prompt and messages -> turns for the chat template, and where its cache marks stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvik.config.errors import ParamError
from kvik.server.anthropic.message_request import Block, CacheControl, CountRequest

MAX_MARKS = 4
FIVE_MINUTES, HOUR = 300.0, 3600.0
_SECONDS = {None: FIVE_MINUTES, "5m": FIVE_MINUTES, "1h": HOUR}


@dataclass(slots=True)
class Turn:
    role: str
    texts: list[str] = field(default_factory=list)  # of its blocks


@dataclass(frozen=True, slots=True)
class Mark:
    """The prompt up to the end of a block is to be kept for so many seconds."""

    turn: int
    block: int  # of that turn
    seconds: float


@dataclass(slots=True)
class Conversation:
    """Attributes:
    turns: no two of one role follow each other; the first may be the system's.
    marks: in order.
    """

    turns: list[Turn] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def continues(self) -> bool:
        """The last turn is the beginning of the answer."""
        return self.turns[-1].role == "assistant"


def read_conversation(body: CountRequest) -> Conversation:
    """Raises `ParamError` for what is not text, or marked too often."""
    conversation = Conversation()
    if body.system:
        _add(conversation, "system", "system", body.system)
    for i, message in enumerate(body.messages):
        _add(conversation, f"messages.{i}.content", message.role, message.content)
    if body.cache_control is not None:
        last = len(conversation.turns) - 1
        _mark(conversation, last, body.cache_control)
    if len(conversation.marks) > MAX_MARKS:
        raise ParamError(
            "cache_control",
            f"at most {MAX_MARKS} blocks may have one, not {len(conversation.marks)}",
        )
    text = conversation.turns[-1].texts[-1]
    if conversation.continues and text != text.rstrip():
        raise ParamError("messages", "must not end with white space of the assistant's")
    return conversation


def plain(turns: Sequence[Turn]) -> list[Mapping[str, object]]:
    """As the chat template takes them."""
    return [{"role": turn.role, "content": "\n".join(turn.texts)} for turn in turns]


def _add(conversation: Conversation, place: str, role: str, content: str | Sequence[Block]) -> None:
    turns = conversation.turns
    if not turns or turns[-1].role != role:
        turns.append(Turn(role))
    for text, control in _texts(place, content):
        turns[-1].texts.append(text)
        if control is not None:
            _mark(conversation, len(turns) - 1, control)
    if not turns[-1].texts:
        raise ParamError(place, "must have at least one block")


def _texts(place: str, content: str | Sequence[Block]) -> Iterator[tuple[str, CacheControl | None]]:
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
    """At the last block so far of a turn."""
    block = len(conversation.turns[turn].texts) - 1
    conversation.marks.append(Mark(turn, block, _SECONDS[control.ttl]))
