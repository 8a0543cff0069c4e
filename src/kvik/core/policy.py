"""Who is served first, how much of it at once, who gives way, and when a batch may start.

A policy is handed to the one scheduler; continuous, static and dynamic batching differ only here.
Smaller `order` keys are served first. Keys never change while a request is in the system, which is
possible even with ageing: "one level more urgent per `ageing` seconds of waiting" orders requests
exactly like the constant key `level * ageing + arrival`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvik.config.check import CHOICES
from kvik.config.config import SchedulerConfig
from kvik.config.errors import ConfigError
from kvik.core.types import Request, RequestStatus


class Policy(Protocol):
    """The seam between the scheduler's mechanism and a service's wishes."""

    def order(self, request: Request, now: float) -> tuple[float, int]:
        """The request's key, asked once when it arrives."""
        ...

    def candidates(self, waiting: list[Request], now: float) -> list[Request]:
        """Waiting requests (sorted by `order`) in the order in which to try them now."""
        ...

    def chunk(self, request: Request, wanted: int, budget: int) -> int:
        """How many of the `wanted` tokens of a prefilling request go into this step."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of the running requests (sorted by `order`) gives up its blocks first."""
        ...

    def admissible(self, waiting: Sequence[Request], num_running: int, now: float) -> int:
        """How many of the first waiting requests (sorted by `order`) may start now."""
        ...

    def wakeup(self, waiting: Sequence[Request], now: float) -> float | None:
        """When to look again if nothing is running and `admissible` said 0."""
        ...


class Fcfs:
    """First come, first served, continuous batching: whoever fits joins at every step."""

    def order(self, request: Request, now: float) -> tuple[float, int]:
        return (request.arrival, request.serial)

    def candidates(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting

    def chunk(self, request: Request, wanted: int, budget: int) -> int:
        return min(wanted, budget)

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def admissible(self, waiting: Sequence[Request], num_running: int, now: float) -> int:
        return len(waiting)

    def wakeup(self, waiting: Sequence[Request], now: float) -> float | None:
        return None


class Priority(Fcfs):
    """Smaller `priority` first; waiting `ageing` seconds is worth one level, so nobody starves."""

    def __init__(self, ageing: float) -> None:
        self.ageing = ageing

    def order(self, request: Request, now: float) -> tuple[float, int]:
        return (request.priority * self.ageing + request.arrival, request.serial)


class ShortestPrefillFirst(Fcfs):
    """Short prompts first: the mean TTFT falls. A thousand tokens weigh like `ageing` seconds of
    waiting, so that a long prompt is overtaken for a bounded time."""

    def __init__(self, ageing: float) -> None:
        self.ageing = ageing

    def order(self, request: Request, now: float) -> tuple[float, int]:
        weight = request.num_prompt_tokens / 1000 * self.ageing
        return (request.arrival + weight, request.serial)


class LongestPrefixMatch(Fcfs):
    """Those with most of their prompt in the prefix cache first, while it is still there (SGLang,
    Zheng et al. 2024, section 3). Only the oldest `lookahead` requests compete, and one that has
    waited `ageing` seconds goes before all others."""

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


class Static(Fcfs):
    """A batch starts when the one before it has ended, and takes no newcomer in meanwhile."""

    def __init__(self, batch_size: int, max_tokens: int) -> None:
        self.batch_size = batch_size
        self.max_tokens = max_tokens

    def admissible(self, waiting: Sequence[Request], num_running: int, now: float) -> int:
        if num_running:
            return _rejoining(waiting, self.batch_size - num_running)
        return _first_batch(waiting, self.batch_size, self.max_tokens)


class Dynamic(Fcfs):
    """A static batch that waits for company: it starts when it is full or its oldest request has
    waited `max_wait` seconds."""

    def __init__(self, batch_size: int, max_tokens: int, max_wait: float) -> None:
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.max_wait = max_wait

    def admissible(self, waiting: Sequence[Request], num_running: int, now: float) -> int:
        if num_running:
            return _rejoining(waiting, self.batch_size - num_running)
        if not waiting:
            return 0
        count = _first_batch(waiting, self.batch_size, self.max_tokens)
        full = count == self.batch_size or count < len(waiting)
        return count if full or now >= self._due(waiting) else 0

    def wakeup(self, waiting: Sequence[Request], now: float) -> float | None:
        return self._due(waiting) if waiting else None

    def _due(self, waiting: Sequence[Request]) -> float:
        return waiting[0].arrival + self.max_wait


def _rejoining(waiting: Sequence[Request], room: int) -> int:
    """Members of the batch under way that had to wait: preempted ones, and siblings of a request
    that runs, since they need its prompt."""
    count = 0
    for request in waiting[: max(0, room)]:
        leader = request.leader
        sibling = leader is not None and leader.status is RequestStatus.RUNNING
        if not sibling and request.status is not RequestStatus.PREEMPTED:
            break
        count += 1
    return count


def _first_batch(waiting: Sequence[Request], batch_size: int, max_tokens: int) -> int:
    """As many requests as batch size and token cap allow, but at least one."""
    tokens = count = 0
    for request in waiting[:batch_size]:
        tokens += len(request.token_ids)
        if count and tokens > max_tokens:
            break
        count += 1
    return count


POLICIES = CHOICES["policy"]


def make_policy(config: SchedulerConfig, matched: Callable[[Request], int]) -> Policy:
    """The policy named in the config. `matched` tells how much of a prompt is cached."""
    batch_size = min(config.batch_size, config.max_num_seqs)
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority(config.ageing)
        case "shortest-prefill-first":
            return ShortestPrefillFirst(config.ageing)
        case "longest-prefix-match":
            return LongestPrefixMatch(config.ageing, matched)
        case "static":
            return Static(batch_size, config.max_num_batched_tokens)
        case "dynamic":
            return Dynamic(batch_size, config.max_num_batched_tokens, config.max_wait)
    raise ConfigError("policy", f"must be one of {', '.join(POLICIES)}, not {config.policy!r}")
