"""Index of the pages in each tier, their eviction order, and how fast tiers are.

A tier keeps copies of blocks beyond the KV cache, as pages. The index is what the engine believes:
a page may still be gone or damaged, and then its load fails. Nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvik.core.block_pool import ContentLog
from kvik.core.config import TierSizes
from kvik.core.plan import AT_PEER, DISK, MEMORY, NOWHERE, PEER, PageKey
from kvik.core.step_clock import RunningRatio

MARGIN = 1.1  # a load must be expected to be faster than computing by this factor
DECAY = 0.8  # weight of a load relative to the next newer one in the measured rates
# An estimate that decides against loading shrinks with each such decision, so that loading is tried
# and measured again: after about a hundred decisions if it was ten times too large.
FORGET = 0.98
# Limit of bytes being written to the disk at a time. Until they are written they take memory, and a
# killed engine loses them; with a tenth of this the disk would idle until the next step.
MAX_WRITING = 64 << 20


@dataclass(slots=True)
class TierCounters:
    """Totals of one tier since the start, in pages."""

    stored: int = 0
    loaded: int = 0
    failed: int = 0
    evicted: int = 0


class Rate(RunningRatio):
    """Bytes per second of loads, as measured; the ratio is None before the first."""

    def __init__(self) -> None:
        super().__init__(DECAY)

    def seconds(self, size: int) -> float:
        """Return how long a load takes; 0.0 before the first, so that it is tried."""
        return size * self._under / self._over if self._over else 0.0

    def forget(self) -> None:
        """Shrink the estimate of how slow it is a little."""
        self._under *= FORGET


class Tier:
    """The pages of one tier, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes
        self.size = self.storing = 0  # bytes of all pages, and of those of them being stored
        # Pages that can be loaded -> bytes. Finding the first entry of a dict would take longer the
        # more were removed before it.
        self.pages: OrderedDict[PageKey, int] = OrderedDict()
        self.under_way: dict[PageKey, int] = {}  # pages being stored -> bytes
        self.busy: Counter[PageKey] = Counter()  # how many loads read them
        self.counters = TierCounters()
        self.rate = Rate()
        self.log: ContentLog | None = None  # notes which pages can be loaded; None: not needed

    def has(self, key: PageKey) -> bool:
        """Return whether a page can be loaded, or is being stored."""
        return key in self.pages or key in self.under_way

    def begin(self, key: PageKey, size: int) -> list[PageKey] | None:
        """Reserve room for a page to be stored. Returns the pages evicted for it; None: it is there
        already, or there is no room."""
        if self.has(key):
            return None
        gone: list[PageKey] = []
        missing = self.size + size - self.capacity
        if missing > 0:
            for old, old_size in self.pages.items():
                if old not in self.busy:
                    gone.append(old)
                    missing -= old_size
                    if missing <= 0:
                        break
            else:
                return None
        for old in gone:
            self.remove(old)
        self.counters.evicted += len(gone)
        self.under_way[key] = size
        self.size += size
        self.storing += size
        return gone

    def finish(self, key: PageKey) -> None:
        """Note that a page is stored and can be loaded."""
        size = self.under_way.pop(key, None)
        if size is not None:
            self.storing -= size
            self.pages[key] = size
            self.counters.stored += 1
            self._note(key, stored=True)

    def add(self, key: PageKey, size: int) -> None:
        """Add a page that was found in the tier."""
        if not self.has(key):
            self.pages[key] = size
            self.size += size
            self._note(key, stored=True)

    def remove(self, key: PageKey) -> bool:
        """Remove a page that is not in the tier (any more). Returns whether it was listed."""
        size = self.pages.pop(key, None)
        if size is not None:
            self._note(key, stored=False)
        else:
            size = self.under_way.pop(key, None)
            self.storing -= size or 0
        if size is not None:
            self.size -= size
        return size is not None

    def use(self, key: PageKey) -> None:
        """Make a page the last to be evicted."""
        size = self.pages.pop(key, None)
        if size is not None:
            self.pages[key] = size

    def _note(self, key: PageKey, *, stored: bool) -> None:
        if self.log is not None:
            self.log.note(key, stored=stored)

    def release(self, key: PageKey) -> None:
        """Note that a load no longer reads a page."""
        self.busy[key] -= 1
        if not self.busy[key]:
            del self.busy[key]


class TierIndex:
    """The pages of all tiers."""

    def __init__(self, sizes: TierSizes) -> None:
        self.sizes = sizes
        largest = max(sizes.page_bytes)
        # Memory, disk and other engines, as configured, fastest first. Pages of other engines are
        # not listed here: requests name them.
        self.tiers: dict[str, Tier] = {}
        if sizes.memory:  # a place for each page, however small it is
            self.tiers[MEMORY] = Tier(sizes.memory * largest)
        if sizes.disk:
            self.tiers[DISK] = Tier(sizes.disk)
        if sizes.peers:
            self.tiers[PEER] = Tier(0)
        self._largest = largest
        self._free = list(range(sizes.memory - 1, -1, -1))
        self._places: dict[PageKey, int] = {}
        self._read_places: dict[PageKey, int] = {}  # places of removed pages that loads still read
        self.drops: list[PageKey] = []  # pages of the disk tier to delete
        self.off = ""  # why the disk tier is turned off; "": it is not

    def log_to(self, log: ContentLog) -> None:
        """Note all pages in memory in a log, and from now on all changes. Pages on the disk are the
        same for all engines that share it, so they are not noted."""
        memory = self.tiers.get(MEMORY)
        if memory is not None:
            memory.log = log
            for key in memory.pages:
                log.note(key, stored=True)

    def where(self, key: PageKey) -> str | None:
        """Return the fastest tier that a page can be loaded from; None: there is none."""
        return next((name for name, tier in self.tiers.items() if key in tier.pages), None)

    def store(self, key: PageKey, *, on_disk: bool) -> tuple[int, bool]:
        """Reserve room for a page to be stored. Returns its place in the memory tier (or
        `NOWHERE`), and whether to write it to the disk tier, which `on_disk` must allow."""
        return self._store_in_memory(key), on_disk and self._store_on_disk(key)

    def lacks(self, key: PageKey) -> bool:
        """Return whether there is a disk tier and it does not have this page."""
        disk = self.tiers.get(DISK)
        return disk is not None and not disk.has(key)

    @property
    def disk_is_busy(self) -> bool:
        """Whether so much is being written that more should wait."""
        disk = self.tiers.get(DISK)
        return disk is not None and disk.storing >= MAX_WRITING

    def _store_in_memory(self, key: PageKey) -> int:
        memory = self.tiers.get(MEMORY)
        gone = None if memory is None else memory.begin(key, self._largest)
        if memory is None or gone is None:
            return NOWHERE
        self._free += [self._places.pop(old) for old in gone]
        if not self._free:  # loads still read what was dropped
            memory.remove(key)
            return NOWHERE
        self._places[key] = self._free.pop()
        return self._places[key]

    def _store_on_disk(self, key: PageKey) -> bool:
        disk = self.tiers.get(DISK)
        gone = None if disk is None else disk.begin(key, self.sizes.page_bytes[key[0]])
        self.drops += gone or ()
        return gone is not None

    def acquire(self, key: PageKey, tier: str) -> int:
        """Keep a page that a load reads until `release`. Returns its place."""
        self.tiers[tier].busy[key] += 1
        if tier == PEER:
            return AT_PEER
        return self._places[key] if tier == MEMORY else NOWHERE

    def place_of(self, key: PageKey, tier: str) -> int:
        """Return the place of a page that a load reads."""
        if tier == PEER:
            return AT_PEER
        if tier != MEMORY:
            return NOWHERE
        return self._read_places.get(key, self._places.get(key, NOWHERE))

    def release(self, key: PageKey, tier: str) -> None:
        """Note that a load is done with a page."""
        if tier not in self.tiers:
            return  # it has been turned off
        self.tiers[tier].release(key)
        if tier == MEMORY and key in self._read_places and key not in self.tiers[tier].busy:
            self._free.append(self._read_places.pop(key))

    def finish(self, key: PageKey, tier: str) -> None:
        """Note that a page was stored."""
        if tier in self.tiers:
            self.tiers[tier].finish(key)

    def find(self, keys: Iterable[PageKey]) -> None:
        """List pages found in the disk tier, and delete the first ones if they exceed its size."""
        disk = self.tiers.get(DISK)
        if disk is None:
            return
        for key in keys:
            if key[0] < len(self.sizes.page_bytes):
                disk.add(key, self.sizes.page_bytes[key[0]])
        if disk.size > disk.capacity:
            for key in list(disk.pages):
                if disk.size <= disk.capacity:
                    break
                if key not in disk.busy:
                    disk.remove(key)
                    disk.counters.evicted += 1
                    self.drops.append(key)

    def lose(self, key: PageKey, tier: str) -> None:
        """Remove a page that is missing or cannot be used."""
        if tier not in self.tiers or not self.tiers[tier].remove(key):
            return
        if tier == MEMORY:
            place = self._places.pop(key)
            if key in self.tiers[tier].busy and key not in self._read_places:
                self._read_places[key] = place
            else:
                self._free.append(place)

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Remove these pages from all tiers: they must not be loaded any more."""
        disk = self.tiers.get(DISK)
        for key in keys:
            if disk is not None and disk.has(key):
                self.drops.append(key)
            for name in tuple(self.tiers):
                self.lose(key, name)

    def clear(self) -> None:
        """Remove all pages stored until now from all tiers."""
        self.forget([key for tier in self.tiers.values() for key in (*tier.pages, *tier.under_way)])

    def use(self, keys: Sequence[PageKey]) -> None:
        """Note that pages of one prefix were used or made; its beginning is evicted last."""
        for key in reversed(keys):
            for tier in self.tiers.values():
                tier.use(key)

    def disable(self, reason: str) -> None:
        """Turn the disk tier off."""
        self.off = reason
        disk = self.tiers.pop(DISK, None)
        if disk is not None:
            self.drops.clear()

    def is_faster(self, sizes: Counter[str], tokens: int, rate: float | None) -> bool:
        """Return whether loading pages is faster than computing their tokens.

        Args:
            sizes: bytes of the pages in each tier.
            rate: prompt tokens per second; None: nothing was measured.
        """
        if rate is None:
            return True
        seconds = sum(self.tiers[name].rate.seconds(size) for name, size in sizes.items())
        if seconds * MARGIN < tokens / rate:
            return True
        for name in sizes:
            self.tiers[name].rate.forget()
        return False

    def places(self) -> tuple[dict[PageKey, int], list[int], dict[PageKey, int]]:
        """Return places of pages, free places, and places that only loads read (for audits)."""
        return dict(self._places), list(self._free), dict(self._read_places)
