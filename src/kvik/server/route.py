"""Routes, and the context of a request that a handler sees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from kvik.errors import OverloadError
from kvik.server.keys import ANONYMOUS, Caller

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of a method on a path, and its description for `/openapi.json`.

    Attributes:
        path: as in Starlette: "/v1/models/{model:path}" sets `request.path_params["model"]`.
        handler: takes the request and returns the response. It may raise any `KvikError`.
        method: GET also serves HEAD.
        open: served without an API key.
        operator: shows how all callers use the server. Where there are keys it needs an
            administrator's, and it is served while the server stops.
        body: what `read_body` decodes; None: no body.
        answer: the JSON of a response, if it is described.
        note: one sentence for the documentation.
    """

    path: str
    handler: Handler
    method: str = "POST"
    open: bool = False
    operator: bool = False
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of the bodies of requests.

    Attributes:
        max_bytes: of one body.
        seconds: until it is complete.
        max_values: JSON values in it; each takes many times its text in memory.
        max_keys: keys of its objects, and at most as many arrays and objects.
        max_depth: of nested arrays and objects.
        small_bytes: a body up to this size is not counted, and is decoded at once.
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
    """Counts the bytes of large bodies, so that many of them cannot fill the memory."""

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
    """The part of the budget that one body takes."""

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


SCOPE_KEY = "kvik.context"
# Of the scope, set by the connection: a function that breaks it, whatever waits to be sent, and one
# that sets the seconds for which a response may wait for its reader.
CLOSE_EXTENSION, UNREAD_EXTENSION = "kvik.close", "kvik.unread"
MAX_TRACE_PARENT = 128  # characters; known versions have 55


@dataclass(slots=True)
class RequestContext:
    """What the application knows of a request.

    Attributes:
        request_id: random; also the header `x-kvik-request-id`.
        caller: set before a handler runs.
        budget: for reading the body.
        ignored_fields: unknown fields of the body; also the header `x-kvik-ignored-fields`.
    """

    request_id: str
    budget: BodyBudget
    caller: Caller = ANONYMOUS
    ignored_fields: list[str] = field(default_factory=list)


def context_of(request: Request) -> RequestContext:
    """The context of a request that came through the application."""
    context: RequestContext = request.scope[SCOPE_KEY]
    return context


def caller_of(request: Request) -> Caller:
    """Who sent a request."""
    return context_of(request).caller


def trace_parent_of(request: Request) -> str | None:
    """The caller's trace (W3C Trace Context), if it names one; only its length is checked."""
    header = request.headers.get("traceparent")
    return header if header and len(header) <= MAX_TRACE_PARENT else None


def break_connection(scope: Scope) -> None:
    """Break the connection of a response that cannot be completed."""
    close = scope.get("extensions", {}).get(CLOSE_EXTENSION)
    if close is not None:
        close()


def limit_unread(scope: Scope, seconds: float) -> None:
    """Break the connection if the client does not read the response for this long."""
    limit = scope.get("extensions", {}).get(UNREAD_EXTENSION)
    if limit is not None:
        limit(seconds)
