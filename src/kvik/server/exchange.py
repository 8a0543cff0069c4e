"""One request and its answer: what the edge knows of it, for the handler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from kvik.errors import OverloadError
from kvik.server.keys import ANONYMOUS, Caller


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Attributes:
    max_bytes: of one body.
    seconds: until it is there completely.
    max_values: of JSON in it; each takes many times its text in memory.
    max_keys: of its objects; there are at most as many arrays and objects.
    max_depth: of nested arrays and objects.
    small_bytes: up to here a body is not counted, and decoded at once.
    total_bytes: of all larger bodies that are being read at the same time.
    """

    max_bytes: int = 32 << 20
    seconds: float = 30.0
    max_values: int = 1 << 20
    max_keys: int = 1 << 17
    max_depth: int = 64
    small_bytes: int = 64 << 10
    total_bytes: int = 256 << 20


DEFAULT_LIMITS = BodyLimits()


class BodyBudget:
    """Bytes of large bodies in memory, so that many of them together cannot fill it."""

    def __init__(self, limits: BodyLimits) -> None:
        self.limits = limits
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_bytes


class BodyShare:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """The body has `num_bytes` now.

        Raises:
            OverloadError: all bodies together are too large.
        """
        budget = self._budget
        if num_bytes <= budget.limits.small_bytes:
            return
        if budget.num_bytes - self.num_bytes + num_bytes > budget.limits.total_bytes:
            raise OverloadError("body", "too many large requests at once", 1.0, own=False)
        budget.num_bytes += num_bytes - self.num_bytes
        self.num_bytes = num_bytes


SCOPE_KEY = "kvik.exchange"
CLOSE_EXTENSION = "kvik.close"  # in the scope: breaks the connection, whatever waits to be sent
MAX_TRACE_PARENT = 128  # characters; those that are known have 55


@dataclass(slots=True)
class RequestContext:
    """Attributes:
    request_id: ours, random; also the header `x-kvik-request-id`.
    caller: who asks; set before a handler runs.
    budget: bounds of the bodies that are being read.
    ignored_fields: of the body, which no one here knows; told in `x-kvik-ignored-fields`.
    """

    request_id: str
    budget: BodyBudget
    caller: Caller = ANONYMOUS
    ignored_fields: list[str] = field(default_factory=list)


def context_of(request: Request) -> RequestContext:
    exchange: RequestContext = request.scope[SCOPE_KEY]
    return exchange


def caller_of(request: Request) -> Caller:
    return context_of(request).caller


def trace_parent_of(request: Request) -> str | None:
    """The caller's trace (W3C Trace Context), if it names one; not checked but for its length."""
    header = request.headers.get("traceparent")
    return header if header and len(header) <= MAX_TRACE_PARENT else None


def request_id_of(request: Request) -> str:
    return context_of(request).request_id
