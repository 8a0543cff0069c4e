"""A streamed answer of an OpenAI-compatible server: its events and the fields of a chunk."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

MAX_EVENT_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """An event with data, as bytes: a chunk may end inside a character."""

    name: bytes  # "" unless the server gave one
    data: bytes


class EventTooLarge(ValueError):
    """An event is longer than `MAX_EVENT_BYTES`, which bounds memory."""


class SseParser:
    """Parses a stream of server-sent events, fed in chunks of any size."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of an unfinished line
        self._size = 0  # bytes of the unfinished event
        self._data: list[bytes] = []
        self._name = b""
        self._after_cr = False  # a line feed that follows belongs to the previous line end
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that these bytes complete.

        Raises:
            EventTooLarge: an event is too long.
        """
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        events: list[Event] = []
        for line in chunk.splitlines(keepends=True):  # bytes: at \n, \r and \r\n only
            self._size += len(line)
            if self._size > MAX_EVENT_BYTES:
                raise EventTooLarge(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
            self._after_cr = line.endswith(b"\r")  # the last line counts
            content = line.rstrip(b"\r\n")
            if len(content) == len(line):
                self._parts.append(line)
                break
            if self._parts:
                content = b"".join([*self._parts, content])
                self._parts.clear()
            self._take_line(content, events)
        return events

    def _take_line(self, line: bytes, events: list[Event]) -> None:
        if self._at_start:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            if self._data:
                events.append(Event(self._name, b"\n".join(self._data)))
            self._data, self._name, self._size = [], b"", 0
            return
        name, _, value = line.partition(b":")  # a comment has no name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._name = value.removeprefix(b" ")


# A number of tokens; other values are refused.
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class StreamedPromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class StreamedCompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: Count | None = None
    rejected_prediction_tokens: Count | None = None


class StreamedUsage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: StreamedPromptDetails | None = None
    completion_tokens_details: StreamedCompletionDetails | None = None


class StreamedDelta(msgspec.Struct):
    """The output of a chat chunk. Reasoning and tool calls are output too."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class StreamedChoice(msgspec.Struct):
    text: str | None = None
    delta: StreamedDelta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """A chunk of a stream: the fields that are read; a server may send others."""

    choices: list[StreamedChoice] | None = []
    usage: StreamedUsage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


def error_message(body: bytes) -> str:
    """Return the message of an error body in one line: `error.message`, or the whole body."""
    message: Any = body.decode(errors="replace")
    try:
        error = msgspec.json.decode(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, RecursionError):
        pass
    return " ".join(str(message).split())
