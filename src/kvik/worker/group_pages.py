"""Moves pages if several processes compute a model, each of which has a part of every block.

The first process of the last stage owns the tiers. Pages are in memory that all processes map.
Copies are sent as messages, like steps, and each process copies its part when it reaches the
message: between the same two steps in all processes, so the order relative to writes of a block is
the same everywhere. The parts of a page are disjoint, so only users of a whole page (the disk,
other engines) wait for all parts. A process reports its progress by a number in the shared memory.
It writes the number with a system call, which orders it after the bytes that it has copied.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap

import numpy as np

from kvik.attention.select import NATIVE
from kvik.config.config import ResolvedConfig
from kvik.core.plan import (
    AT_PEER,
    DISK,
    MEMORY,
    NOWHERE,
    PEER,
    WAIT_SECONDS,
    PageKey,
    PageStore,
    SchedulerOutput,
)
from kvik.errors import ConfigError, GroupLost
from kvik.files import shared_memory
from kvik.nn.pages import GroupPages, PagePart, group_pages
from kvik.spec.shares import PipelineStage
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import CopyPages, EarlierStages, OpenPages, OtherRanks, RankSetup
from kvik.worker.page_mover import (
    JOB_PAGES,
    THREADS,
    Loading,
    PageMover,
    TierParts,
)

HEAD_BYTES = 1 << 16  # before the pages: a number for each process (`MAX_RANKS` x `MAX_STAGES`)
# Bytes of pages in transit to the disk, and as many in transit from it and from other engines. Half
# of the pages to the disk may wait for processes that are some steps behind
# (`tier_index.MAX_WRITING`).
STAGED = 128 << 20
LOOK_SECONDS = 0.0005  # between checks of the processes' progress, while there is nothing else
END_SECONDS = 1.0  # for pending copies at the end
LEND_SECONDS = 2.0  # for pending copies of a page that another engine fetches
_NUMBER = struct.Struct("<q")


def own_pages(
    config: ResolvedConfig, network: EngineNetwork, setup: RankSetup | None
) -> tuple[GroupPages, ...]:
    """Return the copiers of the part that this process has of each page.

    Args:
        setup: of its group; None: it has all heads.
    """
    block_size = config.cache.block_size
    share = PagePart(block_size) if setup is None else PagePart(block_size, setup.rank, setup.size)
    native = config.runner.attention_backend == NATIVE
    groups = config.cache.groups
    return group_pages(groups, network.groups, network.kv, share, heads_first=native)


class PageMemory:
    """Pages in memory that all processes of an engine map.

    Attributes:
        rows: [rows, row_bytes] uint8.
    """

    def __init__(self, file: int, opened: OpenPages) -> None:
        """
        Args:
            file: file descriptor, which this object owns from now on.
        """
        self.opened = opened
        self._file = file
        size = HEAD_BYTES + opened.rows * opened.row_bytes
        memory = np.frombuffer(mmap(file, size), np.uint8)
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
    if not message.load:
        blocks.copy_out(message.blocks, rows, message.rows)
        return
    for block, row in zip(message.blocks, message.rows, strict=True):
        blocks.copy_in(rows[row], block)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Pages of a load that are in the shared memory.

    Attributes:
        pages: KV group, block, row.
        staged: rows to free when all processes have copied them.
        failed: indices of missing pages.
        tier, seconds: source of the staged pages, and the time to get them.
    """

    loading: Loading
    pages: list[tuple[int, int, int]]
    staged: list[int]
    failed: list[int]
    tier: str
    seconds: float


class GroupPageMover(PageMover):
    """`PageMover` of the process that owns the tiers, in an engine of several processes.

    The worker's thread sends all copies. The other threads only read pages from the disk and from
    other engines, and send pages to other engines. Pages are copied into blocks when the step
    before which they were planned is done: in a pipeline, a step of a request that has ended may
    still write to the block until then.
    """

    def __init__(
        self,
        pages: Sequence[GroupPages],
        tiers: TierParts,
        receivers: Sequence[OtherRanks | EarlierStages],
        processes: Sequence[int],
    ) -> None:
        """
        Args:
            receivers: processes to send copies to.
            processes: numbers of all processes that copy, including those reached indirectly.

        Raises:
            OSError: see `PageMover`.
            GroupLost: one of the processes is gone; also from `begin`, `take` and `wait`.
        """
        largest = max(group_pages.num_bytes for group_pages in pages)
        places = tiers.places
        kinds = (tiers.folder is not None) + (tiers.peers is not None)
        staged = max(2 * THREADS * kinds, STAGED // largest) if kinds else 0
        self._memory = PageMemory.make(places + 2 * staged, largest)
        self._receivers, self._processes = receivers, processes
        self._number = 0
        self._lent_number = 0  # all copies up to it must be done before a page is lent
        # Free rows for pages to the disk, and for pages from it or from other engines.
        self._to_disk = deque(range(places, places + staged))
        self._from_disk = deque(range(places + staged, places + 2 * staged))
        self._storing: deque[tuple[int, list[tuple[PageKey, bytes, int]]]] = deque()
        self._copying: deque[tuple[int, list[int]]] = deque()
        self._fetched: list[_Fetched] = []
        self._ended = False
        super().__init__(pages, tiers, self._memory.rows)
        threads = max(1, len(self._queues))
        self._job_pages = min(JOB_PAGES, max(1, staged // threads))  # enough rows for all threads
        self._broadcast(self._memory.opened)

    def begin(self, plan: SchedulerOutput) -> None:
        """See `PageMover.begin`."""
        self._look()
        if plan.leases:  # their pages are stored by this plan or earlier ones
            self._lent_number = self._number + len(self._pages)
        super().begin(plan)
        self._lent_number = min(self._lent_number, self._number)

    def _load_done(self, step: int) -> None:
        with self._lock:
            ready = [fetched for fetched in self._fetched if fetched.loading.step <= step]
            self._fetched = [fetched for fetched in self._fetched if fetched.loading.step > step]
        for fetched in ready:
            self._copy_in(fetched)
        self._look()

    def wait_for_more(self) -> None:
        """See `PageMover.wait_for_more`. First wait for pending copies, which are done soon."""
        until = time.monotonic() + WAIT_SECONDS
        while (self._storing or self._copying) and time.monotonic() < until:
            self._look()
            time.sleep(LOOK_SECONDS)
        with self._lock:
            waits = bool(self._under_way) and not self._loaded and not self._fetched
            if waits:
                self._lock.wait(WAIT_SECONDS)
        if self._folder is not None and not self._under_way:
            self._folder.wait(WAIT_SECONDS)

    def close(self) -> None:
        """See `PageMover.close`. Call this before the other processes are ended."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        until = time.monotonic() + END_SECONDS
        with suppress(GroupLost):
            while self._storing and time.monotonic() < until and not self._lost:
                self._look()
                time.sleep(LOOK_SECONDS)
        super().close()
        self._memory.close()

    @property
    def _lost(self) -> bool:
        return any(receiver.lost for receiver in self._receivers)

    def _broadcast(self, message: OpenPages | CopyPages) -> None:
        for receiver in self._receivers:
            receiver.send(message)

    def _copy(self, group: int, blocks: list[int], rows: list[int], *, load: bool) -> int:
        """Make all processes copy. Returns the number that they report when done."""
        self._number += 1
        message = CopyPages(self._number, load, group, blocks, rows)
        self._broadcast(message)
        copy_pages(self._pages, self._memory.rows, message)
        return self._number

    def _look(self) -> None:
        """Continue with pages that all processes have copied."""
        if not self._storing and not self._copying:
            return
        done = self._memory.done(self._processes)
        while self._storing and self._storing[0][0] <= done:
            assert self._folder is not None
            for key, parent, row in self._storing.popleft()[1]:
                page = self._memory.rows[row][: self._pages[key[0]].num_bytes]
                if not self._folder.store(key, parent, page):
                    self._failed_stores.append(key)
                self._to_disk.append(row)
        while self._copying and self._copying[0][0] <= done:
            with self._lock:
                self._from_disk += self._copying.popleft()[1]
                self._lock.notify_all()

    def _store(self, stores: Sequence[PageStore]) -> None:
        """Copy blocks to the memory tier and to staging rows for the disk. The disk cannot read a
        place in the memory tier, which may get another page before all have copied this one."""
        for group in range(len(self._pages)):
            blocks, rows, staged = [], [], []
            for store in (page_store for page_store in stores if page_store.key[0] == group):
                if store.place != NOWHERE:
                    blocks.append(store.block)
                    rows.append(store.place)
                if store.on_disk and self._to_disk:
                    row = self._to_disk.popleft()
                    blocks.append(store.block)
                    rows.append(row)
                    staged.append((store.key, store.parent, row))
                elif store.on_disk:
                    self._failed_stores.append(store.key)
            if blocks:
                number = self._copy(group, blocks, rows, load=False)
                if staged:
                    self._storing.append((number, staged))

    def _run(self, loading: Loading, job: list[int], scratch: np.ndarray) -> None:
        """Bring some pages of a load into the shared memory."""
        if loading.load.pages[job[0]][2] == AT_PEER:
            self._fetch(loading, job)
            return
        pages, staged, failed, seconds = [], [], [], 0.0
        for i in job:
            key, block, place = loading.load.pages[i]
            if place != NOWHERE:
                pages.append((key[0], block, place))
                continue
            row = self._free_row()
            started = time.monotonic()
            page = self._memory.rows[row][: self._pages[key[0]].num_bytes]
            staged.append(row)
            if self._read_disk(key, page):
                pages.append((key[0], block, row))
                seconds += time.monotonic() - started
            else:
                failed.append(i)
        self._all_there(_Fetched(loading, pages, staged, failed, DISK, seconds))

    def _fetch(self, loading: Loading, job: list[int]) -> None:
        """Fetch pages of another engine into the shared memory."""
        load, good = loading.load, dict[int, int]()
        keys = [load.pages[i][0] for i in job]
        started = time.monotonic()
        if self._peers is not None and load.source is not None:
            sizes = [group_pages.num_bytes for group_pages in self._pages]
            for i, page in zip(job, self._peers.fetch(load.source, keys, sizes), strict=True):
                if page is not None:
                    good[i] = self._free_row()
                    self._memory.rows[good[i]][: len(page)] = page
        seconds = time.monotonic() - started
        pages = [(load.pages[i][0][0], load.pages[i][1], row) for i, row in good.items()]
        failed = [i for i in job if i not in good]
        self._all_there(_Fetched(loading, pages, list(good.values()), failed, PEER, seconds))

    def _page_at(self, key: PageKey, place: int) -> np.ndarray:
        """See `PageMover._page_at`. Called in threads that serve pages to other engines.

        Raises:
            OSError: a process has not copied its part in time.
        """
        until = time.monotonic() + LEND_SECONDS
        while self._memory.done(self._processes) < self._lent_number:
            if time.monotonic() > until:
                raise OSError("a process does not copy its part of a page")
            time.sleep(LOOK_SECONDS)
        return super()._page_at(key, place)

    def _all_there(self, fetched: _Fetched) -> None:
        if self._at_once:
            self._copy_in(fetched)
            return
        with self._lock:
            self._fetched.append(fetched)
            self._lock.notify_all()

    def _free_row(self) -> int:
        """Wait for a free row for a page from the disk, and return it."""
        while self._at_once and not self._from_disk:
            if self._lost:
                raise GroupLost("kv_tiers", "a process that copies pages has exited")
            self._look()
        with self._lock:
            while not self._from_disk and not self._ended:
                self._lock.wait()
            return self._from_disk.popleft() if self._from_disk else -1

    def _copy_in(self, fetched: _Fetched) -> None:
        """Make all processes copy pages of a load into blocks."""
        staged = set(fetched.staged)
        rates: dict[str, tuple[int, float]] = {}
        for group, own_pages in enumerate(self._pages):
            for tier in (MEMORY, fetched.tier):
                pairs = [
                    (block, row)
                    for owner, block, row in fetched.pages
                    if owner == group and (row in staged) == (tier != MEMORY)
                ]
                if not pairs:
                    continue
                started = time.monotonic()
                self._copy(group, [b for b, _ in pairs], [r for _, r in pairs], load=True)
                size, seconds = rates.get(tier, (0, 0.0 if tier == MEMORY else fetched.seconds))
                seconds += time.monotonic() - started
                rates[tier] = size + len(pairs) * own_pages.num_bytes, seconds
        self._copying.append((self._number, fetched.staged))
        measured = [(tier, size, seconds) for tier, (size, seconds) in rates.items()]
        self._job_done(fetched.loading, fetched.failed, measured)
