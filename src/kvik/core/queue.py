"""Requests that wait: for blocks, in the policy's order, and for their deadlines."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from kvik.core.types import Request
from kvik.errors import CapacityError


def _order(request: Request) -> tuple[float, int]:
    return request.order


def _take(requests: list[Request], request: Request) -> None:
    i = bisect_left(requests, request.order, key=_order)
    if i == len(requests) or requests[i] is not request:
        raise RuntimeError(f"request {request.key} is not in the queue")
    del requests[i]


class WaitingQueue:
    """Waiting requests, sorted by `order`. Bounded, so that overload is refused on arrival."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0  # prompt tokens of everything in the queue
        self.by_tenant: dict[str, list[Request]] = {}  # the same requests, by tenant
        self._requests: list[Request] = []

    def check_capacity(self, count: int, num_tokens: int) -> None:
        """Raise `CapacityError` if `count` requests of `num_tokens` prompt tokens in all exceed a
        limit."""
        if len(self._requests) + count > self.max_requests:
            raise CapacityError(
                "max_queued_requests",
                f"the queue is full ({len(self._requests)} of {self.max_requests}); retry later",
            )
        if self._requests and self.num_tokens + num_tokens > self.max_tokens:
            raise CapacityError(
                "max_queued_tokens",
                f"the queue holds {self.num_tokens} of {self.max_tokens} tokens; retry later",
            )

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)
        insort(self.by_tenant.setdefault(request.tenant, []), request, key=_order)
        self.num_tokens += request.num_prompt_tokens

    def remove(self, request: Request) -> None:
        _take(self._requests, request)
        of_tenant = self.by_tenant[request.tenant]
        _take(of_tenant, request)
        if not of_tenant:
            del self.by_tenant[request.tenant]
        self.num_tokens -= request.num_prompt_tokens

    def snapshot(self) -> list[Request]:
        return self._requests[:]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


# Deadlines: requests that must be done by a time, and those that no longer can.
#
# A request whose deadline has passed is ended. One that cannot reach its first token, or its
# `min_tokens`, in time is ended as soon as that is certain, so that others get its compute time. It
# is certain if even `HURRY` times the least time it needs would be too long. The least time assumes
# that nothing delays it and every step is as fast as the fastest recent one (`StepClock.at_least`).

HURRY = 0.75  # nearer to 1: requests end earlier, including some that would have met the deadline


class Deadlines:
    """A heap of the times at which to check each request with a deadline again."""

    def __init__(self) -> None:
        self._checks: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._checks)

    def add(self, request: Request, now: float, num_served: int) -> None:
        """Watch a request if it has a deadline. `num_served`: requests in the scheduler."""
        if request.deadline is None:
            return
        heappush(self._checks, (now, request.serial, request))
        if len(self._checks) > 64 + 2 * num_served:
            # Most ended long before their deadlines: keep only what is still served.
            self._checks = [check for check in self._checks if not check[2].finished]
            heapify(self._checks)

    def next_check(self) -> float | None:
        """Return when `late` may next find something, if nothing else happens before."""
        return self._checks[0][0] if self._checks else None

    def late(self, now: float, seconds_needed: Callable[[Request], float]) -> list[Request]:
        """Remove and return the requests that are past their deadline or cannot meet it.

        Args:
            seconds_needed: returns the least time in which a request can reach a useful answer.
        """
        late = []
        checks = self._checks
        while checks and (checks[0][0] <= now or checks[0][2].finished):
            request = heappop(checks)[2]
            if request.finished or request.deadline is None:
                continue
            last = request.deadline - HURRY * seconds_needed(request)
            if last <= now:
                late.append(request)
            else:
                heappush(checks, (last, request.serial, request))
        return late
