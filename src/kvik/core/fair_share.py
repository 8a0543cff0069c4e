"""Fair shares of the engine between tenants. A policy orders the requests of one tenant.

Service is counted in tokens, as in VTC (Sheng et al. 2024, "Fairness in Serving Large Language
Models"): 1 for a token of a prompt, `OUTPUT_WEIGHT` for a token of an output, since that needs a
row of a separate step. Only tokens computed for the first time count: tokens found in the prefix
cache cost nothing, and tokens lost by a preemption are not charged twice. The tenant served least
goes first, so tenants that always have work get equal service, to within a step and one request.

Time without work earns no credit: a tenant that returns is lifted to the *virtual time*, the
service of the least served tenant that has work waiting (start-time fair queueing, Goyal et al.
1996).

The request with which a tenant returns while others are served is a *newcomer* if the tenant was
not served more than the virtual time. It goes first, with its whole prompt, until its first token:
a tenant that uses less than its share should not notice the others. A tenant has at most one
newcomer, and gets the next only after the others were served as much.

Fair shares take precedence over priorities, which order the requests of one tenant. While only one
tenant has requests, all this costs and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain

from kvik.core.block_pool import NULL_BLOCK
from kvik.core.kv_manager import KVCacheManager, PrefixMatch
from kvik.core.policy import Policy
from kvik.core.types import Request

OUTPUT_WEIGHT = 2  # as in VTC, and about the ratio of prices of output and input


class Account:
    """A tenant that has requests, or was served more than the virtual time."""

    __slots__ = ("num_requests", "served", "since")

    def __init__(self) -> None:
        self.served = 0  # weighted tokens, in virtual time
        self.num_requests = 0  # unfinished requests
        self.since = 0  # running number of its last return


class FairShare:
    """The service that each tenant got, and the order in which to serve them next."""

    def __init__(self, kv: KVCacheManager, policy: Policy, max_num_seqs: int) -> None:
        self.kv = kv
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.accounts: dict[str, Account] = {}
        self.newcomers: dict[Request, None] = {}  # requests that go first, in order of arrival
        self.num_active = 0  # tenants with unfinished requests
        self.virtual_time = 0  # service of the least served tenant that has work waiting
        self._num_lifts = 0
        self._service: Counter[str] | None = None  # service since `take_service`; None: not counted

    @property
    def contended(self) -> bool:
        """Whether more than one tenant has requests."""
        return self.num_active > 1

    def served(self, request: Request) -> int:
        """Return the service of the request's tenant."""
        return self.accounts[request.tenant].served

    def place(self, request: Request) -> tuple[bool, tuple[float, int]]:
        """Return the sort key of running requests that need blocks for their prompts; the largest
        is preempted first. It does not depend on service, so that no request overtakes another
        twice."""
        return (request not in self.newcomers, request.order)

    # -- requests in and out ---------------------------------------------------------------------

    def arrive(
        self, request: Request, waiting: Mapping[str, list[Request]], running: list[Request]
    ) -> None:
        """Note that a request arrives. `waiting`: queued requests by tenant, without this one."""
        tenant = request.tenant
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account()
        account.num_requests += 1
        self.num_active += account.num_requests == 1
        if not self.contended:
            account.served = max(account.served, self.virtual_time)
        elif tenant not in waiting and not request.continues_beam:
            self._return(request, account, waiting, running)

    def start(self, request: Request) -> None:
        """Note that a request was admitted: tokens found in the cache are free."""
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)

    def first_token(self, request: Request) -> None:
        self.newcomers.pop(request, None)

    def lose(self, request: Request) -> None:
        """Note that a request is preempted: recomputed tokens will not be charged again."""
        self.charge(request)
        self.newcomers.pop(request, None)

    def leave(self, request: Request) -> None:
        """Note that a request ends."""
        self.charge(request)
        self.newcomers.pop(request, None)
        account = self.accounts[request.tenant]
        account.num_requests -= 1
        if account.num_requests:
            return
        self.num_active -= 1
        if not self.num_active:  # no tenant is left to compare with
            self.virtual_time = max(a.served for a in self.accounts.values())
            self.accounts.clear()

    def _return(
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
        else:  # all tenants get what they ask for
            reached = max(a.served for a in accounts.values() if a.num_requests)
        self.virtual_time = max(self.virtual_time, reached)
        account.served = max(account.served, self.virtual_time)
        self._num_lifts += 1
        account.since = self._num_lifts
        if account.served == self.virtual_time and request.first_token is None:
            self.newcomers[request] = None
        for tenant in [t for t, a in accounts.items() if not a.num_requests]:
            if accounts[tenant].served <= self.virtual_time:
                del accounts[tenant]  # it would be lifted

    # -- service ---------------------------------------------------------------------------------

    def take_service(self, running: list[Request]) -> dict[str, int]:
        """Return the service of each tenant since the last call; counting starts at the first."""
        if self._service is None:
            self._service = Counter()
        self.settle(running)
        service, self._service = self._service, Counter()
        return dict(service)

    def credit(self, tenant: str, service: int) -> None:
        """Count the service of a tenant by another engine behind the same router."""
        if not self.num_active:
            return  # there is no tenant to compare with
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account()
            account.served = self.virtual_time
        account.served += service

    def settle(self, running: list[Request]) -> None:
        """Charge what running requests computed since the last call. Decoding is charged only here,
        so accounting for it is free while no tenants have to be compared."""
        for request in running:
            if request.num_computed_tokens > request.num_charged_tokens:
                self.charge(request)

    def charge(self, request: Request) -> None:
        """Charge the tenant for the tokens that the request computed since the last charge."""
        first, end = request.num_charged_tokens, request.num_computed_tokens
        if end > first:
            output = max(0, end - max(first, request.num_prompt_tokens))
            cost = end - first + (OUTPUT_WEIGHT - 1) * output
            self.accounts[request.tenant].served += cost
            if self._service is not None:
                self._service[request.tenant] += cost
            request.num_charged_tokens = end

    def left_over(self, budget: int, waiting: Iterable[str]) -> None:
        """Charge each waiting tenant its part of the `budget` tokens of a step that no request
        could use: it lacks blocks or slots, not tokens. Otherwise the others would look overserved
        compared to a tenant that fills all blocks and decodes slowly."""
        for tenant in waiting:
            self.accounts[tenant].served += budget // self.num_active

    def in_turn(
        self,
        lines: Mapping[str, Iterable[Request]],
        cost: Callable[[Request], int] = lambda request: 0,
    ) -> Iterator[Request]:
        """Yield requests in the order in which to serve them: newcomers first, then always the next
        request of the tenant served least. Charges that the caller makes between two requests
        count, and so does `cost`, which orders requests that are not charged meanwhile."""
        turns: list[tuple[bool, int, int, str, Request, Iterator[Request]]] = []

        def line_up(tenant: str, line: Iterator[Request], expected: int) -> None:
            request = next(line, None)
            if request is not None:
                account = self.accounts[tenant]
                served = account.served + expected
                is_served = request not in self.newcomers
                heappush(turns, (is_served, served, -account.since, tenant, request, line))

        expected = dict.fromkeys(lines, 0)
        for tenant, line in lines.items():
            line_up(tenant, iter(line), 0)
        while turns:
            *_, tenant, request, line = heappop(turns)
            yield request
            expected[tenant] += cost(request)
            line_up(tenant, line, expected[tenant])

    # -- slots and blocks ------------------------------------------------------------------------

    def usage(self, running: Iterable[Request]) -> TenantUsage:
        """Return what the tenants of these requests use now."""
        return TenantUsage(running, self.kv, self.max_num_seqs)

    def decode_order(self, running: list[Request], *, newcomers_first: bool) -> list[Request]:
        """Return running requests in the order in which decodes get blocks: if blocks may not
        suffice for all, requests of the tenants that use most come last."""
        if len(running) * len(self.kv.groups) > self.kv.pool.num_free:
            usage = self.usage(running)
            running = sorted(running, key=lambda request: usage.share(request.tenant))
        if newcomers_first:
            running = sorted(running, key=lambda request: request not in self.newcomers)
        return running


# Slots and blocks for tenants below their share, taken from those furthest above theirs.
#
# A tenant's share is its share of the slots or of the blocks, whichever is larger (dominant
# resources, Ghodsi et al. 2011). With n tenants a fair share is 1/n.
#
# - A newcomer may take from a tenant that uses more than a fair share.
# - Other requests may take from a tenant that was served at least as much as theirs, if it keeps a
#   fair share and at least twice what the taker then uses. For smaller differences, requests that
#   end soon free enough; without this margin, tenants with about equal shares would preempt each
#   other again and again.
# - A request that was preempted takes nothing. So a request takes resources at most once, and the
#   number of preemptions for fairness is at most the number of requests that could cause them.


class TenantUsage:
    """Slots and blocks that the running requests of each tenant use."""

    def __init__(self, running: Iterable[Request], kv: KVCacheManager, max_num_seqs: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        by_tenant: dict[str, list[Request]] = {}
        for request in running:
            by_tenant.setdefault(request.tenant, []).append(request)
        self.slots = Counter({tenant: len(requests) for tenant, requests in by_tenant.items()})
        self.blocks = Counter(
            {t: sum(map(kv.num_allocated, requests)) for t, requests in by_tenant.items()}
        )

    def add(self, request: Request, count: int) -> None:
        self.slots[request.tenant] += count
        self.blocks[request.tenant] += count * self.kv.num_allocated(request)

    def share(self, tenant: str, slots: int = 0, blocks: int = 0) -> float:
        """Return the tenant's share of the slots or blocks, 0 to 1, with `slots` and `blocks` more
        than it uses."""
        slots += self.slots[tenant]
        blocks += self.blocks[tenant]
        return max(slots / self.max_num_seqs, blocks / self.kv.pool.num_blocks)

    def uneven(self, takers: Iterable[str], num_tenants: int) -> bool:
        """Return whether a tenant uses so much that one of the takers, none of them a newcomer,
        could take a slot from it. This quick check looks at no request; usually no tenant does."""
        largest = max(map(self.share, self.slots), default=0.0)
        return largest > 1 / num_tenants and largest > 2 * min(map(self.share, takers), default=1.0)


class FreeResources:
    """Free slots and blocks of a step, and the requests to preempt as others take them."""

    def __init__(
        self, shares: FairShare, running: Sequence[Request], free_slots: int, free_blocks: int
    ) -> None:
        self.shares = shares
        self.slots = free_slots
        self.blocks = free_blocks  # may be negative
        self._running = list(running)
        self._reserved: list[
            tuple[str, int, int]
        ] = []  # tenant, slots, blocks; not in `_usage` yet
        self._usage: TenantUsage | None = None  # measured only if a request is to be preempted
        self._dropped = Counter[int]()  # references to blocks that preempted requests give up

    def may_have(self, request: Request) -> bool:
        """Return False if `take` would certainly refuse a waiting request; a quick check."""
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
        """Take slots and blocks for a request.

        Args:
            slots: 1 if it starts, 0 if it is running.
            blocks: how many of the free blocks it takes.
            match: its cached prefix, whose blocks other requests may use too.

        Returns:
            The requests to preempt for it; None if it gets nothing, and none is preempted.
        """
        victims: list[Request] | None = []
        if self.slots < slots or self.blocks < blocks:
            ids = match.block_ids if match else ()
            victims = self._victims(request, slots, blocks, frozenset(chain.from_iterable(ids)))
        if victims is None:
            return None
        self.slots -= slots
        self.blocks -= blocks
        self._reserved.append((request.tenant, slots, blocks))
        return victims

    def _victims(
        self, request: Request, slots: int, blocks: int, matched: frozenset[int]
    ) -> list[Request] | None:
        if request.num_preemptions:
            return None
        usage = self._measure()
        before = self._running, self._dropped.copy(), self.slots, self.blocks
        victims: list[Request] = []
        while self.slots < slots or self.blocks < blocks:
            victim = self._victim(request, slots, blocks, usage)
            if victim is None:
                self._running, self._dropped, self.slots, self.blocks = before
                for restored in victims:
                    usage.add(restored, 1)
                return None
            victims.append(victim)
            self._running = [r for r in self._running if r is not victim]
            usage.add(victim, -1)
            self.slots += 1
            self.blocks += self._freed(victim, matched)
        return victims

    def _measure(self) -> TenantUsage:
        if self._usage is None:
            self._usage = self.shares.usage(self._running)
        for tenant, slots, blocks in self._reserved:
            self._usage.slots[tenant] += slots
            self._usage.blocks[tenant] += blocks
        self._reserved.clear()
        return self._usage

    def _victim(
        self, request: Request, slots: int, blocks: int, usage: TenantUsage
    ) -> Request | None:
        shares = self.shares
        candidates = [
            r for r in self._running if r.tenant != request.tenant and r not in shares.newcomers
        ]
        if not candidates:
            return None
        tenant = max({r.tenant: None for r in candidates}, key=usage.share)
        victim = self.shares.policy.cheapest([r for r in candidates if r.tenant == tenant])
        fair = 1 / shares.num_active
        if request in shares.newcomers:
            return victim if usage.share(tenant) > fair else None
        if shares.served(request) > shares.served(victim):
            return None
        rest = usage.share(tenant, -1, -self.shares.kv.num_allocated(victim))
        enough = max(fair, 2 * usage.share(request.tenant, slots, blocks))
        return victim if rest >= enough else None

    def _freed(self, victim: Request, matched: frozenset[int]) -> int:
        """Return how many more blocks are free without the victim. Blocks that the taker matches do
        not count, since the taker will use them."""
        refs = self.shares.kv.pool.ref_counts
        freed = 0
        for ids in victim.block_ids:
            for block in ids:
                if block != NULL_BLOCK:
                    self._dropped[block] += 1
                    freed += self._dropped[block] == refs[block] and block not in matched
        return freed
