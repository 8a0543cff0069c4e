"""Checks of the whole state of a scheduler."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from operator import itemgetter

from kvik.core.block_pool import NULL_BLOCK, extend_hashes
from kvik.core.kv_manager import KVCacheManager
from kvik.core.moves import Moves
from kvik.core.plan import MEMORY
from kvik.core.scheduler import Scheduler
from kvik.core.types import Request, RequestStatus


class InvariantError(AssertionError):
    """The state of the scheduler is inconsistent."""


def check(scheduler: Scheduler) -> None:
    """Raise `InvariantError` at the first inconsistency."""
    _check_requests(scheduler)
    _check_in_flight(scheduler)
    _check_shares(scheduler)
    _check_blocks(scheduler)
    _check_pins(scheduler.kv)
    _check_prefix_index(scheduler)
    _check_checkpoints(scheduler)
    _check_budgets(scheduler)
    if scheduler.moves is not None:
        _check_moves(scheduler.moves, scheduler)


def _require(condition: bool, message: str, request: Request | None = None) -> None:
    if not condition:
        raise InvariantError(message if request is None else f"{request.key}: {message}")


def _check_requests(scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, list(scheduler.waiting)
    limit = scheduler.config.max_num_seqs
    for requests, name in ((running, "running"), (waiting, "waiting")):
        orders = [r.order for r in requests]
        _require(orders == sorted(orders), f"{name} requests are out of order")
        _require(len(set(map(id, requests))) == len(requests), f"a request is {name} twice")
    slots = [r.slot for r in running]
    free = scheduler._free_slots
    _require(sorted(slots + free) == list(range(limit)), "slots are lost or used twice")
    _require(
        scheduler.waiting.num_tokens == sum(r.num_prompt_tokens for r in waiting),
        "the queue miscounts its tokens",
    )
    statuses = RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.LOADING
    for r in waiting:
        _require(r.status in statuses, "status", r)
        _require(not r.block_ids and r.slot == -1, "waits but holds blocks or a slot", r)
        computed = r.num_computed_tokens or r.num_written_tokens
        _require(computed == 0, "waits with computed tokens", r)
    for r in running:
        _check_running(r, scheduler)


def _check_running(r: Request, scheduler: Scheduler) -> None:
    block_size = scheduler.kv.block_size
    num_known = len(r.token_ids) + r.num_pending_tokens
    _require(r.status is RequestStatus.RUNNING, "status", r)
    only_prompt = r.max_length == r.num_prompt_tokens == num_known  # no token is sampled
    limit = num_known + only_prompt
    _require(0 <= r.num_computed_tokens < limit, "computed more than is known", r)
    _require(len(r.token_ids) < r.max_length or only_prompt, "outgrew its limit", r)
    _require(len({len(ids) for ids in r.block_ids}) == 1, "tables differ in length", r)
    capacity = len(r.block_ids[0]) * block_size
    _require(r.num_computed_tokens <= capacity, "computed past its blocks", r)
    _require(r.num_committed_blocks * block_size <= capacity, "committed past its blocks", r)
    hashes: list[bytes] = []
    full = min(len(r.token_ids) // block_size, len(r.block_hashes))
    extend_hashes(hashes, r.token_ids, block_size, r.cache_salt, full)
    fit = all(
        stored in (b"", computed) for stored, computed in zip(r.block_hashes, hashes, strict=False)
    )
    _require(fit, "block hashes do not fit its tokens", r)


def _check_in_flight(scheduler: Scheduler) -> None:
    """Check that the tokens that requests count as under way are those of the steps in flight."""
    scheduled, pending = Counter[int](), Counter[int]()
    for step in scheduler.in_flight:
        plan = step.plan
        for r, tokens, drafts, samples in zip(
            step.requests,
            plan.num_scheduled_tokens,
            plan.num_draft_tokens,
            plan.samples,
            strict=True,
        ):
            scheduled[id(r)] += tokens
            pending[id(r)] += (drafts + 1) * samples
    for r in scheduler.running:
        under_way = r.num_computed_tokens - r.num_written_tokens
        _require(under_way == scheduled[id(r)], "miscounts tokens under way", r)
    for r in [*scheduler.running, *scheduler.waiting]:
        _require(r.num_pending_tokens == pending.get(id(r), 0), "miscounts pending tokens", r)


def _check_shares(scheduler: Scheduler) -> None:
    """Check that the accounts of tenants match the requests."""
    shares, waiting = scheduler.shares, list(scheduler.waiting)
    requests = [*scheduler.running, *waiting]
    counts = Counter(r.tenant for r in requests)
    active = {t: a.num_requests for t, a in shares.accounts.items() if a.num_requests}
    _require(active == counts, "accounts miscount requests")
    _require(shares.num_active == len(counts), "tenants are miscounted")
    served = all(a.served >= 0 for a in shares.accounts.values())
    _require(served, "a tenant was served less than nothing")
    newcomers = list(shares.newcomers)
    _require(all(r in requests and r.first_token is None for r in newcomers), "old newcomers")
    _require(len({r.tenant for r in newcomers}) == len(newcomers), "two newcomers of a tenant")
    _require(not any(r.num_preemptions for r in newcomers), "a newcomer was preempted")
    lines: dict[str, list[Request]] = {}
    for r in waiting:
        lines.setdefault(r.tenant, []).append(r)
    _require(lines == scheduler.waiting.by_tenant, "the lines of tenants are not the queue")


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    refs = pool.ref_counts
    holders = Counter(chain.from_iterable(ids for r in scheduler.running for ids in r.block_ids))
    if scheduler.moves is not None:
        holders.update(block for load in scheduler.moves.loads.values() for block in load.blocks)
    holders.pop(NULL_BLOCK, None)
    free = pool.free_blocks()
    pinned = pool.pin_counts()
    pinned_free = {b for b in pinned if refs[b] == 0}
    _require(
        len(free) == len(set(free)) == pool.num_free - len(pinned_free), "the free list is broken"
    )
    _require(pool.num_kept == len(pinned_free), "blocks kept by pins are miscounted")
    _require(refs[NULL_BLOCK] == 0, "the null block was handed out")
    counts = dict(filter(itemgetter(1), enumerate(refs)))
    if counts != holders:
        block = min(block for block in counts | holders if counts.get(block, 0) != holders[block])
        counted = f"{counts.get(block, 0)} references, {holders[block]} holders"
        raise InvariantError(f"block {block}: {counted}")
    unused = set(range(NULL_BLOCK + 1, len(refs))).difference(counts, pinned_free)
    _require(set(free) == unused, "free list and reference counts disagree")
    block_size = scheduler.kv.block_size
    for r in scheduler.running:
        at = r.num_written_tokens // block_size
        for group, ids in zip(scheduler.kv.groups, r.block_ids, strict=True):
            if NULL_BLOCK in ids:
                prompt = r.num_prompt_tokens
                hidden = group.visible.hidden_blocks(r.num_written_tokens, block_size, prompt)
                visible = all(i in hidden for i, block in enumerate(ids) if block == NULL_BLOCK)
                _require(visible, "lacks a block that it sees", r)
            # a block that is still being written must not be shared
            private = all(refs[block] == 1 for block in ids[at:])
            _require(private, "writes into a shared block", r)


def _check_pins(kv: KVCacheManager) -> None:
    """Check that pinned blocks are those that pins hold, within quotas, and can be matched."""
    pins, pool = kv.pins, kv.pool
    if not (pins.tenants or pins.by_use or pool.num_pinned):
        return
    counts: Counter[int] = Counter()
    for tenant in pins.tenants.values():
        holders = Counter(block for pin in tenant.pins.values() for block in pin.blocks)
        _require(tenant.blocks == holders, f"{tenant.name!r} miscounts what it pins")
        _require(len(tenant.blocks) <= pins.max_of_tenant, f"{tenant.name!r} pins too much")
        counts += holders
    _require(
        counts == pool.pin_counts(),
        "blocks are pinned without a prefix, or not as often as prefixes hold them",
    )
    _require(pool.num_pinned <= pins.max_blocks, "too much is pinned")
    indexed = {block for _, block in pool.index_items()}
    _require(indexed.issuperset(counts), "what is pinned cannot be matched")
    listed = sum(len(tenant.pins) for tenant in pins.tenants.values())
    _require(listed == len(pins.by_use), "pins are listed wrongly")


def _check_prefix_index(scheduler: Scheduler) -> None:
    items = scheduler.kv.pool.index_items()
    _require(len({b for _, b in items}) == len(items), "a block is indexed twice")
    by_block = {block: key for key, block in items}
    index, refs = dict(items), scheduler.kv.pool.ref_counts
    copies = scheduler.kv.pool.copies()
    for block, of in copies.items():
        _require(of in index and block not in by_block, f"block {block} is a copy of nothing")
        _require(refs[block] > 0, f"block {block} is a copy without references")
    by_block |= copies
    for r in scheduler.running:
        for group, ids in enumerate(r.block_ids):
            for i, block in enumerate(ids):
                key = by_block.get(block)
                if key is not None:
                    _require(
                        i < len(r.block_hashes) and key == (group, r.block_hashes[i]),
                        "a block is indexed under another content",
                        r,
                    )


def _check_checkpoints(scheduler: Scheduler) -> None:
    """Check that each checkpoint is free, published, or in a step in flight, on a block border."""
    checkpoints = scheduler.kv.checkpoints
    made = [made for step in scheduler.in_flight for made in step.checkpoints]
    if checkpoints is None:
        _require(
            not made and not scheduler._state_copies,
            "states are copied that no checkpoint or request has",
        )
        return
    indices = checkpoints.indices() + [checkpoint.index for checkpoint in made]
    if scheduler.moves is not None:
        loads = scheduler.moves.loads.values()
        indices += [load.state[1] for load in loads if load.state is not None]
    _require(
        sorted(indices) == list(range(checkpoints.count)), "checkpoints are lost or used twice"
    )
    rows = scheduler.config.max_num_seqs + checkpoints.count
    copies = [*scheduler._state_copies]
    for step in scheduler.in_flight:
        copies += step.plan.state_copies
    _require(all(0 <= row < rows for pair in copies for row in pair), "a copy outside of the pool")
    for checkpoint in made:
        blocks, rest = divmod(checkpoint.num_tokens, checkpoints.block_size)
        _require(rest == 0 < blocks, "a checkpoint within a block")


def _check_budgets(scheduler: Scheduler) -> None:
    """Check that no step computes past a due cut, dropped blocks are gone, and kept ones are
    private and cannot be matched."""
    kv = scheduler.kv
    for r in scheduler.running:
        due = kv.cut_after(r, r.num_cut_tokens + 1 if r.num_cut_tokens else 0)
        _require(r.next_cut == due, "does not know when it drops tokens", r)
        _require(r.num_computed_tokens <= r.next_cut, "computed past a cut", r)
        if not r.num_cut_tokens:
            continue
        public = {block for _, block in kv.pool.index_items()} | kv.pool.copies().keys()
        first = kv.cut_after(r, 0)
        _require(first <= r.num_cut_tokens, "drops tokens before the first cut", r)
        for group, ids in zip(kv.groups, r.block_ids, strict=True):
            visible, prompt = group.visible, r.num_prompt_tokens
            if not (group.budgeted and visible.first_key(r.num_cut_tokens, prompt)):
                continue
            hidden = visible.hidden_blocks(r.num_cut_tokens, kv.block_size, prompt)
            gone = all(ids[i] == NULL_BLOCK for i in hidden)
            _require(gone, "holds blocks of what it dropped", r)
            kept_blocks = [ids[i] for i in range(hidden.stop, len(ids))]
            private = all(kv.pool.ref_counts[block] == 1 for block in kept_blocks)
            _require(private, "shares blocks of what it keeps", r)
            _require(public.isdisjoint(kept_blocks), "what it keeps can be matched", r)
        for ids in r.block_ids:
            later = ids[first // kv.block_size :]
            _require(public.isdisjoint(later), "what it made of the kept can be matched", r)


def _check_moves(moves: Moves, scheduler: Scheduler) -> None:
    """Check that tiers are within their sizes, each page has its place, and each request that waits
    for pages has a load."""
    index, refs = moves.index, scheduler.kv.pool.ref_counts
    for name, tier in index.tiers.items():
        sizes = [*tier.pages.values(), *tier.under_way.values()]
        _require(not tier.pages.keys() & tier.under_way.keys(), f"{name}: a page is there twice")
        _require(tier.size == sum(sizes) <= tier.capacity, f"{name}: bytes are miscounted")
        storing = sum(tier.under_way.values())
        _require(tier.storing == storing, f"{name}: bytes under way are miscounted")
        reads = Counter(k for load in moves.loads.values() for k, _, t in load.pages if t == name)
        if name == MEMORY:
            reads += Counter(key for keys in moves.leases.values() for key in keys)
        _require(tier.busy == reads, f"{name}: pages that are read are miscounted")
    places, free, leased = index.places()
    memory = index.tiers.get(MEMORY)
    if memory is not None:
        used = [*places.values(), *free, *leased.values()]
        _require(sorted(used) == list(range(index.sizes.memory)), "places are lost or used twice")
        _require(places.keys() == memory.pages.keys() | memory.under_way.keys(), "lost places")
    for load in moves.loads.values():
        for block in load.loaded_blocks:
            _require(refs[block] == 1, f"block {block} is loaded and used")
        for request, _ in load.waiting:
            _require(request.status is RequestStatus.LOADING, "does not load", request)
    waited = [request for load in moves.loads.values() for request, _ in load.waiting]
    loading = [r for r in scheduler.waiting if r.status is RequestStatus.LOADING]
    _require(Counter(map(id, waited)) == Counter(map(id, loading)), "a request loads nothing")
