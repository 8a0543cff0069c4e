"""Synchronisation and heartbeats of processes that compute one model together.

Does not import torch: a process sends heartbeats before it imports torch.
"""

from __future__ import annotations

import numpy as np

from kvik.kernels.cpu import _native

BARRIER_BYTES = 8192  # of `Barrier` (csrc/group.hpp), and room for more
# Limit for the wait in one exchange; between exchanges, all processes compute about equally long.
# A process that is gone is detected long before: this is for one that is alive but does not come.
EXCHANGE_SECONDS = 180.0
_LINE = 64 // 4  # words of a cache line: its head has one, and what each process counts another


class BrokenGroup(RuntimeError):
    """One of the processes is gone."""


class Barrier:
    """The beginning of the shared memory: `Barrier` of csrc/group.hpp."""

    def __init__(self, memory: np.ndarray) -> None:
        """
        Args:
            memory: [bytes] uint8, initially zeros.
        """
        self._words = memory[:BARRIER_BYTES].view(np.uint32)
        self._beats = self._words[_native.BEATS // 4 :]

    @property
    def address(self) -> int:
        return int(self._words.ctypes.data)

    def open(self, size: int) -> None:
        """Set the number of processes, before the first exchange."""
        self._words[1] = size

    @property
    def broken(self) -> bool:
        """Whether one of the processes is gone: everything computed since then is invalid."""
        return bool(self._words[0])

    def give_up(self) -> None:
        """Stop all waiting between processes."""
        self._words[0] = 1

    def arrivals(self, rank: int) -> int:
        """Return how many exchanges a process has come to, modulo 2^32."""
        return int(self._words[_LINE * (1 + rank)])

    def beats(self, rank: int) -> int:
        """Return the heartbeat counter of a process; 0: it has not begun."""
        return int(self._beats[rank])

    def beat(self, rank: int) -> _native.Heartbeat:
        """Send heartbeats for as long as the result lives."""
        return _native.Heartbeat(self._beats[rank : rank + 1])
