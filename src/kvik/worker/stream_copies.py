"""Copies pages between the KV cache of a GPU and pinned host memory.

Copies are put on the stream on which steps run, so they begin and end between the same two steps
without any further order. Meanwhile no step runs: a page of 2 MiB takes about 40 microseconds over
PCIe 5, a tenth of the time in which an H200 computes its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from kvik.config.units import show_bytes
from kvik.errors import ConfigError
from kvik.nn.pages import GroupPages
from kvik.worker.group import CopyPages
from kvik.worker.group_pages import copy_pages
from kvik.worker.page_mover import host_memory
from kvik.worker.staged_mover import Copied


class Mark(Protocol):
    """A point on the stream; `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether everything before it has ended."""
        ...

    def synchronize(self) -> None:
        """Wait until then."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds until another one; both have been passed."""
        ...


def mark_now() -> Mark:
    """Return the end of the current stream."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def pin(memory: np.ndarray) -> Callable[[], object]:
    """Pin host memory, which a GPU then reads and writes while the host continues. Returns what
    unpins it.

    Raises:
        ConfigError: the system does not permit it.
    """
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        reason = f"host memory of {show_bytes(memory.nbytes)} cannot be pinned"
        raise ConfigError("kv_tiers", f"{reason} (CUDA error {error})")
    return partial(runtime.cudaHostUnregister, address)


class StreamCopies:
    """`PageCopies` of an engine on one GPU.

    Only the thread of the worker may use the GPU, so `done` of other threads must be `settle`d:
    while a graph is captured, CUDA refuses the calls of any thread.
    """

    lost = ""

    def __init__(
        self,
        pages: Sequence[GroupPages],
        rows: int,
        row_bytes: int,
        mark: Callable[[], Mark] = mark_now,
        pin: Callable[[np.ndarray], Callable[[], object]] = pin,
    ) -> None:
        """
        Raises:
            OSError: there is no address space for the rows.
            ConfigError: they cannot be pinned.
        """
        self._pages, self._mark = pages, mark
        self.rows = host_memory(rows * row_bytes).reshape(rows, row_bytes)
        self._unpin = pin(self.rows)
        self._number = self._done = 0
        self._pending: deque[tuple[int, Mark]] = deque()  # number of a copy, and its end

    def copy(self, group: int, blocks: list[int], rows: list[int], *, load: bool) -> Copied:
        self._number += 1
        begun = self._mark()
        copy_pages(self._pages, self.rows, CopyPages(self._number, load, group, blocks, rows))
        ended = self._mark()
        self._pending.append((self._number, ended))
        return Copied(self._number, lambda: begun.elapsed_time(ended) / 1e3)

    def done(self, number: int) -> bool:
        while self._done < number and self._pending and self._pending[0][1].query():
            self._done = self._pending.popleft()[0]
        return self._done >= number

    def settle(self) -> None:
        """See `PageCopies.settle`. Wait for the copies."""
        if self._pending:
            self._pending[-1][1].synchronize()
            self._done = self._number
            self._pending.clear()

    def close(self) -> None:
        """Wait for the copies, and unpin the rows."""
        with suppress(RuntimeError):  # a GPU that failed copies nothing more
            self.settle()
        self._unpin()
