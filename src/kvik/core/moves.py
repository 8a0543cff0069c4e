"""Moves of blocks between the KV cache and its tiers: which are stored, and loaded for whom.

Blocks are stored as soon as they are full and their content is confirmed. The last block of a
preempted request is stored even if it is partly filled. Copies are made before a step writes to any
block, so the plan that stores a block may already give it to another request.

A waiting request whose prefix continues in a tier waits for the pages if loading them is expected
to be faster than computing their tokens. Meanwhile it holds blocks, but no row. Pages are loaded
into blocks that no request uses, and are then published in the prefix cache, where the request
finds them like any other request. So a page that fails to load is computed, and nothing else
differs. A block that is being loaded is referenced until the move is done, even if the request has
ended.

Another engine is one more tier: a request names the engine that has its pages, and for how many
tokens. There the pages stay in the memory tier under a lease, as if a load read them. The worker
ends the lease when the other engine has fetched what it needs, or has been silent for some time.

If layers keep states, a prefix can be resumed only where there is one: in a checkpoint, or in a
tier. There it is several pages, which are stored and loaded like those of blocks; the state of a
preempted request is stored from the row of its slot. A state is loaded into a checkpoint. If one of
its pages is missing, all of them are deleted, since those of two copies do not fit together.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kvik.core.block_pool import NULL_BLOCK, root_hash
from kvik.core.kv_manager import KVCacheManager, PrefixMatch
from kvik.core.plan import (
    DISK,
    MEMORY,
    PEER,
    ModelRunnerOutput,
    Moved,
    PageKey,
    PageLease,
    PageLoad,
    PageStore,
    SchedulerOutput,
)
from kvik.core.tier_index import TierIndex
from kvik.core.types import PageSource, Request, RequestStatus

MAX_LOADS = 8  # at a time
MAX_TRIES = 2  # loads for one start of a request; then it computes what is still missing
LOAD_SECONDS = 30.0  # longest wait of a request for a load
MIN_BACKLOG = 64  # blocks that may wait for the disk before they are looked at again


@dataclass(slots=True)
class MoveCounters:
    """Totals since the start."""

    loaded_tokens: int = 0  # tokens that were loaded instead of computed
    # load_choices, compute_choices: how often a request that could load did so, or did not because
    # computing was expected to be faster.
    load_choices: int = 0
    compute_choices: int = 0
    swapped_out: int = 0  # preemptions after which everything computed is in a tier
    swapped_in: int = 0  # preempted requests that resumed with pages of a tier
    given_up: int = 0  # loads that took longer than `LOAD_SECONDS`
    lent_tokens: int = 0  # tokens whose pages were kept for other engines


@dataclass(slots=True, eq=False)
class Load:
    """A load under way."""

    ticket: int
    # Key, block that the page is loaded into, tier; those of a state are last.
    pages: list[tuple[PageKey, int, str]]
    cached: list[int]  # blocks of the prefix that were cached already
    num_tokens: int  # tokens that it spares its first request; -1: do not publish the pages
    since: float  # when it began
    source: PageSource | None = None  # where another engine serves pages of it
    # Hash of the prefix whose state is loaded, the checkpoint for it, and the number of its pages;
    # None: no state is loaded.
    state: tuple[bytes, int, int] | None = None
    # Requests that wait for it, each with the status to restore.
    waiting: list[tuple[Request, RequestStatus]] = field(default_factory=list)

    @property
    def loaded_blocks(self) -> list[int]:
        """The blocks that pages are loaded into."""
        pages = self.pages if self.state is None else self.pages[: -self.state[2]]
        return [block for _, block, _ in pages]

    @property
    def blocks(self) -> list[int]:
        """All blocks that it holds, the end of the prefix first."""
        return [*reversed(self.loaded_blocks), *reversed(self.cached)]


@dataclass(slots=True)
class ReachablePrefix:
    """A prefix that is in the KV cache or in tiers."""

    num_tokens: int
    # Pages that are only in a tier, and the tier; those of a state are last.
    missing: list[tuple[PageKey, str]]
    cached: list[int]  # blocks of the other pages
    # Hash of the prefix whose state is only in a tier; None: no state is missing.
    state: bytes | None


class Moves:
    """The moves of one scheduler."""

    def __init__(self, kv: KVCacheManager, first_row: int) -> None:
        """
        Args:
            first_row: of checkpoints in the pool of states.
        """
        sizes = kv.config.tiers
        assert sizes is not None
        self.kv = kv
        self._first_row, self._state_pages = first_row, sizes.state_pages
        self._copied: Collection[int] = ()  # rows of states that the plan copies from or to
        self.index = TierIndex(sizes)
        self.counters = MoveCounters()
        self.loads: dict[int, Load] = {}  # under way, by ticket
        self._loading: dict[PageKey, Load] = {}
        self._repeated: list[int] = []  # tickets that a failed plan may not have begun
        self._new: list[PageLoad] = []
        self._stores: list[PageStore] = []
        # To write when the disk is not busy, and how many may wait until those are left out whose
        # blocks have other contents by now.
        self._backlog: deque[tuple[PageKey, bytes, int]] = deque()
        self._backlog_limit = MIN_BACKLOG
        self._tries: dict[tuple[str, int], int] = {}  # loads since the request last started
        self._num_tickets = 0
        self.address: tuple[str, int] | None = None  # where pages are served; None: not known yet
        self.leases: dict[str, list[PageKey]] = {}
        self._lent: list[tuple[str, list[tuple[PageKey, bytes]]]] = []  # begin with the next plan
        self._new_leases: list[PageLease] = []
        self._ended_leases: list[str] = []
        self._wanted: set[PageSource] = set()  # of requests that have not started
        self._sources: list[PageSource] = []  # not sent to the worker yet
        self._left_sources: list[PageSource] = []
        self._scanning = sizes.disk > 0  # the disk tier is still listing what it had at the start
        kv.committed = []
        if kv.checkpoints is not None:
            kv.checkpoints.for_tiers = []

    # -- planning --------------------------------------------------------------------------------

    def begin(self, now: float, plan: SchedulerOutput) -> None:
        """Begin a plan: store blocks and checkpoints confirmed since the last one, and give up
        loads that take too long."""
        committed, self.kv.committed = self.kv.committed or [], []
        self._copied = copied = _copied_rows(plan)
        self._write_backlog()
        for key, parent, block in committed:
            if self._has(block, key, parent):
                self._store(key, parent, block)
        for prefix in self._take_checkpoints():
            index = self._checkpoint_of(prefix)
            if index is not None and self._first_row + index not in copied:
                self._store_state(prefix, self._first_row + index)
        for name, pages in self._lent:
            self._begin_lease(name, pages)
        self._lent.clear()
        for load in self.loads.values():
            if load.waiting and now - load.since > LOAD_SECONDS:
                self.counters.given_up += 1
                for request, status in load.waiting:
                    request.status = status
                    self._tries[request.key] = MAX_TRIES
                load.waiting = []

    def waits(
        self,
        request: Request,
        match: PrefixMatch,
        rate: float | None,
        now: float,
        plan: SchedulerOutput,
        *,
        fits: bool,
    ) -> bool:
        """Return whether a waiting request has to wait for pages; begins a load if that is best.

        Args:
            match: its prefix in the KV cache.
            rate: prompt tokens per second, as measured.
            plan: is being made. What it copies may be free already, and is not loaded into.
            fits: whether the free blocks suffice to start it.
        """
        if not fits or self._tries.get(request.key, 0) >= MAX_TRIES:
            return False
        reach = self._reach(request, match)
        if reach is None:
            return False
        loads = (self._loading.get(key) for key, _ in reach.missing)
        load = next((load for load in loads if load is not None), None)
        if load is None and len(self.loads) < MAX_LOADS:
            tokens = reach.num_tokens - match.num_tokens
            if self._pays_off(request, reach, tokens, rate):
                load = self._begin_load(request, reach, tokens, now, plan)
        if load is None:
            return False
        load.waiting.append((request, request.status))
        request.status = RequestStatus.LOADING
        self._tries[request.key] = self._tries.get(request.key, 0) + 1
        return True

    def _pays_off(
        self, request: Request, reach: ReachablePrefix, tokens: int, rate: float | None
    ) -> bool:
        """Return whether a load is expected to be faster than computing its tokens. If not, the
        request loads nothing until it starts."""
        sizes: Counter[str] = Counter()
        for (group, _), tier in reach.missing:
            sizes[tier] += self.index.sizes.page_bytes[group]
        # Pages of another engine were computed for this request, so they are always loaded.
        if PEER in sizes or self.index.is_faster(sizes, tokens, rate):
            return True
        self.counters.compute_choices += 1
        self._tries[request.key] = MAX_TRIES
        return False

    def _begin_load(
        self,
        request: Request,
        reach: ReachablePrefix,
        tokens: int,
        now: float,
        plan: SchedulerOutput,
    ) -> Load | None:
        """Load what is missing of a prefix; None: too few blocks are free, or no checkpoint."""
        num_blocks = len(reach.missing) - self._state_pages * (reach.state is not None)
        blocks = self.kv.acquire(reach.cached, num_blocks)
        if blocks is None:
            return None
        # The load might come before the copy.
        copied = {*(source for source, _ in plan.block_copies), *self.kv.cut_blocks}
        usable = copied.isdisjoint(blocks)
        state = self._reserve(request, reach, _copied_rows(plan)) if usable else None
        if not usable or (reach.state is not None and state is None):
            self.kv.pool.release([*blocks, *reach.cached])
            return None
        if state is not None:
            blocks += self._parts_of(self._first_row + state[1])
        self.counters.load_choices += 1
        pairs = list(zip(reach.missing, blocks, strict=True))
        load = Load(
            self._num_tickets,
            [(key, block, tier) for (key, tier), block in pairs],
            reach.cached,
            tokens,
            now,
            request.source if any(tier == PEER for _, tier in reach.missing) else None,
            state,
        )
        self._num_tickets += 1
        pages = [(key, block, self.index.acquire(key, tier)) for (key, tier), block in pairs]
        self._new.append(PageLoad(load.ticket, pages, load.source))
        self.loads[load.ticket] = load
        self._loading.update((key, load) for key, _ in reach.missing)
        return load

    def num_reachable(self, request: Request, match: PrefixMatch) -> int:
        """Return how many tokens a request need not compute if it loads all it can."""
        reach = self._reach(request, match)
        return match.num_tokens if reach is None else max(match.num_tokens, reach.num_tokens)

    def preempt(self, request: Request) -> None:
        """Store the blocks of a preempted request, including a partly filled last one."""
        kv = self.kv
        known = min(request.num_written_tokens, len(request.token_ids))
        written = kv.before_cuts(request, known)
        full, rest = divmod(written, kv.block_size)
        request.num_kept_tokens = written
        hashes = request.block_hashes[:full]
        stored = len(hashes) == full
        if kv.checkpoints is not None:
            # A state of tokens that are not known yet is of no use.
            stored = stored and written == request.num_computed_tokens > 0
            if stored:
                prefix = kv.prefix_key(request, written)
                self._store_state(prefix, request.slot, now=True, lasts=not rest)
            else:
                self._keep_checkpoint(hashes)
        for i, key in enumerate(hashes):  # some may be in the backlog of the disk
            parent = hashes[i - 1] if i else root_hash(request.cache_salt)
            for group, ids in enumerate(request.block_ids):
                page = group, key
                if ids[i] != NULL_BLOCK and kv.pool.has(ids[i], page) and not self._is_kept(page):
                    self._store(page, parent, ids[i], now=True)
        if rest and stored:
            key = kv.prefix_key(request, written)
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            for group, ids in enumerate(request.block_ids):
                if ids[full] != NULL_BLOCK:
                    self._store((group, key), parent, ids[full], now=True, lasts=False)
        keys = self._visible(hashes, written)
        if kv.checkpoints is not None and stored:
            keys += self._state_keys(kv.prefix_key(request, written))
        self.index.use(keys)
        complete = stored and written == known
        self.counters.swapped_out += complete and all(map(self._is_kept, keys))

    def keep_state(self, request: Request) -> None:
        """Store the newest state at a block border of a running request that ends."""
        if not self._state_pages:
            return
        computed, hashes = request.num_computed_tokens, request.block_hashes
        blocks, rest = divmod(computed, self.kv.block_size)
        is_known = computed == request.num_written_tokens and len(hashes) >= blocks > 0
        if is_known and rest <= request.num_uncovered_tokens and hashes[blocks - 1]:
            self._store_state(hashes[blocks - 1], request.slot, now=True)
        else:
            self._keep_checkpoint(hashes)

    def arrived(self, request: Request) -> None:
        """Note a new request: its pages in another engine must stay there until it starts."""
        if PEER not in self.index.tiers:
            request.source = None
        elif request.source is not None:
            self._wanted.add(request.source)
            self._sources.append(request.source)
            request.num_kept_tokens = request.source.num_tokens

    def started(self, request: Request) -> None:
        """Note that a request has its blocks and a row."""
        self._tries.pop(request.key, None)
        self._leave_source(request)

    def left(self, request: Request) -> None:
        """Note that a request gives its blocks back, or stops waiting."""
        self._tries.pop(request.key, None)
        self._leave_source(request)
        if request.status is RequestStatus.LOADING:
            for load in self.loads.values():
                load.waiting = [pair for pair in load.waiting if pair[0] is not request]
        hashes = request.block_hashes[: request.num_committed_blocks]
        state = self._state_end(request, len(hashes) * self.kv.block_size)
        states = self._state_keys(self.kv.prefix_key(request, state)) if state else []
        self.index.use([*self._pages(hashes), *states])

    def lend(self, request: Request, tokens: int) -> PageSource | None:
        """Keep the pages of the first `tokens` of an ending request for another engine. Returns
        where that engine gets them; None: nothing can be lent."""
        if self.address is None or MEMORY not in self.index.tiers:
            return None
        tokens = self.kv.before_cuts(request, tokens)
        if self.kv.checkpoints is not None:
            tokens = self._state_end(request, tokens)
        full, rest = divmod(tokens, self.kv.block_size)
        hashes = request.block_hashes[:full]
        if not all(hashes) or len(hashes) < full:
            return None
        before = [root_hash(request.cache_salt), *hashes]
        parents = dict(zip(hashes, before, strict=False))
        # A prefix is matched up to the end of its last full block, and that sees one block more.
        seen = self._visible(hashes, full * self.kv.block_size)
        pages = [(key, parents[key[1]]) for key in seen]
        if rest:
            key = self.kv.prefix_key(request, tokens)
            pages += [((group, key), before[-1]) for group in range(len(self.kv.groups))]
        if not pages:
            return None
        if self.kv.checkpoints is not None:
            prefix = self.kv.prefix_key(request, tokens)
            if not self._has_state(prefix):  # it may have left the memory tier
                self._keep_checkpoint([prefix])
            pages += [(key, prefix) for key in self._state_keys(prefix)]
        name = f"{request.request_id}/{request.index}" if request.index else request.request_id
        self._lent.append((name, pages))
        self.counters.lent_tokens += tokens
        return PageSource(*self.address, name, tokens)

    def add_to(self, plan: SchedulerOutput) -> None:
        """Add the moves to a plan that is otherwise complete."""
        repeated = [self.loads[ticket] for ticket in self._repeated if ticket in self.loads]
        plan.loads.extend([*map(self._page_load, repeated), *self._new])
        plan.drops.extend(self.index.drops)
        plan.stores.extend(self._stores)
        plan.leases.extend(self._new_leases)
        plan.ended_leases.extend(self._ended_leases)
        plan.sources.extend(self._sources)
        plan.left_sources.extend(self._left_sources)
        for work in (self.index.drops, self._stores, self._repeated, self._new):
            work.clear()
        for notices in (self._new_leases, self._ended_leases, self._sources, self._left_sources):
            notices.clear()

    @property
    def begins(self) -> bool:
        """Whether something must be stored, lent or deleted that is in no plan yet."""
        pages = self._stores or self.kv.committed or self.index.drops or self._repeated
        checkpoints = self.kv.checkpoints is not None and self.kv.checkpoints.for_tiers
        lent = self._lent or self._ended_leases or self._sources or self._left_sources
        return bool(pages or checkpoints or lent)

    @property
    def reads_blocks(self) -> bool:
        """Whether the next plan stores blocks that requests have left."""
        return bool(self._stores)

    @property
    def under_way(self) -> bool:
        """Whether results of moves are outstanding."""
        finds = self._scanning or (self.index.sizes.lends and self.address is None)
        return bool(self.loads or self._backlog) or finds

    # -- results ---------------------------------------------------------------------------------

    def computed(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Note that a plan was computed: the memory tier has its pages."""
        for store in plan.stores:
            self.index.finish(store.key, MEMORY)
        if output.moved is not None:
            self._take(output.moved)

    def failed(self, plan: SchedulerOutput) -> None:
        """Note that a plan failed. It is unknown which of its moves were begun, so its loads are
        planned again and its leases end."""
        lost = {store.key for store in plan.stores}
        doubted = [name for name, keys in self.leases.items() if not lost.isdisjoint(keys)]
        self._end_leases([*plan.ended_leases, *(lease.name for lease in plan.leases), *doubted])
        self._sources += plan.sources
        # A later plan may have left some before the worker knew them.
        gone = [source for source in plan.sources if source not in self._wanted]
        self._left_sources += [*plan.left_sources, *gone]
        for store in plan.stores:
            self.index.lose(store.key, MEMORY)
            self.index.lose(store.key, DISK)
            if store.on_disk:
                self.index.drops.append(store.key)
        self._repeated += [load.ticket for load in plan.loads]

    def _take(self, moved: Moved) -> None:
        """Process the results of moves."""
        index = self.index
        for tier, size, seconds in moved.rates:
            if tier in index.tiers:
                index.tiers[tier].rate.note(size, seconds)
        if moved.off:
            index.disable(moved.off)
        self._scanning = self._scanning and not (moved.scanned or moved.off)
        self.address = moved.address or self.address
        for name in moved.returned:
            self._release_lease(name)
        index.find(moved.found)
        for key in moved.lost:
            index.lose(key, DISK)
        for key in moved.stored:
            index.finish(key, DISK)
        for ticket, failed in moved.loaded:
            if ticket in self.loads:
                self._finish(self.loads.pop(ticket), set(failed))

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove the pages of these blocks, and of states at their ends, from all tiers: their
        contents are in doubt."""
        states = (key for prefix in hashes if prefix for key in self._state_keys(prefix))
        keys = [*self._pages(hashes), *filter(self._is_kept, states)]
        doubted = set(keys)
        self._stores = [page_store for page_store in self._stores if page_store.key not in doubted]
        self._end_leases([n for n, k in self.leases.items() if not doubted.isdisjoint(k)])
        self._lent = [(n, p) for n, p in self._lent if doubted.isdisjoint(key for key, _ in p)]
        self.index.forget(keys)

    def forget_states(self, prefixes: Sequence[bytes]) -> None:
        """Remove the states of these prefixes from all tiers."""
        self.index.forget([key for prefix in prefixes for key in self._state_keys(prefix)])

    def clear(self) -> None:
        """Remove everything stored until now from all tiers."""
        self.kv.committed = []
        self._stores.clear()
        self._backlog.clear()
        self._lent.clear()
        self._end_leases([*self.leases])
        for load in self.loads.values():
            load.num_tokens = -1  # do not publish its pages
        self.index.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _begin_lease(self, name: str, pages: list[tuple[PageKey, bytes]]) -> None:
        memory = self.index.tiers[MEMORY]
        in_memory = [pair for pair in pages if memory.has(pair[0])]
        if in_memory and name not in self.leases:
            self.leases[name] = [key for key, _ in in_memory]
            places = [(key, parent, self.index.acquire(key, MEMORY)) for key, parent in in_memory]
            self._new_leases.append(PageLease(name, places))

    def _end_leases(self, names: Iterable[str]) -> None:
        """End leases with the next plan, before other pages take their places."""
        for name in names:
            self._ended_leases.append(name)
            self._release_lease(name)
            self._new_leases = [lease for lease in self._new_leases if lease.name != name]

    def _release_lease(self, name: str) -> None:
        for key in self.leases.pop(name, ()):
            self.index.release(key, MEMORY)

    def _leave_source(self, request: Request) -> None:
        """Note that a request needs no pages of another engine (any more)."""
        if request.source is not None:
            self._wanted.discard(request.source)
            self._left_sources.append(request.source)
            request.source = None

    def _at_peer(self, request: Request) -> set[PageKey]:
        """Return the pages of a request that another engine has, according to the request."""
        if request.source is None:
            return set()
        tokens, size = request.source.num_tokens, self.kv.block_size
        full, rest = divmod(tokens, size)
        hashes = request.block_hashes[:full]
        if rest and len(hashes) == full and tokens < len(request.token_ids):
            hashes = [*hashes, self.kv.prefix_key(request, tokens)]
        known = len(hashes) == -(-tokens // size) > 0
        return {*self._pages(hashes), *(self._state_keys(hashes[-1]) if known else ())}

    def _pages(self, hashes: Sequence[bytes]) -> list[PageKey]:
        """Return the pages of all groups for these blocks, as far as their hashes are known."""
        return [(group, key) for key in hashes if key for group in range(len(self.kv.groups))]

    def _store(
        self, key: PageKey, parent: bytes, block: int, *, now: bool = False, lasts: bool = True
    ) -> None:
        """Store a block.

        Args:
            now: its content is lost soon, so it is written even if the disk is busy.
            lasts: other requests may use it, now or after a restart.
        """
        on_disk = lasts or MEMORY not in self.index.tiers
        if on_disk and not now and self.index.disk_is_busy:
            on_disk = False
            if self.index.lacks(key):
                self._backlog.append((key, parent, block))
        place, on_disk = self.index.store(key, on_disk=on_disk)
        if place >= 0 or on_disk:
            self._stores.append(PageStore(key, parent, block, place, on_disk))

    def _write_backlog(self) -> None:
        """Store the blocks that waited for the disk, the first ones first, while it is not busy.
        However many wait for a slow disk, a step does not look at all of them."""
        backlog = self._backlog
        while backlog and not self.index.disk_is_busy:
            key, parent, block = backlog.popleft()
            if self._has(block, key, parent):
                self._store(key, parent, block)
        if len(backlog) > self._backlog_limit:
            present = [entry for entry in backlog if self._has(entry[2], entry[0], entry[1])]
            self._backlog = deque(present)
            self._backlog_limit = max(MIN_BACKLOG, 2 * len(present))

    def _is_kept(self, key: PageKey) -> bool:
        return any(tier.has(key) for tier in self.index.tiers.values())

    def _visible(self, hashes: Sequence[bytes], num_tokens: int) -> list[PageKey]:
        """Return the pages of full blocks that a request with `num_tokens` tokens sees."""
        size = self.kv.block_size
        hidden = [group.visible.hidden_blocks(num_tokens, size) for group in self.kv.groups]
        return [
            (group, key)
            for i, key in enumerate(hashes)
            for group in range(len(hidden))
            if i not in hidden[group]
        ]

    def num_stored(self, request: Request) -> int:
        """Return how many tokens of a request, from the start, have blocks in the cache or in
        tiers, whether or not there is a state."""
        kv = self.kv
        usable = min(kv.num_cacheable(request) // kv.block_size, len(request.block_hashes))
        hashes = request.block_hashes[:usable]
        return kv.block_size * kv.usable_length(
            hashes, usable, lambda key: kv.pool.lookup(key) is not None or self._is_kept(key)
        )

    def _reach(self, request: Request, match: PrefixMatch) -> ReachablePrefix | None:
        """Return the longest prefix of a waiting request in the cache and tiers; None: it is not
        longer than the match."""
        kv, size = self.kv, self.kv.block_size
        usable = min(kv.num_cacheable(request) // size, len(request.block_hashes))
        hashes = request.block_hashes[:usable]
        lookup, where, at_peer = kv.pool.lookup, self.index.where, self._at_peer(request)

        def is_stored(key: PageKey) -> bool:
            return where(key) is not None or key in self._loading or key in at_peer

        def is_there(key: PageKey) -> bool:
            return lookup(key) is not None or is_stored(key)

        def has_state(prefix: bytes) -> bool:
            if kv.checkpoints is None or kv.checkpoints.index_of(prefix) is not None:
                return True
            return all(map(is_stored, self._state_keys(prefix)))

        length = num_blocks = kv.usable_length(hashes, usable, is_there)
        while length:
            hit = next((n for n in range(length, 0, -1) if has_state(hashes[n - 1])), 0)
            if hit == length:
                break
            length = kv.usable_length(hashes, hit, is_there)
        keys, tokens = self._visible(hashes[:length], length * size), length * size
        swapped = request.num_kept_tokens
        full = swapped // size
        reached = full <= num_blocks if kv.checkpoints is not None else full == length
        if reached and tokens < swapped <= kv.num_cacheable(request) and swapped % size:
            partial = kv.prefix_key(request, swapped)
            rest = [(group, partial) for group in range(len(kv.groups))]
            part = kv.usable_length(hashes[:full], full, is_there) == full
            if part and all(map(is_there, rest)) and has_state(partial):
                keys, tokens = self._visible(hashes[:full], full * size) + rest, swapped
        if tokens <= match.num_tokens:
            return None
        state = None
        if kv.checkpoints is not None:
            prefix = kv.prefix_key(request, tokens)
            state = prefix if kv.checkpoints.index_of(prefix) is None else None
        cached = [block for key in keys if (block := lookup(key)) is not None]
        keys = [key for key in keys if lookup(key) is None]
        keys += [] if state is None else self._state_keys(state)
        loaded = {key: PEER if key in at_peer else MEMORY for key in keys}
        missing = [(key, where(key) or loaded[key]) for key in keys]
        return ReachablePrefix(tokens, missing, cached, state) if missing else None

    def _page_load(self, load: Load) -> PageLoad:
        places = self.index.place_of
        pages = [(key, block, places(key, tier)) for key, block, tier in load.pages]
        return PageLoad(load.ticket, pages, load.source)

    def _finish(self, load: Load, failed: set[int]) -> None:
        """Publish the blocks of a finished load, and resume the requests that wait for it."""
        for i, (key, block, tier) in enumerate(load.pages):
            del self._loading[key]
            self.index.release(key, tier)
            counters = self.index.tiers[tier].counters if tier in self.index.tiers else None
            if i in failed:
                if counters is not None:
                    counters.failed += 1
                if key[0] < len(self.kv.groups):
                    self.index.lose(key, tier)
            elif load.num_tokens >= 0:
                if key[0] < len(self.kv.groups):
                    self.kv.pool.commit(block, key)
                if counters is not None:
                    counters.loaded += 1
        if load.state is not None:
            self._finish_state(load, *load.state, failed)
        if not failed:
            self.counters.loaded_tokens += max(0, load.num_tokens)
        self.index.use([key for key, _, _ in load.pages])
        for request, status in load.waiting:
            request.status = status
            if any(load.pages[i][2] == PEER for i in failed):  # missing pages will not come later
                self._leave_source(request)
            self.counters.swapped_in += status is RequestStatus.PREEMPTED and not failed
        self.kv.pool.release(load.blocks)  # evicted last

    # -- states ----------------------------------------------------------------------------------

    def _state_keys(self, prefix: bytes) -> list[PageKey]:
        """Return the pages of the state of a prefix; []: no layer keeps a state."""
        group, head, tail = len(self.kv.groups), prefix[:-2], int.from_bytes(prefix[-2:], "big")
        parts = range(self._state_pages)
        return [(group, head + (tail ^ part).to_bytes(2, "big")) for part in parts]

    def _parts_of(self, row: int) -> range:
        """Return the "blocks" (`PageStore`) of a row of the pool of states."""
        return range(row * self._state_pages, (row + 1) * self._state_pages)

    def _checkpoint_of(self, prefix: bytes) -> int | None:
        return None if self.kv.checkpoints is None else self.kv.checkpoints.index_of(prefix)

    def _take_checkpoints(self) -> list[bytes]:
        """Return the prefixes of checkpoints that are to be stored."""
        if not self._state_pages:
            return []
        assert self.kv.checkpoints is not None
        prefixes, self.kv.checkpoints.for_tiers = self.kv.checkpoints.for_tiers or [], []
        return prefixes

    def _keep_checkpoint(self, hashes: Sequence[bytes]) -> None:
        """Store the last checkpoint of a prefix with the next plan."""
        table = self.kv.checkpoints
        assert table is not None and table.for_tiers is not None
        length = table.hit_length(hashes, len(hashes))
        if length:
            table.for_tiers.append(hashes[length - 1])

    def _store_state(
        self, prefix: bytes, row: int, *, now: bool = False, lasts: bool = True
    ) -> None:
        """Store the state of a prefix from a row of the pool. See `_store`."""
        pairs = zip(self._state_keys(prefix), self._parts_of(row), strict=True)
        for key, part in reversed([*pairs]):  # the first page is evicted last
            self._store(key, prefix, part, now=now, lasts=lasts)

    def _has(self, block: int, key: PageKey, parent: bytes) -> bool:
        """Return whether a block, or a checkpoint, still has the content that is to be stored."""
        if key[0] < len(self.kv.groups):
            return self.kv.pool.has(block, key)
        row = block // self._state_pages
        return row not in self._copied and self._checkpoint_of(parent) == row - self._first_row

    def _has_state(self, prefix: bytes) -> bool:
        """Return whether the memory tier has a state."""
        memory = self.index.tiers.get(MEMORY)
        return memory is not None and all(map(memory.has, self._state_keys(prefix)))

    def _state_end(self, request: Request, num_tokens: int) -> int:
        """Return the most tokens of a request, up to `num_tokens`, whose state is in a checkpoint
        or in the memory tier; 0: there is none, or no layer keeps a state."""
        size = self.kv.block_size
        if not self._state_pages or len(request.block_hashes) < num_tokens // size:
            return 0
        borders = range(num_tokens // size * size, 0, -size)
        ends: list[int] = [num_tokens, *borders] if num_tokens % size else [*borders]
        for end in ends:
            prefix = self.kv.prefix_key(request, end)
            if prefix and (self._checkpoint_of(prefix) is not None or self._has_state(prefix)):
                return end
        return 0

    def _reserve(
        self, request: Request, reach: ReachablePrefix, copied_rows: Collection[int]
    ) -> tuple[bytes, int, int] | None:
        """Reserve a checkpoint for the state of a prefix that is to be loaded; see `Load.state`."""
        checkpoints = self.kv.checkpoints
        if checkpoints is None:
            return None
        if reach.state is None:
            checkpoints.use(self.kv.prefix_key(request, reach.num_tokens))
            return None
        index = checkpoints.reserve({row - self._first_row for row in copied_rows})
        return None if index is None else (reach.state, index, self._state_pages)

    def _finish_state(
        self, load: Load, prefix: bytes, index: int, count: int, failed: set[int]
    ) -> None:
        """Publish the checkpoint of a finished load, if all pages of the state were loaded."""
        checkpoints = self.kv.checkpoints
        assert checkpoints is not None
        first = len(load.pages) - count
        if any(i >= first for i in failed):
            self.index.forget([key for key, _, _ in load.pages[first:]])
        if load.num_tokens >= 0 and not any(i >= first for i in failed):
            checkpoints.add(prefix, index)
        else:
            checkpoints.free(index)


def _copied_rows(plan: SchedulerOutput) -> set[int]:
    """Return the rows of states that a plan copies from or to."""
    return {row for pair in plan.state_copies for row in pair}
