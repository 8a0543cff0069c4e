"""Requests that wait for blocks, in the policy's order, within the admission limits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

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
    """A sorted list. Bounded, so that overload is refused at the door and not by running out."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0  # prompt tokens of everything in the queue
        self.by_tenant: dict[str, list[Request]] = {}  # the same, for those that have some
        self._requests: list[Request] = []

    def check_room(self, count: int, num_tokens: int) -> None:
        """Refuse `count` requests of `num_tokens` prompt tokens in all if a limit is reached."""
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
