"""How much a calibration measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvik.config.units import MIB

KINDS = ("fp32", "bf16", "int8", "int8-weight-only", "int4-g128", "int4-g64", "int4-g32")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        reads: bytes of the working sets whose reading is timed; the last is "from memory".
        streamed: bytes of weights, and of keys, that are read from memory in one sample: several
            times what a cache holds.
        rows: of the products.
        kinds: of weights.
        head_dims: of attention.
        samples: of each figure.
        batches: of the engine's own cost, and `tokens` that each of their sequences gets.
        flushed: bytes that are read between two of those steps.
    """

    reads: tuple[int, ...]
    streamed: int
    rows: tuple[int, ...]
    kinds: tuple[str, ...]
    head_dims: tuple[int, ...]
    samples: int
    batches: tuple[int, ...]
    tokens: int
    flushed: tuple[int, ...]


FULL = Effort(
    reads=tuple(size * MIB for size in (1, 4, 8, 16, 24, 32, 48, 64, 128, 512)),
    streamed=128 * MIB,
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 512),
    kinds=KINDS,
    head_dims=(32, 48, 64, 80, 96, 128),
    samples=7,
    batches=(1, 4, 16, 32),
    tokens=64,
    flushed=tuple(size * MIB for size in (0, 8, 16, 32, 96)),
)
QUICK = replace(
    FULL,
    reads=tuple(size * MIB for size in (4, 16, 32, 64, 256)),
    streamed=96 * MIB,
    rows=(1, 4, 8, 32, 128, 512),
    kinds=("bf16", "int8", "int4-g128"),
    head_dims=(64, 128),
    samples=3,
    batches=(1, 16),
    tokens=24,
    flushed=tuple(size * MIB for size in (0, 16, 64)),
)
