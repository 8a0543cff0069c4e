"""Scheduling policies: order of requests, preemption between tenants, and when a batch starts.

There is one scheduler; continuous, static and dynamic batching differ only in their policies.
Smaller `order` keys are served first. Keys never change while a request is in the system, which is
possible even with ageing: "one level more urgent per `ageing` seconds of waiting" orders requests
exactly like the constant key `level * ageing + arrival`.

`fair_share` decides between the requests of different tenants, a policy between requests of the
same tenant. If requests are served in batches, fair shares decide which are in the next batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from kvik.core.config import POLICIES, SchedulerConfig
from kvik.core.types import Request, RequestStatus
from kvik.errors import ConfigError


class Policy:
    """Order of requests; the scheduler does the rest.

    This is first come, first served with continuous batching; the other policies override parts.
    """

    batches = False  # no request joins a running batch

    def order(self, request: Request) -> tuple[float, int]:
        """Return the request's key; called once, when it arrives."""
        return (request.arrival, request.serial)

    def candidates(self, waiting: list[Request], now: float) -> list[Request]:
        """Return waiting requests (given sorted by `order`) in the order in which to try them."""
        return waiting

    def cheapest(self, running: Sequence[Request]) -> Request:
        """Return which of a tenant's running requests (sorted by `order`) to preempt for another
        tenant: the one that loses the fewest tokens; of equals the youngest."""
        return min(reversed(running), key=lambda r: r.num_computed_tokens)

    def admissible(
        self, waiting: list[Request], num_running: int, now: float, *, more: bool
    ) -> list[Request]:
        """Return which of the waiting requests may start now.

        Args:
            waiting: sorted by `order`, or by fair shares between tenants; requests that belong to
                the running batch come first.
            more: whether more requests may arrive.
        """
        return waiting

    def wakeup(self, waiting: Sequence[Request], now: float) -> float | None:
        """Return when to plan again if nothing is running and nothing was `admissible`; infinity:
        when another request arrives."""
        return None


class Priority(Policy):
    """Smaller `priority` first; `ageing` seconds of waiting count as one level, so that no request
    starves."""

    def __init__(self, ageing: float) -> None:
        self.ageing = ageing

    def order(self, request: Request) -> tuple[float, int]:
        return (request.priority * self.ageing + request.arrival, request.serial)

    def cheapest(self, running: Sequence[Request]) -> Request:
        least_urgent = max(r.priority for r in running)
        return super().cheapest([r for r in running if r.priority == least_urgent])


class ShortestPrefillFirst(Policy):
    """Short prompts first, for a lower mean TTFT. A thousand tokens count as `ageing` seconds of
    waiting, so that a long prompt is overtaken only for a bounded time."""

    def __init__(self, ageing: float) -> None:
        self.ageing = ageing

    def order(self, request: Request) -> tuple[float, int]:
        weight = request.num_prompt_tokens / 1000 * self.ageing
        return (request.arrival + weight, request.serial)


class LongestPrefixMatch(Policy):
    """Requests with most of their prompt in the prefix cache first, while it is still there
    (SGLang, Zheng et al. 2024, section 3). Only the oldest `lookahead` requests are reordered, and
    one that has waited `ageing` seconds goes before all others."""

    lookahead = 64

    def __init__(self, ageing: float, matched: Callable[[Request], int]) -> None:
        self.ageing = ageing
        self.matched = matched

    def candidates(self, waiting: list[Request], now: float) -> list[Request]:
        def key(request: Request) -> tuple[int, float, int]:
            if now - request.arrival >= self.ageing:
                return (0, *request.order)
            return (1, -self.matched(request), request.serial)

        return sorted(waiting[: self.lookahead], key=key) + waiting[self.lookahead :]


class Batches(Policy):
    """A batch starts when the previous one has ended; no request joins it.

    It waits until it is full, or its oldest request has waited `max_wait` seconds, or no more
    requests are expected. It waits less if the queue is more than half full, and not at all if the
    queue is full, when more requests would be refused anyway.

    Static batching waits long, dynamic batching briefly (`batch_wait`).
    """

    batches = True

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.batch_size = min(config.batch_size, config.max_num_seqs)
        self.max_wait = batch_wait(config)

    def admissible(
        self, waiting: list[Request], num_running: int, now: float, *, more: bool
    ) -> list[Request]:
        members = _rejoining(waiting, self.batch_size - num_running)
        if num_running or members or not waiting:
            return members
        batch = _first_batch(waiting, self.batch_size, self.config.max_num_batched_tokens)
        full = len(batch) == self.batch_size or len(batch) < len(waiting)
        return batch if full or not more or now >= self._due(waiting) else []

    def wakeup(self, waiting: Sequence[Request], now: float) -> float | None:
        if not waiting or _rejoining(waiting, self.batch_size):
            return None
        return self._due(waiting)

    def _due(self, waiting: Sequence[Request]) -> float:
        tokens, limits = sum(r.num_prompt_tokens for r in waiting), self.config
        fill = max(len(waiting) / limits.max_queued_requests, tokens / limits.max_queued_tokens)
        patience = min(1.0, 2.0 * max(0.0, 1.0 - fill))
        return min(r.arrival for r in waiting) + (self.max_wait * patience if patience else 0.0)


def _rejoining(waiting: Sequence[Request], limit: int) -> list[Request]:
    """Return waiting members of the running batch: preempted requests, those that wait for a prefix
    computed by a request of the batch, and those that continue one."""
    members: list[Request] = []
    for request in waiting[: max(0, limit)]:
        if not rejoins(request):
            break
        members.append(request)
    return members


def rejoins(request: Request) -> bool:
    """Return whether a waiting request belongs to the running batch."""
    leader = request.leader
    sibling = leader is not None and leader.status is RequestStatus.RUNNING
    preempted = request.status is RequestStatus.PREEMPTED
    return sibling or request.awaits_prefix or preempted or request.continues_beam


def _first_batch(waiting: Sequence[Request], batch_size: int, max_tokens: int) -> list[Request]:
    """Return as many requests as batch size and token limit allow, but at least one."""
    batch: list[Request] = []
    tokens = 0
    for request in waiting[:batch_size]:
        tokens += len(request.token_ids)
        if batch and tokens > max_tokens:
            break
        batch.append(request)
    return batch


def batch_wait(config: SchedulerConfig) -> float:
    """Return the seconds for which a batch waits to fill; infinity: without limit."""
    if config.policy == "static":
        wait = 5.0 if config.max_wait is None else config.max_wait
        return wait or inf
    return 0.05 if config.max_wait is None else config.max_wait


def make_policy(config: SchedulerConfig, matched: Callable[[Request], int]) -> Policy:
    """Make the policy named in the config. `matched` returns how many of a request's tokens are in
    the cache."""
    match config.policy:
        case "fcfs":
            return Policy()
        case "priority":
            return Priority(config.ageing)
        case "shortest-prefill-first":
            return ShortestPrefillFirst(config.ageing)
        case "longest-prefix-match":
            return LongestPrefixMatch(config.ageing, matched)
        case "static" | "dynamic":
            return Batches(config)
    raise ConfigError("policy", f"must be one of {', '.join(POLICIES)}, not {config.policy!r}")
