"""Slots and blocks for tenants below their share, taken from those furthest above theirs.

What a tenant holds is its share of the slots or of the blocks, whichever is larger (dominant
resources, Ghodsi et al. 2011). With n tenants a fair share is 1/n.

- A newcomer may take from whoever holds more than a fair share.
- Other requests, of a tenant that was served no more than the one that gives, may take as long as
  that one keeps a fair share and at least twice what the taker then holds. Beyond that requests
  that end make room soon enough; without the distance tenants that are about equal would take
  from each other again and again.
- A request that was preempted itself takes nothing. So a request takes room for itself at most
  once, and there are no more preemptions for fairness than requests that could cause them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from kvik.config.config import SchedulerConfig
from kvik.core.block_pool import NULL_BLOCK
from kvik.core.fair_share import FairShare
from kvik.core.kv_manager import KVCacheManager, PrefixMatch
from kvik.core.policy import Policy
from kvik.core.types import Request, RequestStatus


class Holdings:
    """What each tenant's running requests hold."""

    def __init__(self, running: Iterable[Request], kv: KVCacheManager, max_num_seqs: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        by_tenant: dict[str, list[Request]] = {}
        for request in running:
            by_tenant.setdefault(request.tenant, []).append(request)
        self.slots = Counter({tenant: len(held) for tenant, held in by_tenant.items()})
        self.blocks = Counter({t: sum(map(kv.num_held, held)) for t, held in by_tenant.items()})

    def add(self, request: Request, count: int) -> None:
        self.slots[request.tenant] += count
        self.blocks[request.tenant] += count * self.kv.num_held(request)

    def share(self, tenant: str, slots: int = 0, blocks: int = 0) -> float:
        """0 to 1, with so many slots and blocks more."""
        slots += self.slots[tenant]
        blocks += self.blocks[tenant]
        return max(slots / self.max_num_seqs, blocks / (self.kv.pool.num_blocks - 1))

    def uneven(self, takers: Iterable[str], num_tenants: int) -> bool:
        """Whether somebody holds so much that one of the takers, none of them a newcomer, could get
        a slot of it. Without looking at requests: most of the time it is clear that nobody does."""
        most = max(map(self.share, self.slots), default=0.0)
        return most > 1 / num_tenants and most > 2 * min(map(self.share, takers), default=1.0)


def decode_demand(running: Iterable[Request], kv: KVCacheManager) -> tuple[int, int]:
    """Tokens that the next step's decoding rows take, and new blocks, without those for drafts,
    which take what is left."""
    tokens = blocks = 0
    for request in running:
        if request.num_unscheduled_tokens == 1:
            tokens += 1 + request.num_draft_tokens
            blocks += kv.num_missing(request, request.num_computed_tokens + 1)
    return tokens, blocks


def decode_order(
    running: list[Request], kv: KVCacheManager, max_num_seqs: int, first: Collection[Request]
) -> list[Request]:
    """Running requests, those in `first` before all others; last, if blocks may not do for all,
    those of the tenants that hold most."""
    if len(running) * len(kv.groups) > kv.pool.num_free:
        holdings = Holdings(running, kv, max_num_seqs)
        running = sorted(running, key=lambda request: holdings.share(request.tenant))
    if first:
        running = sorted(running, key=lambda request: request not in first)
    return running


def prompt_demand(request: Request, kv: KVCacheManager, chunk: int) -> int:
    """Blocks that a running request will still need for its prompt, in chunks of so many tokens;
    0 if it waits."""
    if request.status is not RequestStatus.RUNNING:
        return 0
    return max(0, kv.max_blocks(len(request.token_ids), chunk) - kv.num_held(request))


class Room:
    """What is free, and who is to give way, while requests are asked for one after another."""

    def __init__(
        self,
        running: Sequence[Request],
        free_slots: int,
        free_blocks: int,
        kv: KVCacheManager,
        config: SchedulerConfig,
        shares: FairShare,
        policy: Policy,
    ) -> None:
        self.slots = free_slots
        self.blocks = free_blocks  # may be negative
        self.kv = kv
        self.config = config
        self.shares = shares
        self.policy = policy
        self._running = list(running)
        self._taken: list[tuple[str, int, int]] = []  # tenant, slots, blocks; not in holdings yet
        self._holdings: Holdings | None = None  # measured only if somebody is to give way
        self._dropped = Counter[int]()  # references to blocks that go with those who give way

    def may_have(self, request: Request) -> bool:
        """False if a waiting request surely has no room: a quick look before `take`."""
        if self.slots:
            return True
        if request.num_preemptions:
            return False
        served = self.shares.served
        return request in self.shares.newcomers or any(
            r.tenant != request.tenant and served(r) >= served(request) for r in self._running
        )

    def take(
        self, request: Request, slots: int, blocks: int, match: PrefixMatch | None = None
    ) -> list[Request] | None:
        """Room for a request.

        Args:
            slots: 1 if it is to start, 0 if it runs.
            blocks: how many it takes out of the free ones.
            match: what it will share with whoever holds it.

        Returns:
            Who must be preempted for it; None if it is not to have room, and nobody is.
        """
        victims: list[Request] | None = []
        if self.slots < slots or self.blocks < blocks:
            ids = match.block_ids if match else ()
            victims = self._victims(request, slots, blocks, frozenset(chain.from_iterable(ids)))
        if victims is None:
            return None
        self.slots -= slots
        self.blocks -= blocks
        self._taken.append((request.tenant, slots, blocks))
        return victims

    def _victims(
        self, request: Request, slots: int, blocks: int, matched: frozenset[int]
    ) -> list[Request] | None:
        if request.num_preemptions:
            return None
        holdings = self._measure()
        before = self._running, self._dropped.copy(), self.slots, self.blocks
        victims: list[Request] = []
        while self.slots < slots or self.blocks < blocks:
            victim = self._victim(request, slots, blocks, holdings)
            if victim is None:
                self._running, self._dropped, self.slots, self.blocks = before
                for kept in victims:
                    holdings.add(kept, 1)
                return None
            victims.append(victim)
            self._running = [r for r in self._running if r is not victim]
            holdings.add(victim, -1)
            self.slots += 1
            self.blocks += self._freed(victim, matched)
        return victims

    def _measure(self) -> Holdings:
        if self._holdings is None:
            self._holdings = Holdings(self._running, self.kv, self.config.max_num_seqs)
        for tenant, slots, blocks in self._taken:
            self._holdings.slots[tenant] += slots
            self._holdings.blocks[tenant] += blocks
        self._taken.clear()
        return self._holdings

    def _victim(
        self, request: Request, slots: int, blocks: int, holdings: Holdings
    ) -> Request | None:
        shares = self.shares
        others = [
            r for r in self._running if r.tenant != request.tenant and r not in shares.newcomers
        ]
        if not others:
            return None
        tenant = max({r.tenant: None for r in others}, key=holdings.share)
        victim = self.policy.cheapest([r for r in others if r.tenant == tenant])
        fair = 1 / shares.num_active
        if request in shares.newcomers:
            return victim if holdings.share(tenant) > fair else None
        if shares.served(request) > shares.served(victim):
            return None
        rest = holdings.share(tenant, -1, -self.kv.num_held(victim))
        enough = max(fair, 2 * holdings.share(request.tenant, slots, blocks))
        return victim if rest >= enough else None

    def _freed(self, victim: Request, matched: frozenset[int]) -> int:
        """How many blocks more are free without it. Those that the taker shares are not: it holds
        them then."""
        refs = self.kv.pool.ref_counts
        freed = 0
        for ids in victim.block_ids:
            for block in ids:
                if block != NULL_BLOCK:
                    self._dropped[block] += 1
                    freed += self._dropped[block] == refs[block] and block not in matched
        return freed
