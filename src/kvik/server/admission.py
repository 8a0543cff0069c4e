"""Admission: limits on queued work, shared fairly by the tenants."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvik.core.sampling_params import SamplingParams
from kvik.engine.client import EngineClient
from kvik.errors import CapacityError, OverloadError

FREE_MULTIPLE = 8  # a tenant may take this many times the free part of the queue
MIN_RETRY, MAX_RETRY = 1.0, 60.0  # seconds
HALF_LIFE = 10.0  # busy seconds after which the weight of a measurement is halved


@dataclass(slots=True)
class _QueueSize:
    requests: int = 0
    tokens: int = 0  # of prompts


class Admission:
    """Counts the requests that wait for their first token, and refuses requests beyond the limits.

    Where several tenants may be active, the share of one is bounded by `FREE_MULTIPLE` times the
    free part of the queue (dynamic thresholds, Choudhury and Hahne 1998): a single tenant gets
    nearly everything, and a new tenant always finds room, even after a flood.

    Args:
        max_requests, max_tokens: limits of the queue. A request in an empty queue may have any
            number of tokens.
        shared: whether there may be more than one tenant.
        clock: seconds.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, *, shared: bool, clock: Callable[[], float]
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._shared = shared
        self._clock = clock
        self._all = _QueueSize()
        self._tenants: dict[str, _QueueSize] = {}  # tenants with waiting requests
        self._start_rate = StartRate(clock())

    def check(self, tenant: str, requests: int, tokens: int = 0) -> None:
        """Refuse requests that do not fit into the queue now.

        Raises:
            CapacityError: they never fit.
            OverloadError: the queue, or the tenant's share of it, is full; `of_caller` says
                which.
        """
        if requests > self._max_requests:
            limit = self._max_requests
            raise CapacityError(
                "n", f"counts as {requests} requests, and the queue holds at most {limit}"
            )
        free = _QueueSize(
            self._max_requests - self._all.requests, self._max_tokens - self._all.tokens
        )
        if requests > free.requests or (self._all.requests and tokens > free.tokens):
            raise self._full("the queue", self._all, free, requests, tokens, of_caller=False)
        mine = self._tenants.get(tenant)
        if mine is None or not self._shared:
            return
        free_of_tenant = _QueueSize(
            FREE_MULTIPLE * (free.requests - requests) - mine.requests,
            FREE_MULTIPLE * (free.tokens - tokens) - mine.tokens,
        )
        if requests > free_of_tenant.requests or tokens > free_of_tenant.tokens:
            raise self._full(
                "your share of the queue", mine, free_of_tenant, requests, tokens, of_caller=True
            )

    def check_deadline(self, tenant: str, deadline: float) -> None:
        """Raise OverloadError if the first token would miss a deadline, at the measured rate."""
        mine = self._tenants.get(tenant, _QueueSize())
        active = len(self._tenants) + (tenant not in self._tenants)  # served alternately
        ahead = self._start_rate.estimate(
            min(self._all.requests, mine.requests * active),
            min(self._all.tokens, mine.tokens * active),
        )
        seconds_left = deadline - self._clock()
        if ahead is not None and ahead > seconds_left:
            raise OverloadError(
                "deadline_ms",
                f"cannot be met: {max(0.0, seconds_left) * 1e3:.0f} ms are left, and the requests "
                f"before this one take about {ahead * 1e3:.0f} ms",
                _retry(ahead - seconds_left),
                of_caller=False,
            )

    def admit(self, tenant: str, requests: int, tokens: int) -> Reservation:
        """Count `requests` siblings with `tokens` prompt tokens each, until they start or end.
        Raises OverloadError as `check`."""
        self.check(tenant, requests, requests * tokens)
        self._change(tenant, requests, tokens)
        return Reservation(self, tenant, requests, tokens)

    @property
    def fill(self) -> float:
        """Fill level of the queue, 0 to 1."""
        return max(self._all.requests / self._max_requests, self._all.tokens / self._max_tokens)

    @property
    def num_waiting(self) -> int:
        return self._all.requests

    @property
    def waiting_tokens(self) -> int:
        return self._all.tokens

    def _change(self, tenant: str, requests: int, tokens: int, started: bool = False) -> None:
        self._start_rate.advance(self._clock(), busy=self._all.requests > 0)
        if started:
            self._start_rate.add(-requests, -requests * tokens)
        mine = self._tenants.setdefault(tenant, _QueueSize())
        for waiting in (self._all, mine):
            waiting.requests += requests
            waiting.tokens += requests * tokens
        if not mine.requests:
            del self._tenants[tenant]

    def _full(
        self,
        label: str,
        waiting: _QueueSize,
        free: _QueueSize,
        requests: int,
        tokens: int,
        *,
        of_caller: bool,
    ) -> OverloadError:
        seconds = self._start_rate.estimate(
            max(0, requests - free.requests), max(0, tokens - free.tokens), cautious=True
        )
        return OverloadError(
            "queue",
            f"{label} is full: {waiting.requests} requests of {waiting.tokens} tokens wait; "
            "retry later",
            _retry(seconds or 0.0),
            of_caller=of_caller,
        )


class Reservation:
    """The places of one request in the queue. Each of its siblings leaves at most once."""

    def __init__(self, admission: Admission, tenant: str, requests: int, tokens: int) -> None:
        self._admission = admission
        self._tenant = tenant
        self._waiting = set(range(requests))
        self._tokens = tokens

    def started(self, index: int) -> None:
        """Record that a sibling has its first token, or finished without one (prompt only)."""
        if index in self._waiting:
            self._waiting.discard(index)
            self._admission._change(self._tenant, -1, self._tokens, started=True)

    def release(self) -> None:
        """Record that the request ended, successfully or not."""
        if self._waiting:
            self._admission._change(self._tenant, -len(self._waiting), self._tokens)
            self._waiting.clear()


class StartRate:
    """Measures how fast queued work starts, during the time in which the queue is not empty.

    The weight of older seconds halves every `HALF_LIFE`.
    """

    def __init__(self, now: float) -> None:
        self._at = now
        self._seconds = self._requests = self._tokens = 0.0

    def advance(self, now: float, *, busy: bool) -> None:
        """Account for the time until `now`; `busy`: whether the queue was not empty."""
        if busy and now > self._at:
            decay = 0.5 ** ((now - self._at) / HALF_LIFE)
            self._requests *= decay
            self._tokens *= decay
            self._seconds = self._seconds * decay + (now - self._at)
        self._at = now

    def add(self, requests: int, tokens: int) -> None:
        """Count started requests and tokens."""
        self._requests += requests
        self._tokens += tokens

    def estimate(self, requests: float, tokens: float, *, cautious: bool = False) -> float | None:
        """Return the seconds until this much work has started; None without measurements.

        Requests with short prompts are slow per token, and requests with long ones per request, so
        one of the two estimates is too high. This returns the smaller one, or with `cautious` the
        larger.
        """
        if not self._requests or not self._tokens:
            return None
        estimates = (
            requests * self._seconds / self._requests,
            tokens * self._seconds / self._tokens,
        )
        return max(estimates) if cautious else min(estimates)


def _retry(seconds: float) -> float:
    return float(math.ceil(min(max(seconds, MIN_RETRY), MAX_RETRY)))


PRESSURE = 0.75  # load of the server from which the operator's limit of answers applies


def shortened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """Return parameters with at most `max_tokens`: the same object if nothing changes."""
    cap = max(max_tokens, params.min_tokens)
    if params.max_tokens is not None and params.max_tokens <= cap:
        return params
    return replace(params, max_tokens=cap)


def pressure(queue_fill: float, kv_usage: float, *, waiting: bool) -> float:
    """Return the load of the server, 0 to 1. A full KV cache counts only if requests wait."""
    return max(queue_fill, kv_usage if waiting else 0.0)


class KVUsage:
    """The share of KV blocks in use, read from the engine at most once a second."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._asked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._last = 0.0

    def read(self) -> float:
        """Return the last known share, and start an update for the next call."""
        now = time.monotonic()
        if now - self._asked_at >= 1.0 and (self._task is None or self._task.done()):
            self._asked_at = now
            self._task = asyncio.get_running_loop().create_task(self._query())
        return self._last

    async def _query(self) -> None:
        self._last = (await self._engine.stats()).kv_usage
