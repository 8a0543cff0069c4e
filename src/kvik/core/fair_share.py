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

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush

from kvik.core.types import Request

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
