"""Server-sent events from bytes that may be cut anywhere.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.5 and 9.2.6.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_EVENT_BYTES = 16 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """An event with data. It stays bytes: a cut inside a character must not matter."""

    name: bytes  # "" unless the server gave one
    data: bytes


class EventTooLarge(ValueError):
    """An event that never ends must not fill the memory."""


class SseParser:
    """Feed bytes as they come; events are returned with the bytes that complete them."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of a line that has no end yet
        self._size = 0  # bytes of the event that has no end yet
        self._data: list[bytes] = []
        self._name = b""
        self._after_cr = False  # a line feed that comes next belongs to the line end before
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Raises `EventTooLarge`."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        events: list[Event] = []
        for line in chunk.splitlines(keepends=True):  # bytes: at \n, \r and \r\n only
            self._size += len(line)
            if self._size > MAX_EVENT_BYTES:
                raise EventTooLarge(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
            self._after_cr = line.endswith(b"\r")  # what counts is the last line
            ended = line.rstrip(b"\r\n")
            if len(ended) == len(line):
                self._pieces.append(line)
                break
            if self._pieces:
                ended = b"".join([*self._pieces, ended])
                self._pieces.clear()
            self._take_line(ended, events)
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
