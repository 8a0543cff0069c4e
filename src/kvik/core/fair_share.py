"""A fair share of the engine for each tenant, whatever policy orders the requests of one.

Service is counted in tokens, as in VTC (Sheng et al. 2024, "Fairness in Serving Large Language
Models"): 1 for a token of a prompt, `OUTPUT_WEIGHT` for one of an output, since it takes a row of a
step of its own. Only what is computed for the first time counts: what the prefix cache had cost
nothing, and what a preemption lost is not the tenant's doing. Who was served least goes first, so
tenants that always have work get equal service, to within a step and one request.

Time without work earns no credit: a tenant that comes back is lifted to the *virtual time*, the
service of the least served tenant that has work waiting (start-time fair queueing, Goyal et al.
1996).

The request with which a tenant comes back while others are served, and which finds its tenant
within its share, is a *newcomer*. It goes first, whole, until its first token, for a tenant that
asks for less than its share should not feel the others. There is one of a tenant at most, and the
next can only come when the others were served as much.

Tenants come before priorities: those order the requests of one tenant. While only one tenant has
requests, nothing of this costs anything or changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain

from kvik.core.block_pool import NULL_BLOCK
from kvik.core.config import SchedulerConfig
from kvik.core.kv_manager import KVCacheManager, PrefixMatch
from kvik.core.policy import Policy
from kvik.core.types import Request, RequestStatus

# Slots and blocks for tenants below their share, taken from those furthest above theirs.
#
# What a tenant holds is its share of the slots or of the blocks, whichever is larger (dominant
# resources, Ghodsi et al. 2011). With n tenants a fair share is 1/n.
#
# - A newcomer may take from whoever holds more than a fair share.
# - Other requests, of a tenant that was served no more than the one that gives, may take as long as
#   that one keeps a fair share and at least twice what the taker then holds. Beyond that requests
#   that end make room soon enough; without the distance tenants that are about equal would take
#   from each other again and again.
# - A request that was preempted itself takes nothing. So a request takes room for itself at most
#   once, and there are no more preemptions for fairness than requests that could cause them.


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


OUTPUT_WEIGHT = 2  # as in VTC, and about what output costs more where it is sold


class Account:
    """One tenant that has requests, or was served more than others by now."""

    __slots__ = ("num_requests", "served", "since")

    def __init__(self) -> None:
        self.served = 0  # weighted tokens, in virtual time
        self.num_requests = 0  # unfinished ones
        self.since = 0  # the larger, the later it came back


class FairShare:
    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.newcomers: dict[Request, None] = {}  # in order of arrival
        self.num_active = 0  # tenants with requests
        self.virtual_time = 0
        self._num_lifts = 0

    @property
    def contended(self) -> bool:
        """Whether more than one tenant has requests."""
        return self.num_active > 1

    def served(self, request: Request) -> int:
        """What the request's tenant was given."""
        return self.accounts[request.tenant].served

    def place(self, request: Request) -> tuple[bool, tuple[float, int]]:
        """Among running requests that need blocks for their prompts: the larger, the sooner it
        gives way. It does not depend on service, so that nobody overtakes another twice."""
        return (request not in self.newcomers, request.order)

    # -- requests in and out ---------------------------------------------------------------------

    def arrive(
        self, request: Request, waiting: Mapping[str, list[Request]], running: list[Request]
    ) -> None:
        """A request comes. `waiting`: those of each tenant that are queued, without this one."""
        tenant = request.tenant
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account()
        account.num_requests += 1
        self.num_active += account.num_requests == 1
        if not self.contended:
            account.served = max(account.served, self.virtual_time)
        elif tenant not in waiting:
            self._come_back(request, account, waiting, running)

    def start(self, request: Request) -> None:
        """A request was admitted: what was found in the cache is free."""
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)

    def first_token(self, request: Request) -> None:
        self.newcomers.pop(request, None)

    def lose(self, request: Request) -> None:
        """A request is preempted: what it computes again will not be charged again."""
        self.charge(request)
        self.newcomers.pop(request, None)

    def leave(self, request: Request) -> None:
        """A request ends."""
        self.charge(request)
        self.newcomers.pop(request, None)
        account = self.accounts[request.tenant]
        account.num_requests -= 1
        if account.num_requests:
            return
        self.num_active -= 1
        if not self.num_active:  # with no one to compare with, all begin anew
            self.virtual_time = max(a.served for a in self.accounts.values())
            self.accounts.clear()

    def _come_back(
        self,
        request: Request,
        account: Account,
        waiting: Mapping[str, list[Request]],
        running: list[Request],
    ) -> None:
        self.settle(running)
        behind = {r.tenant for r in running if r.num_computed_tokens < r.num_prompt_tokens}
        behind.update(waiting)
        behind.update(r.tenant for r in self.newcomers)
        if request.tenant in behind:
            return
        accounts = self.accounts
        if behind:
            reached = min(accounts[tenant].served for tenant in behind)
        else:  # everyone gets all that was asked for
            reached = max(a.served for a in accounts.values() if a.num_requests)
        self.virtual_time = max(self.virtual_time, reached)
        account.served = max(account.served, self.virtual_time)
        self._num_lifts += 1
        account.since = self._num_lifts
        if account.served == self.virtual_time:
            self.newcomers[request] = None
        for tenant in [t for t, a in accounts.items() if not a.num_requests]:
            if accounts[tenant].served <= self.virtual_time:
                del accounts[tenant]  # it would be lifted

    # -- service ---------------------------------------------------------------------------------

    def settle(self, running: list[Request]) -> None:
        """Count what running requests were given since it was last asked for. So decoding costs
        nothing as long as nobody has to be compared."""
        for request in running:
            if request.num_computed_tokens > request.num_charged_tokens:
                self.charge(request)

    def charge(self, request: Request) -> None:
        first, end = request.num_charged_tokens, request.num_computed_tokens
        if end > first:
            output = max(0, end - max(first, request.num_prompt_tokens))
            cost = end - first + (OUTPUT_WEIGHT - 1) * output
            self.accounts[request.tenant].served += cost
            request.num_charged_tokens = end

    def left_over(self, budget: int, waiting: Iterable[str]) -> None:
        """A step had so many tokens left that nobody could use. Its part of them counts as served
        to a tenant that waits: what it lacks is room, and nobody took tokens from it. Otherwise a
        tenant that fills all blocks and slowly decodes would make all others seem greedy."""
        for tenant in waiting:
            self.accounts[tenant].served += budget // self.num_active

    def in_turn(
        self,
        lines: Mapping[str, Iterable[Request]],
        cost: Callable[[Request], int] = lambda request: 0,
    ) -> Iterator[Request]:
        """Requests in the order in which to serve them: newcomers first, then always the next in
        line of the tenant that was served least. What the caller charges before it asks for the
        next one counts, and so does `cost`, by which requests can be lined up without service."""
        turns: list[tuple[bool, int, int, str, Request, Iterator[Request]]] = []

        def line_up(tenant: str, line: Iterator[Request], expected: int) -> None:
            request = next(line, None)
            if request is not None:
                account = self.accounts[tenant]
                served = account.served + expected
                late = request not in self.newcomers
                heappush(turns, (late, served, -account.since, tenant, request, line))

        expected = dict.fromkeys(lines, 0)
        for tenant, line in lines.items():
            line_up(tenant, iter(line), 0)
        while turns:
            *_, tenant, request, line = heappop(turns)
            yield request
            expected[tenant] += cost(request)
            line_up(tenant, line, expected[tenant])
