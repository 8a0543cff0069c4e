"""Moves pages between the KV cache and its tiers, as plans say.

What is to be kept is copied while a step begins, before anything is written. Loads go on in threads
while steps run. The disk has a thread for what is written, and loads read it in theirs.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from kvik.core.plan import (
    DISK,
    MEMORY,
    NOWHERE,
    Moved,
    PageKey,
    PageLoad,
    PageStore,
    SchedulerOutput,
)
from kvik.nn.pages import GroupPages

log = logging.getLogger(__name__)

THREADS = 2  # that load
REMEMBERED = 64  # tickets; a plan that failed comes again within a few steps
JOB_PAGES = 32  # of a load that a thread copies at a time
WAIT_SECONDS = 0.05  # for loads, of a plan that has nothing else: requests may come meanwhile
NOTHING = Moved()


class PageFolder(Protocol):
    """The disk tier, as what moves pages sees it."""

    def store(self, key: PageKey, parent: bytes, page: np.ndarray) -> bool:
        """Begin to write a page, whose bytes may change afterwards. Returns False if too many are
        waiting to be written."""
        ...

    def drop(self, key: PageKey) -> None:
        """Begin to delete a page."""
        ...

    def read(self, key: PageKey, page: np.ndarray) -> bool:
        """Read a page. Returns whether it is there and good; called in several threads."""
        ...

    def take(self) -> Moved:
        """Return what became of pages since the last call, without loads."""
        ...

    def tell_again(self) -> None:
        """Let `take` tell again of all pages, if it has told of them."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until there is something for `take`."""
        ...

    def close(self) -> None:
        """Write what is waiting, for a limited time."""
        ...


class Loading:
    """A load under way.

    Attributes:
        step: of the plan that began it.
        left: jobs.
        failed: indices of pages that did not come.
    """

    def __init__(self, load: PageLoad, step: int, job_pages: int) -> None:
        self.load, self.step = load, step
        self._job_pages = job_pages
        self.left = -(-len(load.pages) // job_pages)
        self.failed: list[int] = []

    def pages_of_job(self, first: int) -> list[tuple[PageKey, int, int]]:
        """Return the pages of the job that begins with the `first`-th; see `PageLoad`."""
        return self.load.pages[first : first + self._job_pages]


class PageMover:
    """The moves of one worker. All but `read` of the folder is called in the worker's thread."""

    def __init__(
        self,
        pages: Sequence[GroupPages],
        places: int,
        folder: PageFolder | None,
        *,
        at_once: bool = False,
        slab: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            pages: of each KV group.
            places: pages of the memory tier.
            folder: None: there is no disk tier.
            at_once: a load is done when `begin` returns, for a replay.
            slab: [places, bytes] uint8; None: new memory.

        Raises:
            OSError: there is no address space for the memory tier.
        """
        self._pages = pages
        self._largest = max(each.num_bytes for each in pages)
        # The system gives memory to a page when it is first written.
        self._slab = slab
        if places and slab is None:
            memory = mmap.mmap(-1, places * self._largest)
            self._slab = np.frombuffer(memory, np.uint8).reshape(places, self._largest)
        self._folder = folder
        self._scratch = np.empty(self._largest, np.uint8)
        self._at_once = at_once
        self._job_pages = JOB_PAGES
        self._known: set[int] = set()  # tickets under way
        self._lock = threading.Condition()
        self._loaded: list[tuple[int, list[int]]] = []
        self._rates: list[tuple[str, int, float]] = []
        self._failed_stores: list[PageKey] = []
        self._begun: deque[int] = deque(maxlen=REMEMBERED)  # tickets
        self._jobs: SimpleQueue[tuple[Loading, int] | None] = SimpleQueue()
        if not at_once:
            for number in range(THREADS):
                thread = threading.Thread(target=self._work, name=f"pages-{number}", daemon=True)
                thread.start()

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin the moves of a plan. What fails is told by `take`."""
        if plan.step == 0:  # perhaps of another scheduler than the plan before
            self._begun.clear()
            if self._folder is not None:
                self._folder.tell_again()
        if self._folder is not None:
            for key in plan.drops:
                self._folder.drop(key)
        if plan.stores:
            self._store(plan.stores)
        for load in plan.loads:
            if load.ticket not in self._begun:  # else an earlier plan failed behind this
                self._begun.append(load.ticket)
                self._load(Loading(load, plan.step, self._job_pages))

    def take(self, step: int) -> Moved | None:
        """Return what became of moves since the last call; None: nothing.

        Args:
            step: of the last plan that is computed.
        """
        self._load_done(step)
        moved = Moved() if self._folder is None else self._folder.take()
        failed, self._failed_stores = self._failed_stores, []
        with self._lock:
            loaded, self._loaded = self._loaded, []
            rates, self._rates = self._rates, []
            self._known.difference_update(ticket for ticket, _ in loaded)
        moved = replace(moved, loaded=loaded, rates=rates, lost=[*moved.lost, *failed])
        return moved if moved != NOTHING else None

    def wait(self, step: int) -> Moved | None:
        """As `take`; wait a moment for a load if there are any."""
        self.wait_for_more()
        return self.take(step)

    def wait_for_more(self) -> None:
        """Wait a moment for a load if there are any, else for the disk."""
        with self._lock:
            if self._known and not self._loaded:
                self._lock.wait(WAIT_SECONDS)
            waited = bool(self._known)
        if self._folder is not None and not waited:
            self._folder.wait(WAIT_SECONDS)

    def _load_done(self, step: int) -> None:
        """All steps up to this one are done."""

    def close(self) -> None:
        """End the threads, and write what is waiting."""
        for _ in range(THREADS):
            self._jobs.put(None)
        if self._folder is not None:
            self._folder.close()

    def _store(self, stores: Sequence[PageStore]) -> None:
        for group, pages in enumerate(self._pages):
            kept = [each for each in stores if each.key[0] == group and each.place != NOWHERE]
            if kept and self._slab is not None:
                places = [each.place for each in kept]
                pages.copy_out([each.block for each in kept], self._slab, places)
        for store in stores:
            if store.on_disk:
                self._store_on_disk(store)

    def _store_on_disk(self, store: PageStore) -> None:
        assert self._folder is not None
        pages, page = self._pages[store.key[0]], self._scratch
        if store.place != NOWHERE:
            page = self._place(store.place)
        else:
            pages.copy_out([store.block], self._scratch[None], [0])
        if not self._folder.store(store.key, store.parent, page[: pages.num_bytes]):
            self._failed_stores.append(store.key)

    def _place(self, place: int) -> np.ndarray:
        assert self._slab is not None
        return self._slab[place]

    def _load(self, loading: Loading) -> None:
        with self._lock:
            self._known.add(loading.load.ticket)
        for first in range(0, len(loading.load.pages), self._job_pages):
            if self._at_once:
                self._run(loading, first, self._scratch)
            else:
                self._jobs.put((loading, first))

    def _work(self) -> None:
        scratch = np.empty(self._largest, np.uint8)
        while (job := self._jobs.get()) is not None:
            self._run(*job, scratch)

    def _run(self, loading: Loading, first: int, scratch: np.ndarray) -> None:
        """Load some pages."""
        sizes, seconds, failed = {MEMORY: 0, DISK: 0}, {MEMORY: 0.0, DISK: 0.0}, []
        for i, page in enumerate(loading.pages_of_job(first), first):
            tier, began = MEMORY if page[2] != NOWHERE else DISK, time.monotonic()
            if not self._load_page(*page, scratch):
                failed.append(i)
                continue
            seconds[tier] += time.monotonic() - began
            sizes[tier] += self._pages[page[0][0]].num_bytes
        rates = [(tier, sizes[tier], seconds[tier]) for tier in sizes if sizes[tier]]
        self._job_done(loading, failed, rates)

    def _job_done(
        self, loading: Loading, failed: list[int], rates: list[tuple[str, int, float]]
    ) -> None:
        """Some pages are loaded; the last job of a load tells that it is done."""
        with self._lock:
            loading.failed += failed
            loading.left -= 1
            self._rates += rates
            if not loading.left:
                self._loaded.append((loading.load.ticket, sorted(loading.failed)))
                self._lock.notify()

    def _load_page(self, key: PageKey, block: int, place: int, scratch: np.ndarray) -> bool:
        pages = self._pages[key[0]]
        if place != NOWHERE:
            pages.copy_in(self._place(place), block)
            return True
        page = scratch[: pages.num_bytes]
        if not self._read(key, page):
            return False
        pages.copy_in(page, block)
        return True

    def _read(self, key: PageKey, page: np.ndarray) -> bool:
        """Read a page of the disk tier. Returns whether it is there and good."""
        try:
            return self._folder is not None and self._folder.read(key, page)
        except Exception:
            log.exception("a page could not be loaded")
            return False
