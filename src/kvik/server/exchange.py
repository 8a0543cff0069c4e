"""One request and its answer: what the edge knows of it, for the handler."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from kvik.server.body_budget import BodyBudget
from kvik.server.keys import ANYBODY, Caller

SCOPE_KEY = "kvik.exchange"
CLOSE_EXTENSION = "kvik.close"  # in the scope: breaks the connection, whatever waits to be sent
MAX_TRACE_PARENT = 128  # characters; those that are known have 55


@dataclass(slots=True)
class Exchange:
    """Attributes:
    request_id: ours, random; also the header `x-kvik-request-id`.
    caller: who asks; set before a handler runs.
    budget: bounds of the bodies that are being read.
    ignored_fields: of the body, which no one here knows; told in `x-kvik-ignored-fields`.
    """

    request_id: str
    budget: BodyBudget
    caller: Caller = ANYBODY
    ignored_fields: list[str] = field(default_factory=list)


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope[SCOPE_KEY]
    return exchange


def caller_of(request: Request) -> Caller:
    return exchange_of(request).caller


def trace_parent_of(request: Request) -> str | None:
    """The caller's trace (W3C Trace Context), if it names one; not checked but for its length."""
    header = request.headers.get("traceparent")
    return header if header and len(header) <= MAX_TRACE_PARENT else None


def request_id_of(request: Request) -> str:
    return exchange_of(request).request_id
