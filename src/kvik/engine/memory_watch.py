"""When the system is short of memory: what a cache of prefixes should give back, before the system
ends a process to get it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvik.config.hardware import memory_left, memory_stalls
from kvik.config.units import MIB, show_bytes

LOOK_SECONDS = 1.0  # between two looks
STALLED = 0.1  # of the time: processes waited so long for memory that the system looked for
LOW = 256 * MIB  # and at most LOW_SHARE of what the engine may take
LOW_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What the system tells.

    Attributes:
        stalled: seconds that processes have waited for memory, since some time in the past.
        left: bytes that this process can take, those of files that can be read again included.
    """

    stalled: float
    left: int


def read_memory() -> MemoryReading:
    return MemoryReading(memory_stalls(), memory_left())


class MemoryWatch:
    """Says which share of the unused KV blocks should go.

    Args:
        limit: bytes that the engine may take.
        read: see `MemoryReading`.
    """

    def __init__(self, limit: int, read: Callable[[], MemoryReading] = read_memory) -> None:
        self._low = min(LOW, int(limit * LOW_SHARE))
        self._read = read
        self._last: tuple[float, float] | None = None  # time, stalled

    def share_to_give_back(self, now: float) -> tuple[float, str]:
        """Return a share of the unused blocks, 0 to 1, and the reason. Looks once in
        `LOOK_SECONDS`; in between nothing should go.

        Half of them goes while processes wait for memory: a second later it may be enough. All go
        when next to nothing is left.
        """
        if self._last is not None and now - self._last[0] < LOOK_SECONDS:
            return 0.0, ""
        reading = self._read()
        then, before = self._last or (now, reading.stalled)
        self._last = now, reading.stalled
        if reading.left < self._low:
            return 1.0, f"{show_bytes(reading.left)} of memory are left"
        waited = (reading.stalled - before) / (now - then) if now > then else 0.0
        if waited >= STALLED:
            return 0.5, f"processes waited {waited:.0%} of the time for memory"
        return 0.0, ""
