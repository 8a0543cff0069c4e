"""Types in GGUF files: kinds of metadata values, and block types of tensors.

The format is described in ggml's docs/gguf.md, the blocks in its ggml-common.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvik.errors import shown
from kvik.spec.fields import Fields

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 3 only adds big endian files
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(1 << power for power in range(3, 13))  # 8..4096
MAX_DIMENSIONS = 4


class ValueKind(IntEnum):
    """Kinds of metadata values, by their number in a file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# Kinds of a fixed size, with their format characters of `struct`.
STRUCT_CODES: Mapping[ValueKind, str] = {
    ValueKind.UINT8: "B",
    ValueKind.INT8: "b",
    ValueKind.UINT16: "H",
    ValueKind.INT16: "h",
    ValueKind.UINT32: "I",
    ValueKind.INT32: "i",
    ValueKind.FLOAT32: "f",
    ValueKind.BOOL: "B",  # checked to be 0 or 1
    ValueKind.UINT64: "Q",
    ValueKind.INT64: "q",
    ValueKind.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class BlockType:
    """A storage format of a tensor's rows, in blocks of neighbouring weights."""

    name: str
    code: int  # its number in a file
    # weights, size: of one block; the size in bytes.
    weights: int
    size: int

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` weights, which are whole blocks."""
        return width // self.weights * self.size


BLOCK_TYPES: Mapping[str, BlockType] = {
    known.name: known
    for known in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("BF16", 30, 1, 2),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("MXFP4", 39, 32, 17),
    )
}

# Types that exist but are not read; errors name them.
UNREAD_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


# Metadata of a GGUF file: single values are decoded at once, arrays on demand.

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<f")
_INTEGERS = frozenset(STRUCT_CODES) - {ValueKind.FLOAT32, ValueKind.FLOAT64, ValueKind.BOOL}
_NUMBERS = _INTEGERS | {ValueKind.FLOAT32, ValueKind.FLOAT64}


@dataclass(frozen=True, slots=True, repr=False)
class Array:
    """`count` values in `data` that are not yet decoded; their bounds were checked."""

    kind: ValueKind  # of the values; arrays within arrays stay undecoded
    count: int
    data: bytearray
    start: int  # of the first one in `data`, the head of the file

    @staticmethod
    def of(values: Sequence[object]) -> Array:
        """Return booleans or integers as an array of a file."""
        kind = ValueKind.BOOL if isinstance(values[0], bool) else ValueKind.INT32
        packed = struct.pack(f"<{len(values)}{STRUCT_CODES[kind]}", *values)
        return Array(kind, len(values), bytearray(packed), 0)

    def __repr__(self) -> str:
        return f"<{self.count} {self.kind.name} values>"

    def numbers(self) -> tuple[int | float, ...]:
        """Return the values, if their kind has a fixed size."""
        return struct.unpack_from(f"<{self.count}{STRUCT_CODES[self.kind]}", self.data, self.start)

    def strings(self) -> list[str]:
        """Return the values, if they are strings.

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
        """Return the number of values of an array; 0 if it is absent."""
        value = self.values.get(key)
        return value.count if isinstance(value, Array) else 0

    def string(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {shown(value)}")
        return value

    def string_array(self, key: str, limit: int) -> list[str]:
        """Return an array of at most `limit` strings; [] when left out."""
        array = self._array(key, {ValueKind.STRING}, "strings", limit)
        if array is None:
            return []
        try:
            return array.strings()
        except UnicodeDecodeError as error:
            bad = bytes(error.object[:60])
            raise self.error(key, f"must hold valid UTF-8, not {shown(bad)}") from None

    def integer_array(self, key: str, limit: int) -> list[int]:
        """Return an array of at most `limit` integers; [] when left out."""
        array = self._array(key, _INTEGERS, "integers", limit)
        return [] if array is None else [int(value) for value in array.numbers()]

    def number_array(self, key: str, limit: int) -> list[float]:
        """Return an array of at most `limit` numbers; [] when left out."""
        array = self._array(key, _NUMBERS, "numbers", limit)
        return [] if array is None else [float(value) for value in array.numbers()]

    def _array(
        self, key: str, kinds: set[ValueKind] | frozenset[ValueKind], label: str, limit: int
    ) -> Array | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Array) or value.kind not in kinds:
            raise self.error(key, f"must be an array of {label}, not {shown(value)}")
        if value.count > limit:
            raise self.error(key, f"must have at most {limit} values, not {value.count}")
        return value


def shortest(value: float) -> float:
    """Return the number with the fewest decimal digits that rounds to `value` in fp32: 1e-06 for
    9.999999974752427e-07."""
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        if _FLOAT.pack(short) == _FLOAT.pack(value):
            return short
    return value
