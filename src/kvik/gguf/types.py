"""What a GGUF file can hold: kinds of metadata values and of tensors.

The format is described in ggml's docs/gguf.md, the blocks in its ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # they differ in nothing but the possibility of big endian files
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


# Kinds of a fixed size, as `struct` spells them.
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
    """How a tensor's rows are stored: in blocks of neighbouring weights.

    Attributes:
        code: its number in a file.
        weights, size: of one block; the size in bytes.
    """

    name: str
    code: int
    weights: int
    size: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` weights, which are whole blocks."""
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
    )
}

# Types that exist and are not read, so that an error can name them.
UNREAD_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
