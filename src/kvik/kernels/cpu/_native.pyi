from collections.abc import Sequence
from typing import overload

import numpy as np

def instruction_sets() -> list[str]:
    """What this build has and this machine runs, best first."""

def rejected_instruction_sets() -> list[str]:
    """What would run too but computes something else than the portable kernels; never used."""

def kernels() -> list[tuple[str, list[tuple[str, str]]]]:
    """By id: name; of each argument name and "p" (pointer), "i" (integer) or "f" (float)."""

def allocate(bytes: int, huge: bool) -> np.ndarray:
    """[bytes] uint8 zeros on huge or small pages, not yet touched."""

def release_freed() -> None:
    """Give memory that the C library has kept back to the system."""

def has_crc32() -> bool:
    """Whether this machine has what `crc32` is made for."""

def crc32(bytes: np.ndarray, start: int, wide: bool = True) -> int:
    """The checksum of zlib.crc32, of [bytes] uint8; only where `has_crc32`.

    `wide`: with products of 512 bits, if the machine has them."""

def copy_pages(
    parts: np.ndarray,
    num_blocks: int,
    blocks: np.ndarray,
    pages: np.ndarray,
    rows: np.ndarray,
    load: bool,
) -> None:
    """Copy blocks [n] to rows [n] of `pages` [rows, bytes] uint8; `load`: from there.

    `parts`: [parts, 4] of each part of a block its address in block 0, the bytes from block to
    block, its first byte in a page, its bytes. All integers are int64."""

def give_back(data: int, bytes: int) -> int:
    """Give the whole pages of a part of `allocate` back to the system, as zeros; returns their
    bytes."""

BEATS: int  # bytes of `Barrier` (csrc/group.hpp) before its beats

class Heartbeat:
    """Beats five times a second while this process runs and this object lives."""

    @overload
    def __init__(self, beats: np.ndarray | memoryview) -> None:
        """Adds 1 to `beats`: [1] uint32, in memory that others share."""

    @overload
    def __init__(self, socket: int) -> None:
        """Sends a byte. The socket is to stay open."""

class Tape:
    calls: list[int]
    def __init__(self) -> None: ...
    def append(
        self, kernel: int, values: Sequence[int | float], inputs: Sequence[tuple[int, int]]
    ) -> None:
        """`inputs`: position of an argument, index among the inputs of a replay."""

class TeamSize:
    working: int
    def __init__(self, most: int) -> None: ...
    def ran(self, nanoseconds: int, waited: int, drawn: int, offered: int) -> None:
        """What a run on `working` threads took, and how long its caller waited for others.

        `drawn`: pieces of loops that the caller computed, of those `offered` to all threads."""

class Runtime:
    working: int
    def __init__(self, isa: str, threads: int, adapt: bool = False) -> None:
        """`adapt`: `working` is below `threads` while others keep the cores busy."""

    def limit(self, threads: int) -> None:
        """The next replays run on at most this many."""

    def run(self, kernel: int, values: Sequence[int | float]) -> None: ...
    def replay(self, tape: Tape, inputs: Sequence[int]) -> None: ...
    def replay_timed(self, tape: Tape, inputs: Sequence[int]) -> list[int]:
        """Nanoseconds of each call."""
