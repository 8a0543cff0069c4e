"""An audit of everything the scheduler believes, for tests and for debugging a live engine."""

from __future__ import annotations

from collections import Counter

from kvik.core.block_pool import NULL_BLOCK
from kvik.core.kv_groups import first_visible_block
from kvik.core.prefix import extend_hashes
from kvik.core.scheduler import Scheduler
from kvik.core.types import Request, RequestStatus


class InvariantError(AssertionError):
    """The books do not balance."""


def check(scheduler: Scheduler) -> None:
    """Raise `InvariantError` at the first thing that is wrong."""
    _check_requests(scheduler)
    _check_in_flight(scheduler)
    _check_blocks(scheduler)
    _check_prefix_index(scheduler)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


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
    for r in waiting:
        _require(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), f"{r.key}: status")
        _require(not r.block_ids and r.slot == -1, f"{r.key} waits but holds blocks or a slot")
        computed = max(r.num_computed_tokens, r.num_written_tokens)
        _require(computed == 0, f"{r.key} waits with computed tokens")
    for r in running:
        _check_running(r, scheduler)


def _check_running(r: Request, scheduler: Scheduler) -> None:
    block_size = scheduler.kv.block_size
    known = len(r.token_ids) + r.num_pending_tokens
    _require(r.status is RequestStatus.RUNNING, f"{r.key}: status")
    only_prompt = r.max_length == r.num_prompt_tokens == known  # nothing is ever sampled
    limit = known + only_prompt
    _require(0 <= r.num_computed_tokens < limit, f"{r.key} computed more than is known")
    _require(len(r.token_ids) < r.max_length or only_prompt, f"{r.key} outgrew its limit")
    _require(len({len(ids) for ids in r.block_ids}) == 1, f"{r.key}: tables differ in length")
    capacity = len(r.block_ids[0]) * block_size
    _require(r.num_computed_tokens <= capacity, f"{r.key} computed past its blocks")
    _require(r.num_committed_blocks * block_size <= capacity, f"{r.key} committed past its blocks")
    hashes: list[bytes] = []
    full = min(len(r.token_ids) // block_size, len(r.block_hashes))
    extend_hashes(hashes, r.token_ids, block_size, r.cache_salt, full)
    _require(hashes == r.block_hashes[:full], f"{r.key}: block hashes do not fit its tokens")


def _check_in_flight(scheduler: Scheduler) -> None:
    """What requests believe to be under way is what the steps in flight will bring."""
    scheduled, pending = Counter[int](), Counter[int]()
    for plan, requests in scheduler._in_flight:
        for r, tokens, drafts, samples in zip(
            requests, plan.num_scheduled_tokens, plan.num_draft_tokens, plan.samples, strict=True
        ):
            scheduled[id(r)] += tokens
            pending[id(r)] += (drafts + 1) * samples
    for r in scheduler.running:
        under_way = r.num_computed_tokens - r.num_written_tokens
        _require(under_way == scheduled[id(r)], f"{r.key}: {under_way} tokens are under way")
    for r in [*scheduler.running, *scheduler.waiting]:
        _require(r.num_pending_tokens == pending[id(r)], f"{r.key} miscounts pending tokens")


def _check_blocks(scheduler: Scheduler) -> None:
    pool = scheduler.kv.pool
    held = Counter(
        block
        for r in scheduler.running
        for ids in r.block_ids
        for block in ids
        if block != NULL_BLOCK
    )
    free = pool.free_blocks()
    _require(len(free) == len(set(free)) == pool.num_free, "the free list is broken")
    _require(pool.ref_counts[NULL_BLOCK] == 0, "the null block was handed out")
    for block in range(1, pool.num_blocks):
        count = pool.ref_counts[block]
        _require(count == held[block], f"block {block}: {count} references, {held[block]} holders")
    _require(
        set(free) == {b for b in range(1, pool.num_blocks) if pool.ref_counts[b] == 0},
        "free list and reference counts disagree",
    )
    block_size = scheduler.kv.block_size
    for r in scheduler.running:
        at = r.num_written_tokens // block_size
        for group, ids in zip(scheduler.kv.groups, r.block_ids, strict=True):
            seen = first_visible_block(group.spec, r.num_written_tokens, block_size)
            _require(NULL_BLOCK not in ids[seen:], f"{r.key} lacks a block that it sees")
            for block in ids[at:]:  # what is yet to be written must not be seen by anybody else
                _require(pool.ref_counts[block] == 1, f"{r.key} writes into a shared block")


def _check_prefix_index(scheduler: Scheduler) -> None:
    items = scheduler.kv.pool.index_items()
    _require(len({b for _, b in items}) == len(items), "a block is indexed twice")
    by_block = {block: key for key, block in items}
    for r in scheduler.running:
        for group, ids in enumerate(r.block_ids):
            for i, block in enumerate(ids):
                key = by_block.get(block)
                if key is not None:
                    _require(
                        i < len(r.block_hashes) and key == (group, r.block_hashes[i]),
                        f"{r.key}: block {block} is indexed under another content",
                    )
