"""Moves pages by copies that end later than they are begun, in other processes or on a GPU.

Steps and copies have one order, in which each begins only after those before it have ended: copies
are begun between two steps. So a copy sees what earlier steps wrote, and later steps see what it
wrote, without waiting. Only what reads whole pages on the host (the disk, other engines) waits for
the end of a copy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvik.core.plan import (
    AT_PEER,
    DISK,
    MEMORY,
    NOWHERE,
    PEER,
    WAIT_SECONDS,
    PageKey,
    PageLease,
    PageStore,
    SchedulerOutput,
)
from kvik.errors import GroupLost
from kvik.nn.pages import GroupPages
from kvik.worker.page_mover import JOB_PAGES, THREADS, Loading, PageMover, TierParts, log

# Bytes of pages in transit to the disk, and as many in transit from it and from other engines. Half
# of the pages to the disk may wait for copies that are some steps behind
# (`tier_index.MAX_WRITING`).
STAGED = 128 << 20
LOOK_SECONDS = 0.0005  # between checks of pending copies, while there is nothing else
END_SECONDS = 1.0  # for pending copies at the end
LEND_SECONDS = 2.0  # for pending copies of a page that another engine fetches


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was begun."""

    number: int  # copies are counted from 1, and end in this order
    seconds: Callable[[], float]  # returns how long it took, once it has ended


class PageCopies(Protocol):
    """Copies between blocks and pages."""

    rows: np.ndarray  # the pages, [rows, bytes] uint8

    @property
    def lost(self) -> str:
        """Why no copy ends any more; "": they do."""
        ...

    def copy(self, group: int, blocks: list[int], rows: list[int], *, load: bool) -> Copied:
        """Begin to copy blocks of a KV group to rows, or back if `load`."""
        ...

    def done(self, number: int) -> bool:
        """Return whether all copies up to a number have ended."""
        ...

    def settle(self) -> None:
        """Make `done` callable in other threads for all copies begun until now."""
        ...

    def close(self) -> None:
        """Free the memory of the pages."""
        ...


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Pages of a load that are in rows."""

    loading: Loading
    pages: list[tuple[int, int, int]]  # KV group, block, row
    staged: list[int]  # rows to free when they are copied
    failed: list[int]  # indices of missing pages
    # tier, seconds: source of the staged pages, and the time to get them.
    tier: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies into blocks that may not have ended."""

    number: int  # of the last one
    staged: list[int]  # rows that they read, to free then
    # Of each tier, the bytes, the time to get them, and the copies.
    parts: list[tuple[str, int, float, list[Copied]]]


class StagedPageMover(PageMover):
    """`PageMover` whose copies end later than they are begun.

    The worker's thread begins all copies. The other threads only read pages from the disk and from
    other engines, and send pages to other engines. Pages are copied into blocks when the step
    before which they were planned is done: in a pipeline, a step of a request that has ended may
    still write to the block until then.
    """

    def __init__(
        self,
        pages: Sequence[GroupPages],
        tiers: TierParts,
        make_copies: Callable[[int, int], PageCopies],
    ) -> None:
        """
        Args:
            make_copies: makes the copies, from the number of rows and the bytes of each.

        Raises:
            OSError: see `PageMover`.
            GroupLost: a process that copies is gone; also from `begin`, `take` and `wait`.
        """
        largest = max(group_pages.num_bytes for group_pages in pages)
        places = tiers.places
        kinds = (tiers.folder is not None) + (tiers.peers is not None)
        staged = max(2 * THREADS * kinds, STAGED // largest) if kinds else 0
        self._copies = make_copies(places + 2 * staged, largest)
        self._last = 0  # number of the last copy
        self._lent = 0  # all copies up to it must be done before a page is lent
        # Free rows for pages to the disk, and for pages from it or from other engines.
        self._to_disk = deque(range(places, places + staged))
        self._from_disk = deque(range(places + staged, places + 2 * staged))
        self._storing: deque[tuple[int, list[tuple[PageKey, bytes, int]]]] = deque()
        self._copying: deque[_Copying] = deque()
        self._fetched: list[_Fetched] = []
        self._ended = False
        super().__init__(pages, tiers, self._copies.rows)
        threads = max(1, len(self._queues))
        self._job_pages = min(JOB_PAGES, max(1, staged // threads))  # enough rows for all threads

    def begin(self, plan: SchedulerOutput) -> None:
        self._look()
        super().begin(plan)

    def _lend(self, leases: Sequence[PageLease]) -> None:
        self._copies.settle()  # their pages are stored by this plan or earlier ones
        self._lent = self._last
        super()._lend(leases)

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
        """See `PageMover.close`. Call this before other processes are ended."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        until = time.monotonic() + END_SECONDS
        with suppress(GroupLost, RuntimeError):  # a GPU that failed raises the latter
            while self._storing and time.monotonic() < until and not self._copies.lost:
                self._look()
                time.sleep(LOOK_SECONDS)
        super().close()
        self._copies.close()

    def _copy(self, group: int, blocks: list[int], rows: list[int], *, load: bool) -> Copied:
        copied = self._copies.copy(group, blocks, rows, load=load)
        self._last = copied.number
        return copied

    def _look(self) -> None:
        """Continue with pages whose copies are done."""
        while self._storing and self._copies.done(self._storing[0][0]):
            assert self._folder is not None
            for key, parent, row in self._storing.popleft()[1]:
                page = self._copies.rows[row][: self._pages[key[0]].num_bytes]
                if not self._folder.store(key, parent, page):
                    self._failed_stores.append(key)
                self._to_disk.append(row)
        while self._copying and self._copies.done(self._copying[0].number):
            ended = self._copying.popleft()
            rates = [
                (tier, size, seconds + sum(copied.seconds() for copied in copies))
                for tier, size, seconds, copies in ended.parts
            ]
            with self._lock:
                self._rates += rates
                self._from_disk += ended.staged
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
                copied = self._copy(group, blocks, rows, load=False)
                if staged:
                    self._storing.append((copied.number, staged))

    def _run(self, loading: Loading, job: list[int], scratch: np.ndarray) -> None:
        """Bring some pages of a load into rows."""
        if loading.load.pages[job[0]][2] == AT_PEER:
            self._fetch(loading, job, scratch)
            return
        pages, staged, failed, seconds = [], [], [], 0.0
        for i in job:
            key, block, place = loading.load.pages[i]
            if place != NOWHERE:
                pages.append((key[0], block, place))
                continue
            row = self._free_row()
            started = time.monotonic()
            page = self._copies.rows[row][: self._pages[key[0]].num_bytes]
            staged.append(row)
            if self._read_disk(key, page):
                pages.append((key[0], block, row))
                seconds += time.monotonic() - started
            else:
                failed.append(i)
        self._all_there(_Fetched(loading, pages, staged, failed, DISK, seconds))

    def _fetch(self, loading: Loading, job: list[int], scratch: np.ndarray) -> None:
        """Fetch pages of another engine into rows."""
        load, good = loading.load, dict[int, int]()
        started = time.monotonic()
        try:
            for i, (_, page) in zip(job, self._read(load, job, scratch), strict=True):
                if page is not None:
                    row = self._free_row()
                    self._copies.rows[row][: len(page)] = page
                    good[i] = row
        except Exception:
            log.exception("pages could not be loaded")
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
        while not self._copies.done(self._lent):
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
            if self._copies.lost:
                raise GroupLost("kv_tiers", self._copies.lost)
            self._look()
        with self._lock:
            while not self._from_disk and not self._ended:
                self._lock.wait()
            return self._from_disk.popleft() if self._from_disk else -1

    def _copy_in(self, fetched: _Fetched) -> None:
        """Begin to copy pages of a load into blocks, which later steps may read."""
        staged = set(fetched.staged)
        copies: dict[str, list[Copied]] = {MEMORY: [], fetched.tier: []}
        sizes: Counter[str] = Counter()
        for group, own_pages in enumerate(self._pages):
            for tier, tier_copies in copies.items():
                pairs = [
                    (block, row)
                    for owner, block, row in fetched.pages
                    if owner == group and (row in staged) == (tier != MEMORY)
                ]
                if pairs:
                    blocks, rows = ([*column] for column in zip(*pairs, strict=True))
                    tier_copies.append(self._copy(group, blocks, rows, load=True))
                    sizes[tier] += len(pairs) * own_pages.num_bytes
        parts = [
            (tier, size, 0.0 if tier == MEMORY else fetched.seconds, copies[tier])
            for tier, size in sizes.items()
        ]
        self._copying.append(_Copying(self._last, fetched.staged, parts))
        self._job_done(fetched.loading, fetched.failed, [])
