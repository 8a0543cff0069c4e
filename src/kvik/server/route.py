"""One row of the route table."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.convertors import Convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

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


Found = tuple[Route | None, Mapping[str, Any], Sequence[str]]


class RouteTable:
    """Paths are compared to the letter: another case or a doubled slash is another path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[
            tuple[re.Pattern[str], dict[str, Convertor[Any]], dict[str, Route]]
        ] = []
        patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            rows = patterns if "{" in route.path else self._exact
            methods = rows.setdefault(route.path, {})
            if route.method in methods:
                raise ValueError(f"{route.method} {route.path} has two routes")
            methods[route.method] = route
        for methods in (*self._exact.values(), *patterns.values()):
            if "GET" in methods:
                methods.setdefault("HEAD", methods["GET"])  # the protocol leaves out the body
        for path, methods in patterns.items():
            regex, _, convertors = compile_path(path)
            self._patterns.append((regex, convertors, methods))

    def find(self, method: str, path: str) -> Found:
        """The route and what its path holds; without one, the methods that the path takes."""
        methods = self._exact.get(path)
        params: dict[str, Any] = {}
        if methods is None:
            for regex, convertors, candidates in self._patterns:
                match = regex.fullmatch(path)
                if match:
                    methods = candidates
                    params = {k: convertors[k].convert(v) for k, v in match.groupdict().items()}
                    break
        if methods is None:
            return None, {}, ()
        return methods.get(method), params, sorted(methods)
