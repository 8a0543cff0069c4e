"""One row of the route table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """Who answers a method on a path, and what `/openapi.json` says of it.

    Attributes:
        path: as in Starlette: "/v1/models/{model:path}" puts `model` into `request.path_params`.
        handler: takes the request, gives the answer. It may raise any `KvikError`.
        method: GET also serves HEAD.
        open: served without an API key. Whatever is not said to be open needs one.
        operator: shows how all callers use the server. Where there are keys it needs that of an
            administrator, and it is served while the server stops.
        body: what `read_body` decodes; None: there is none.
        answer: what a JSON answer looks like, where it is described.
        note: what it is for, in one sentence.
    """

    path: str
    handler: Handler
    method: str = "POST"
    open: bool = False
    operator: bool = False
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    note: str = ""
