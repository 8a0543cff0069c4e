"""Method and path -> route. One table decides for all: who answers, and whether a key is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.convertors import Convertor
from starlette.routing import compile_path

from kvik.server.route import Route

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
