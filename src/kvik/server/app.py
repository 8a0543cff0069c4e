"""The edge of the server: every request passes here once on its way in, and its answer out.

In this order: the request gets its id, the Host and the origin are checked, the route is found, the
caller's key is checked unless the route is open, and only then the handler runs and may read the
body. A path or method that nobody answers needs a key too, so that a stranger learns nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvik.config.errors import KvikError, UnavailableError
from kvik.server.access_log import AccessLog
from kvik.server.answer import Answer
from kvik.server.body_budget import DEFAULT_LIMITS, BodyBudget, BodyLimits
from kvik.server.drain import Drain
from kvik.server.errors import HttpError, describe, in_messages
from kvik.server.escape import escaped_traceback
from kvik.server.exchange import CLOSE_EXTENSION, SCOPE_KEY, Exchange
from kvik.server.guards import Hosts, Origins
from kvik.server.keys import Caller, Keys
from kvik.server.parts import Parts
from kvik.server.route import Route
from kvik.server.route_table import RouteTable

log = logging.getLogger(__name__)

NO_CREDENTIALS = {"www-authenticate": 'Bearer realm="kvik"'}


@dataclass(frozen=True, slots=True)
class Edge:
    """How an app meets the world.

    Attributes:
        host: it listens on; "" is every address.
        allowed_host: names under which it may be reached, beside those that are always known.
        cors_origin: pages that may use it.
        admin: every route that is not open needs the key of an administrator.
    """

    host: str = ""
    allowed_host: Sequence[str] = ()
    cors_origin: Sequence[str] = ()
    admin: bool = False
    limits: BodyLimits = DEFAULT_LIMITS


def make_app(parts: Parts, routes: Sequence[Route], limits: BodyLimits = DEFAULT_LIMITS) -> App:
    """What everybody sees of a server, on its main port."""
    config = parts.config
    edge = Edge(config.host, config.allowed_host, config.cors_origin, limits=limits)
    return App(routes, parts.keys, parts.drain, edge)


class App:
    """An ASGI application over a table of routes."""

    def __init__(self, routes: Sequence[Route], keys: Keys, drain: Drain, edge: Edge) -> None:
        self.routes = tuple(routes)
        self._table = RouteTable(routes)
        self._keys = keys
        self._drain = drain
        self._edge = edge
        self._hosts = Hosts(edge.host, edge.allowed_host, keyed=keys.needed)
        self._origins = Origins(edge.cors_origin)
        self._budget = BodyBudget(edge.limits)
        self._log = AccessLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # none is served: refused before it is open
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http"
        exchange = Exchange(secrets.token_hex(16), self._budget)
        scope[SCOPE_KEY] = exchange
        request = Request(scope, receive)
        theirs = request.headers.get("x-request-id")
        answer = Answer(send, exchange, theirs, self._added_headers(request, exchange))
        start = time.perf_counter()
        self._drain.enter()
        try:
            await self._answer(request, exchange, answer)
        finally:
            self._drain.leave()
            seconds = time.perf_counter() - start
            self._log.add(request, exchange, answer, seconds)

    async def _answer(self, request: Request, exchange: Exchange, answer: Answer) -> None:
        try:
            response = await self._respond(request, exchange)
            await response(request.scope, request.receive, answer.send)
        except ClientDisconnect:
            pass  # nobody is left to tell
        except Exception as error:
            told = describe(error)
            if not isinstance(error, KvikError):
                _log_failure(exchange, error)
            if not answer.started:
                response = told.response(anthropic=in_messages(request.scope["path"]))
                await response(request.scope, request.receive, answer.send)
                return
            # What came so far is no whole answer: the client must not take it for one.
            close = request.scope.get("extensions", {}).get(CLOSE_EXTENSION)
            if close is not None:
                close()

    async def _respond(self, request: Request, exchange: Exchange) -> Response:
        headers = request.headers
        self._hosts.check(headers, request.scope["http_version"])
        if request.method == "OPTIONS":
            allowed = self._origins.preflight(headers)
            if allowed is not None:
                return Response(status_code=204, headers=allowed)
        route, params, methods = self._table.find(request.method, request.scope["path"])
        if route is None or not route.open:
            self._origins.check(headers)
            exchange.caller = self._authenticate(request, route)
        if route is None:
            raise self._no_route(request.scope["path"], methods)
        if self._drain.started and not (route.open or route.operator):
            raise UnavailableError("server", "is being stopped")
        request.scope["path_params"] = params
        return await route.handler(request)

    def _no_route(self, path: str, methods: Sequence[str]) -> HttpError:
        if methods:
            allowed = ", ".join(methods)
            message = f"this path takes {allowed}"
            return HttpError(405, message, code="method_not_allowed", headers={"allow": allowed})
        message = "there is nothing at this path"
        if self._table.find("", f"/v1{path}")[2]:
            message += "; there is below /v1, which belongs to the base URL that a client is given"
        return HttpError(404, message, code="not_found")

    def _authenticate(self, request: Request, route: Route | None) -> Caller:
        caller = self._keys.caller(request.headers)
        if caller is None:
            message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise HttpError(401, message, code="invalid_api_key", headers=NO_CREDENTIALS)
        operator = self._keys.needed and route is not None and route.operator
        if (operator or self._edge.admin) and not caller.is_admin:
            raise HttpError(403, "the key of an administrator is needed", code="admin_key_needed")
        return caller

    def _added_headers(self, request: Request, exchange: Exchange) -> Mapping[str, str]:
        headers = dict(self._origins.headers(request.headers))
        if in_messages(request.scope["path"]):
            headers["request-id"] = exchange.request_id
        return headers


def _log_failure(exchange: Exchange, error: Exception) -> None:
    log.error("request %s failed:\n%s", exchange.request_id, escaped_traceback(error))
