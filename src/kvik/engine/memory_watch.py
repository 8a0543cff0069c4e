"""Detect when the system is short of memory, so that unused KV blocks are given back before the
system kills a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvik.config.hardware import memory_left, memory_stalls
from kvik.config.units import MIB, show_bytes

LOOK_SECONDS = 1.0  # between two readings
STALLED = 0.1  # share of the time for which processes wait for memory that counts as short
LOW = 256 * MIB  # bytes left that count as short; at most LOW_SHARE of the engine's limit
LOW_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory state that the system reports."""

    stalled: float  # seconds that processes have waited for memory, since some time in the past
    free: int  # bytes that this process can take, including the page cache of files


def read_memory() -> MemoryReading:
    return MemoryReading(memory_stalls(), memory_left())


class MemoryWatch:
    """Decides which share of the unused KV blocks to give back.

    Args:
        limit: bytes that the engine may take.
        read: see `MemoryReading`.
    """

    def __init__(self, limit: int, read: Callable[[], MemoryReading] = read_memory) -> None:
        self._low = min(LOW, int(limit * LOW_SHARE))
        self._read = read
        self._last: tuple[float, float] | None = None  # time, stalled

    def share_to_give_back(self, now: float) -> tuple[float, str]:
        """Return the share of the unused blocks to give back, 0 to 1, and the reason. Reads the
        state once in `LOOK_SECONDS`; in between the share is 0.

        While processes wait for memory the share is half, since that may be enough a second later.
        When almost no memory is left, it is all.
        """
        if self._last is not None and now - self._last[0] < LOOK_SECONDS:
            return 0.0, ""
        reading = self._read()
        then, before = self._last or (now, reading.stalled)
        self._last = now, reading.stalled
        if reading.free < self._low:
            return 1.0, f"{show_bytes(reading.free)} of memory are left"
        waited = (reading.stalled - before) / (now - then) if now > then else 0.0
        if waited >= STALLED:
            return 0.5, f"processes waited {waited:.0%} of the time for memory"
        return 0.0, ""
