"""Moves pages between the KV cache and its tiers, as planned.

Blocks to store are copied while a step begins, before it writes anything. Loads run in threads
while steps run, and read the disk there. The disk tier has a thread for writing.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvik.core.plan import (
    AT_PEER,
    DISK,
    MEMORY,
    NOWHERE,
    PEER,
    WAIT_SECONDS,
    Moved,
    PageKey,
    PageLease,
    PageLoad,
    PageStore,
    SchedulerOutput,
)
from kvik.core.types import PageSource

if TYPE_CHECKING:
    from kvik.nn.pages import GroupPages
    from kvik.worker.peer_tier import PageServer

log = logging.getLogger(__name__)

THREADS = 2  # for loading
REMEMBERED = 64  # tickets; loads of a failed plan are sent again within a few steps
JOB_PAGES = 32  # pages of a load that a thread copies at a time
NOTHING = Moved()


class PageFolder:
    """The interface of the disk tier. By default, nothing changes by itself."""

    def store(self, key: PageKey, parent: bytes, page: np.ndarray) -> bool:
        """Begin to write a page, whose bytes may change afterwards. Returns False if too many are
        waiting to be written."""
        raise NotImplementedError

    def drop(self, key: PageKey) -> None:
        """Begin to delete a page."""
        raise NotImplementedError

    def read(self, key: PageKey, page: np.ndarray) -> bool:
        """Read a page. Returns whether it exists and is intact; called in several threads."""
        raise NotImplementedError

    def take(self) -> Moved:
        """Return changes of pages since the last call, without loads."""
        return NOTHING

    def publish_again(self) -> None:
        """Make `take` report all pages again, if it has reported them."""

    def wait(self, seconds: float) -> None:
        """Wait until there is something for `take`."""

    def close(self) -> None:
        """Write what is waiting, for a limited time."""


class Peers(Protocol):
    """Other engines, as the page mover sees them: `PeerPages`, or `ComputedPages` in a replay."""

    def expect(self, source: PageSource) -> None:
        """Pages are wanted soon."""
        ...

    def leave(self, source: PageSource) -> None:
        """Nothing more is wanted."""
        ...

    def fetch(
        self, source: PageSource, keys: Sequence[PageKey], sizes: Sequence[int]
    ) -> Iterator[np.ndarray | None]:
        """Yield pages in order; None: it is missing or damaged. Called in several threads."""
        ...

    def close(self) -> None:
        """Nothing more is asked."""
        ...


class Loading:
    """A load under way."""

    def __init__(self, load: PageLoad, step: int, job_pages: int) -> None:
        self.load = load
        self.step = step  # of the plan that began it
        self.failed: list[int] = []  # indices of pages that could not be loaded
        at_peer = [i for i, (_, _, place) in enumerate(load.pages) if place == AT_PEER]
        local = [i for i, (_, _, place) in enumerate(load.pages) if place != AT_PEER]
        # Indices of pages that are loaded together.
        self.jobs, self.peer_jobs = _jobs(local, job_pages), _jobs(at_peer, job_pages)
        self.num_left = len(self.jobs) + len(self.peer_jobs)  # number of unfinished jobs


def host_memory(size: int) -> np.ndarray:
    """Return [size] uint8. The system allocates each of its pages when it is first written.

    Raises:
        OSError: there is no address space for it.
    """
    # Private: shared memory takes a third longer to allocate.
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8)


def _jobs(pages: list[int], size: int) -> list[list[int]]:
    return [pages[first : first + size] for first in range(0, len(pages), size)]


MakePageServer = Callable[[Callable[[PageKey, int], np.ndarray]], "PageServer"]


@dataclass(frozen=True, slots=True)
class TierParts:
    """What the tiers of an engine consist of."""

    places: int  # pages of the memory tier
    folder: PageFolder | None = None  # None: there is no disk tier
    peers: Peers | None = None  # None: no pages are fetched from other engines
    # Makes the server of pages for other engines, from a function that returns pages of the memory
    # tier; None: they get none.
    page_server: MakePageServer | None = None
    at_once: bool = False  # a load is done when `begin` returns, for a replay


class PageMover:
    """The moves of one worker. All methods are called in the worker's thread."""

    def __init__(
        self, pages: Sequence[GroupPages], tiers: TierParts, slab: np.ndarray | None = None
    ) -> None:
        """
        Args:
            pages: of each KV group.
            slab: memory of the tier, [places, bytes] uint8; None: new memory.

        Raises:
            OSError: there is no address space for the memory tier, or the server for other engines
                cannot listen.
        """
        self._pages = pages
        self._largest = max(group_pages.num_bytes for group_pages in pages)
        self._slab = slab
        if tiers.places and slab is None:
            size = tiers.places * self._largest
            self._slab = host_memory(size).reshape(tiers.places, self._largest)
        self._keys: dict[int, PageKey] = {}  # place -> the last page that was stored there
        self._folder, self._peers = tiers.folder, tiers.peers
        serve = tiers.page_server
        self._page_server = None if serve is None else serve(self._page_at)
        self._address_sent = False
        self._scratch = np.empty(self._largest, np.uint8)
        self._at_once = tiers.at_once
        self._job_pages = JOB_PAGES
        self._under_way: set[int] = set()  # tickets under way
        self._lock = threading.Condition()
        self._loaded: list[tuple[int, list[int]]] = []
        self._rates: list[tuple[str, int, float]] = []
        self._failed_stores: list[PageKey] = []
        self._begun: deque[int] = deque(maxlen=REMEMBERED)  # tickets
        self._jobs: SimpleQueue[tuple[Loading, list[int]] | None] = SimpleQueue()
        # Separate, since other engines may be slow to answer.
        self._peer_jobs: SimpleQueue[tuple[Loading, list[int]] | None] = SimpleQueue()
        queues = [self._jobs] if tiers.peers is None else [self._jobs, self._peer_jobs]
        self._queues = [] if tiers.at_once else [queue for queue in queues for _ in range(THREADS)]
        for number, queue in enumerate(self._queues):
            name = f"pages-{number}"
            threading.Thread(target=self._work, args=(queue,), name=name, daemon=True).start()

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin the moves of a plan. `take` reports failures."""
        if plan.step == 0:  # the plan may come from a new scheduler
            self._begun.clear()
            self._address_sent = False
            if self._folder is not None:
                self._folder.publish_again()
        if self._folder is not None:
            for key in plan.drops:
                self._folder.drop(key)
        if self._page_server is not None:
            for name in plan.ended_leases:
                self._page_server.end(name)
        if plan.stores:
            self._store(plan.stores)
            self._keys.update((store.place, store.key) for store in plan.stores)
        if plan.leases:
            self._lend(plan.leases)
        if self._peers is not None:
            for source in plan.sources:
                self._peers.expect(source)
        for load in plan.loads:
            if load.ticket not in self._begun:  # else begun by an earlier plan, which failed later
                self._begun.append(load.ticket)
                self._load(Loading(load, plan.step, self._job_pages))
        if self._peers is not None:
            for source in plan.left_sources:
                self._peers.leave(source)

    def take(self, step: int) -> Moved | None:
        """Return results of moves since the last call; None: there are none.

        Args:
            step: of the last plan that is computed.
        """
        self._load_done(step)
        moved = Moved() if self._folder is None else self._folder.take()
        failed, self._failed_stores = self._failed_stores, []
        with self._lock:
            loaded, self._loaded = self._loaded, []
            rates, self._rates = self._rates, []
            self._under_way.difference_update(ticket for ticket, _ in loaded)
        moved = replace(moved, loaded=loaded, rates=rates, lost=[*moved.lost, *failed])
        if self._page_server is not None:
            where = self._page_server.address
            address = None if self._address_sent else (where.host, where.port)
            self._address_sent = True
            moved = replace(moved, address=address, returned=self._page_server.take_returned())
        return moved if moved != NOTHING else None

    def wait(self, step: int) -> Moved | None:
        """Do the same as `take`, after waiting a moment for loads, if there are any."""
        self.wait_for_more()
        return self.take(step)

    def wait_for_more(self) -> None:
        """Wait a moment for a load if there are any, else for the disk."""
        with self._lock:
            if self._under_way and not self._loaded:
                self._lock.wait(WAIT_SECONDS)
            waited = bool(self._under_way)
        if self._folder is not None and not waited:
            self._folder.wait(WAIT_SECONDS)

    def _load_done(self, step: int) -> None:
        """Note that all steps up to this one are done."""

    def close(self) -> None:
        """End the threads, and write what is waiting."""
        for queue in self._queues:
            queue.put(None)
        if self._page_server is not None:
            self._page_server.close()
        if self._peers is not None:
            self._peers.close()
        if self._folder is not None:
            self._folder.close()

    def _lend(self, leases: Sequence[PageLease]) -> None:
        """Begin leases, without pages of an earlier plan that failed before it stored them."""
        if self._page_server is not None:
            for lease in leases:
                pages = [page for page in lease.pages if self._keys.get(page[2]) == page[0]]
                self._page_server.lend(replace(lease, pages=pages))

    def _store(self, stores: Sequence[PageStore]) -> None:
        for group, pages in enumerate(self._pages):
            in_memory = [
                page_store
                for page_store in stores
                if page_store.key[0] == group and page_store.place != NOWHERE
            ]
            if in_memory and self._slab is not None:
                places = [page_store.place for page_store in in_memory]
                pages.copy_out([page_store.block for page_store in in_memory], self._slab, places)
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

    def _page_at(self, key: PageKey, place: int) -> np.ndarray:
        return self._place(place)[: self._pages[key[0]].num_bytes]

    def _load(self, loading: Loading) -> None:
        with self._lock:
            self._under_way.add(loading.load.ticket)
        for queue, jobs in ((self._jobs, loading.jobs), (self._peer_jobs, loading.peer_jobs)):
            for job in jobs:
                if self._at_once or (queue is self._peer_jobs and self._peers is None):
                    self._run(loading, job, self._scratch)
                else:
                    queue.put((loading, job))

    def _work(self, jobs: SimpleQueue[tuple[Loading, list[int]] | None]) -> None:
        scratch = np.empty(self._largest, np.uint8)
        while (job := jobs.get()) is not None:
            self._run(*job, scratch)

    def _run(self, loading: Loading, job: list[int], scratch: np.ndarray) -> None:
        """Load some pages."""
        sizes, good = Counter[str](), set[int]()
        seconds: defaultdict[str, float] = defaultdict(float)
        started = time.monotonic()
        try:
            pages = self._read(loading.load, job, scratch)
            for i, (tier, page) in zip(job, pages, strict=True):
                key, block, _ = loading.load.pages[i]
                if page is not None:
                    self._pages[key[0]].copy_in(page[None], [0], [block])
                    good.add(i)
                    sizes[tier] += len(page)
                now = time.monotonic()
                seconds[tier] += now - started
                started = now
        except Exception:
            log.exception("pages could not be loaded")
        rates = [(tier, size, seconds[tier]) for tier, size in sizes.items()]
        self._job_done(loading, [i for i in job if i not in good], rates)

    def _job_done(
        self, loading: Loading, failed: list[int], rates: list[tuple[str, int, float]]
    ) -> None:
        """Record that a job is done; the last job of a load reports the load as done."""
        with self._lock:
            loading.failed += failed
            loading.num_left -= 1
            self._rates += rates
            if not loading.num_left:
                loading.failed += self._unfit(loading)
                self._loaded.append((loading.load.ticket, sorted(loading.failed)))
                self._lock.notify()

    def _unfit(self, loading: Loading) -> list[int]:
        """Return the pages of a state if they are of several copies of it, with different
        drafts."""
        last, pages = len(self._pages) - 1, enumerate(loading.load.pages)
        parts = {i: block for i, (key, block, _) in pages if key[0] == last}
        if not parts.keys().isdisjoint(loading.failed):
            return []
        return [] if self._pages[last].complete([*parts.values()]) else [*parts]

    def _read(
        self, load: PageLoad, job: list[int], scratch: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray | None]]:
        """Yield the tier of each page of a job, and its bytes, valid until the next one; None: it
        is missing or damaged."""
        pages = [load.pages[i] for i in job]
        if pages[0][2] == AT_PEER and self._peers is not None and load.source is not None:
            sizes = [group_pages.num_bytes for group_pages in self._pages]
            keys = [key for key, _, _ in pages]
            for page in self._peers.fetch(load.source, keys, sizes):
                yield PEER, page
            return
        for key, _, place in pages:
            if place >= 0:
                yield MEMORY, self._page_at(key, place)
                continue
            page = scratch[: self._pages[key[0]].num_bytes]
            yield DISK, page if place == NOWHERE and self._read_disk(key, page) else None

    def _read_disk(self, key: PageKey, page: np.ndarray) -> bool:
        """Read a page of the disk tier. Returns whether it exists and is intact."""
        try:
            return self._folder is not None and self._folder.read(key, page)
        except Exception:
            log.exception("a page could not be loaded")
            return False
