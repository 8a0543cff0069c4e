"""JSON of something large, encoded in pieces: msgspec lets no other thread run until it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")

PIECE = 16  # entries of a long list that are encoded at once


class Made:
    """A list whose entries are made as they are encoded, and gone after that. To make, to collect
    or to free them all at once would hold up other threads too.

    Args:
        rows: what they are made from, one of each.
    """

    def __init__(self, rows: Sequence[T], make: Callable[[T], object]) -> None:
        self._rows = rows
        self._make = make

    def __len__(self) -> int:
        return len(self._rows)

    def slice(self, start: int, stop: int) -> list[object]:
        return [self._make(row) for row in self._rows[start:stop]]


def encoded(value: object) -> bytes:
    """As `msgspec.json.encode`, for Structs whose fields have their own names and for lists, as our
    answers are made of, and `Made` ones. It takes longer in all."""
    out: list[bytes] = []
    _add(value, out)
    return b"".join(out)


def _add(value: object, out: list[bytes]) -> None:
    match value:
        case msgspec.Struct():
            before = b"{"
            for name in value.__struct_fields__:
                item = getattr(value, name)
                if item is not msgspec.UNSET:
                    out += (before, msgspec.json.encode(name), b":")
                    _add(item, out)
                    before = b","
            out.append(b"{}" if before == b"{" else b"}")
        case Made() if len(value):
            _add_slices(len(value), value.slice, out)
        case Made():
            out.append(b"[]")
        case list() if len(value) > PIECE:
            _add_slices(len(value), lambda start, stop: value[start:stop], out)
        case list() if any(isinstance(item, msgspec.Struct) for item in value):
            before = b"["
            for item in value:
                out.append(before)
                _add(item, out)
                before = b","
            out.append(b"]")
        case _:
            out.append(msgspec.json.encode(value))


def _add_slices(length: int, of: Callable[[int, int], list[object]], out: list[bytes]) -> None:
    before = b"["
    for start in range(0, length, PIECE):
        out += (before, msgspec.json.encode(of(start, start + PIECE))[1:-1])
        before = b","
    out.append(b"]")
