"""Server-sent events (WHATWG HTML, section 9.2) as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"  # the end of a stream that did not fail, as OpenAI's clients know it
HEARTBEAT = b": alive\n\n"  # a comment, which clients skip


def event(data: bytes, name: str | None = None) -> bytes:
    """One event; `data` is JSON in one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


def json_event(value: object, name: str | None = None) -> bytes:
    return event(msgspec.json.encode(value), name)


class Template:
    """An event whose JSON is encoded once, with holes that are filled for each event of a stream.

    Args:
        value: whatever msgspec encodes, with each of `holes` once in it, as a string.
        holes: in the order in which they come in the JSON.
        name: of the event.
    """

    def __init__(self, value: object, holes: Sequence[str], name: str | None = None) -> None:
        rest = event(msgspec.json.encode(value), name)
        self._parts: list[bytes] = []
        for hole in holes:
            before, found, rest = rest.partition(msgspec.json.encode(hole))
            if not found:
                raise ValueError(f"no hole {hole!r} in order in the value")
            self._parts.append(before)
        self._parts.append(rest)

    def fill(self, *values: object) -> bytes:
        """The event with these values in its holes, in order."""
        out = [self._parts[0]]
        for value, part in zip(values, self._parts[1:], strict=True):
            out += (msgspec.json.encode(value), part)
        return b"".join(out)
