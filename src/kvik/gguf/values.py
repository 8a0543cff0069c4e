"""Metadata of a GGUF file: single values at once, arrays when they are asked for."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kvik.config.fields import Fields, shown
from kvik.gguf.types import STRUCT_CODES, ValueKind

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<f")
_INTEGERS = frozenset(STRUCT_CODES) - {ValueKind.FLOAT32, ValueKind.FLOAT64, ValueKind.BOOL}
_NUMBERS = _INTEGERS | {ValueKind.FLOAT32, ValueKind.FLOAT64}


@dataclass(frozen=True, slots=True, repr=False)
class Array:
    """`count` values in `data`, whose bounds were checked; not yet decoded.

    Attributes:
        kind: of the values; arrays within arrays stay undecoded.
        start: of the first one in `data`, the head of the file.
    """

    kind: ValueKind
    count: int
    data: bytearray
    start: int

    def __repr__(self) -> str:
        return f"<{self.count} {self.kind.name} values>"

    def numbers(self) -> tuple[int | float, ...]:
        """The values of a kind of fixed size."""
        return struct.unpack_from(f"<{self.count}{STRUCT_CODES[self.kind]}", self.data, self.start)

    def strings(self) -> list[str]:
        """The values of strings.

        Raises:
            UnicodeDecodeError: one of them is not valid UTF-8.
        """
        unpack, data, at = _LENGTH.unpack_from, self.data, self.start
        values = []
        for _ in range(self.count):
            (length,) = unpack(data, at)
            at += 8
            values.append(data[at : at + length].decode())
            at += length
        return values


Value = int | float | bool | str | Array


class Metadata(Fields):
    """Checked access to the values; see `Fields` for the single ones."""

    def __init__(self, values: Mapping[str, Value], file: str) -> None:
        super().__init__(values, file)
        self.values = values

    def array_length(self, key: str) -> int:
        """How many values an array has; 0 when it is left out."""
        value = self.values.get(key)
        return value.count if isinstance(value, Array) else 0

    def string(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {shown(value)}")
        return value

    def string_array(self, key: str, most: int) -> list[str]:
        """An array of at most `most` strings; [] when left out."""
        array = self._array(key, {ValueKind.STRING}, "strings", most)
        if array is None:
            return []
        try:
            return array.strings()
        except UnicodeDecodeError as error:
            bad = bytes(error.object[:60])
            raise self.error(key, f"must hold valid UTF-8, not {shown(bad)}") from None

    def integer_array(self, key: str, most: int) -> list[int]:
        """An array of at most `most` integers; [] when left out."""
        array = self._array(key, _INTEGERS, "integers", most)
        return [] if array is None else [int(value) for value in array.numbers()]

    def number_array(self, key: str, most: int) -> list[float]:
        """An array of at most `most` numbers; [] when left out."""
        array = self._array(key, _NUMBERS, "numbers", most)
        return [] if array is None else [float(value) for value in array.numbers()]

    def _array(
        self, key: str, kinds: set[ValueKind] | frozenset[ValueKind], what: str, most: int
    ) -> Array | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Array) or value.kind not in kinds:
            raise self.error(key, f"must be an array of {what}, not {shown(value)}")
        if value.count > most:
            raise self.error(key, f"must have at most {most} values, not {value.count}")
        return value


def shortest(value: float) -> float:
    """The number with the fewest decimal digits that is `value` in fp32: what was meant, as 1e-06
    is by 9.999999974752427e-07."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if _FLOAT.pack(short) == _FLOAT.pack(value):
            return short
    return value
