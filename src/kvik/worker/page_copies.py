"""Copies of pages that end later than they are begun (`PageCopies`), and what each process copies.

If several processes compute a model, each of them has a part of every block. The first process of
the last stage owns the tiers. Pages are in memory that all processes map. Copies are sent as
messages, like steps, and each process copies its part when it reaches the message: between the same
two steps in all processes, so the order relative to writes of a block is the same everywhere. The
parts of a page are disjoint, so only users of a whole page (the disk, other engines) wait for all
parts. A process reports its progress by a number in the shared memory. It writes the number with a
system call, which orders it after the bytes that it has copied.

On a GPU, pages are copied between the KV cache and pinned host memory, on the stream on which steps
run, so copies begin and end between the same two steps without any further order. Meanwhile no step
runs: a page of 2 MiB takes about 40 microseconds over PCIe 5, a tenth of the time in which an H200
computes its tokens.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from mmap import mmap

import numpy as np
import torch

from kvik.attention.select import NATIVE
from kvik.config.config import ResolvedConfig
from kvik.config.units import show_bytes
from kvik.errors import ConfigError
from kvik.files import shared_memory
from kvik.nn.pages import (
    DeviceStatePages,
    GroupPages,
    JoinedPages,
    PagePart,
    StatePages,
    group_pages,
)
from kvik.spec.kv import STATE_BYTES
from kvik.spec.shares import PipelineStage
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import CopyPages, EarlierStages, OpenPages, OtherRanks, RankSetup
from kvik.worker.loading import head_groups
from kvik.worker.page_mover import host_memory
from kvik.worker.staged_mover import Copied

HEAD_BYTES = 1 << 16  # before the pages: a number for each process (`MAX_RANKS` x `MAX_STAGES`)
_NUMBER = struct.Struct("<q")


def own_pages(
    config: ResolvedConfig,
    network: EngineNetwork,
    setup: RankSetup | None,
    covered: np.ndarray | None = None,
) -> tuple[GroupPages, ...]:
    """Return the copiers of the part that this process has of each page.

    Args:
        setup: of its group; None: it has all heads.
        covered: of the table of requests; None: another process has it.
    """
    block_size = config.cache.block_size
    share = PagePart(block_size) if setup is None else PagePart(block_size, setup.rank, setup.size)
    native = config.runner.attention_backend == NATIVE
    tiers, copy = config.cache.tiers, partial(group_pages, share=share, heads_first=native)
    pages = list(copy(config.cache.groups, network.groups, network.kv))
    speculation, drafting = config.speculation, network.drafting
    if drafting is not None and speculation is not None and speculation.paged:
        target = pages[speculation.draft_group]
        first = target.num_bytes
        (head,) = copy(head_groups(config), drafting.groups, drafting.kv, first=first)
        pages[speculation.draft_group] = JoinedPages(target, head)
    if tiers is None or not tiers.state_pages:
        return tuple(pages)
    layers = config.model.layers[: 0 if network.stage is None else network.stage.layers.start]
    kind = StatePages if network.states.pool.device.type == "cpu" else DeviceStatePages
    states = kind(
        network.states.pool,
        STATE_BYTES * sum(layer.state.size for layer in layers if layer.state),
        tiers.page_bytes[-1],
        tiers.state_pages,
        covered,
        writes=setup is None or not setup.rank,  # each process of a group has all states
    )
    return *pages, states


class PageMemory:
    """Pages in memory that all processes of an engine map."""

    def __init__(self, file: int, opened: OpenPages) -> None:
        """
        Args:
            file: file descriptor, which this object owns from now on.
        """
        self.opened = opened
        self._file = file
        size = HEAD_BYTES + opened.rows * opened.row_bytes
        memory = np.frombuffer(mmap(file, size), np.uint8)
        # [rows, row_bytes] uint8.
        self.rows = memory[HEAD_BYTES:].reshape(opened.rows, opened.row_bytes)

    @staticmethod
    def make(rows: int, row_bytes: int) -> PageMemory:
        """Allocate the memory.

        Raises:
            ConfigError: other processes cannot open it on this system.
            OSError: there is no address space for it.
        """
        if sys.platform != "linux":
            reason = f"must be left out where several processes compute on {sys.platform}"
            raise ConfigError("kv_tiers", reason)
        file = shared_memory(HEAD_BYTES + rows * row_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
        return PageMemory(file, OpenPages(path, rows, row_bytes))

    @staticmethod
    def open(opened: OpenPages) -> PageMemory:
        """Map the memory of another process.

        Raises:
            OSError: its owner is gone.
        """
        return PageMemory(os.open(opened.path, os.O_RDWR | os.O_CLOEXEC), opened)

    def confirm(self, process: int, number: int) -> None:
        """Report that a process has made all copies up to a number."""
        os.pwrite(self._file, _NUMBER.pack(number), process * _NUMBER.size)

    def done(self, processes: Sequence[int]) -> int:
        """Return the number up to which all these processes have made their copies."""
        data = os.pread(self._file, (max(processes) + 1) * _NUMBER.size, 0)
        return min(_NUMBER.unpack_from(data, process * _NUMBER.size)[0] for process in processes)

    def close(self) -> None:
        os.close(self._file)


class PageShare:
    """The part in page moves of a process that does not own the tiers."""

    def __init__(
        self,
        config: ResolvedConfig,
        network: EngineNetwork,
        setup: RankSetup | None,
        stage: PipelineStage | None,
    ) -> None:
        """
        Args:
            setup: of its group; None: it has all heads.
            stage: its stage; None: it has all layers.
        """
        self._pages: tuple[GroupPages, ...] = ()
        if config.cache.tiers is not None:
            self._pages = own_pages(config, network, setup)
        rank = 0 if setup is None else setup.rank
        self._process = rank + config.runner.ranks * (0 if stage is None else stage.number)
        self._memory: PageMemory | None = None

    def do(self, message: OpenPages | CopyPages) -> None:
        """Process a message from the owner of the tiers.

        Raises:
            OSError: the owner is gone.
        """
        if isinstance(message, OpenPages):
            self._memory = PageMemory.open(message)
            return
        assert self._memory is not None
        copy_pages(self._pages, self._memory.rows, message)
        self._memory.confirm(self._process, message.number)


def copy_pages(pages: Sequence[GroupPages], rows: np.ndarray, message: CopyPages) -> None:
    """Copy between blocks and rows of pages: [rows, bytes] uint8."""
    blocks = pages[message.group]
    if message.load:
        blocks.copy_in(rows, message.rows, message.blocks)
    else:
        blocks.copy_out(message.blocks, rows, message.rows)


class ProcessCopies:
    """`PageCopies` of an engine of several processes."""

    def __init__(
        self,
        pages: Sequence[GroupPages],
        receivers: Sequence[OtherRanks | EarlierStages],
        processes: Sequence[int],
        rows: int,
        row_bytes: int,
    ) -> None:
        """
        Args:
            pages: the parts of this process.
            receivers: processes to send copies to.
            processes: numbers of all other processes that copy, including those reached indirectly.

        Raises:
            ConfigError, OSError: see `PageMemory.make`.
            GroupLost: one of the processes is gone; also from `copy`.
        """
        self._pages, self._receivers, self._processes = pages, receivers, processes
        self._memory = PageMemory.make(rows, row_bytes)
        self.rows = self._memory.rows
        self._number = 0
        self._broadcast(self._memory.opened)

    @property
    def lost(self) -> str:
        return next((receiver.lost for receiver in self._receivers if receiver.lost), "")

    def _broadcast(self, message: OpenPages | CopyPages) -> None:
        for receiver in self._receivers:
            receiver.send(message)

    def copy(self, group: int, blocks: list[int], rows: list[int], *, load: bool) -> Copied:
        """See `PageCopies.copy`. This process copies at once."""
        self._number += 1
        message = CopyPages(self._number, load, group, blocks, rows)
        self._broadcast(message)
        started = time.monotonic()
        copy_pages(self._pages, self.rows, message)
        seconds = time.monotonic() - started
        return Copied(self._number, lambda: seconds)

    def done(self, number: int) -> bool:
        return self._memory.done(self._processes) >= number

    def settle(self) -> None:
        """See `PageCopies.settle`. Threads that need pages may ask `done` themselves."""

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


# Copies on the stream of a GPU.


def mark_now() -> torch.cuda.Event:
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
        mark: Callable[[], torch.cuda.Event] = mark_now,
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
        # The number of each copy, and its end.
        self._pending: deque[tuple[int, torch.cuda.Event]] = deque()

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
