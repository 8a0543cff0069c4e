"""The edge of the server: every request passes here once on its way in, and its answer out.

In this order: the request gets its id, the Host and the origin are checked, the route is found, the
caller's key is checked unless the route is open, and only then the handler runs and may read the
body. A path or method that nobody answers needs a key too, so that a stranger learns nothing.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from kvik.errors import KvikError, UnavailableError
from kvik.server import engine_view, health, native, openapi, playground
from kvik.server.anthropic import messages
from kvik.server.errors import HttpError, describe, escaped, escaped_traceback, in_messages
from kvik.server.exchange import (
    CLOSE_EXTENSION,
    DEFAULT_LIMITS,
    SCOPE_KEY,
    BodyBudget,
    BodyLimits,
    RequestContext,
)
from kvik.server.guards import Hosts, Origins
from kvik.server.keys import Caller, Keys
from kvik.server.metrics import Metrics, RequestMetricsObserver
from kvik.server.openai import chat, completions, embeddings, invocations, models, tokenize
from kvik.server.route import Route, RouteTable
from kvik.server.server import Drain, Server

SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class ResponseSender:
    """Wraps `send` of one request.

    Attributes:
        status: None until it has begun.
        num_bytes: of the body so far.
    """

    def __init__(
        self,
        send: Send,
        exchange: RequestContext,
        request_id: str | None,
        headers: Mapping[str, str],
    ) -> None:
        """Args:
        request_id: what the client calls its request; sent back if it is harmless.
        headers: to add.
        """
        self.status: int | None = None
        self.num_bytes = 0
        self._send = send
        self._exchange = exchange
        theirs = request_id is not None and SAFE_ID.fullmatch(request_id)
        self._echoed = request_id if theirs else exchange.request_id
        self._headers = headers

    @property
    def started(self) -> bool:
        return self.status is not None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self._own_headers()]}
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "date": formatdate(usegmt=True),
            "x-request-id": self._echoed,
            "x-kvik-request-id": self._exchange.request_id,
            **self._headers,
        }
        if self._exchange.ignored_fields:
            headers["x-kvik-ignored-fields"] = ", ".join(self._exchange.ignored_fields)
        return [(name.encode(), str(value).encode("latin-1")) for name, value in headers.items()]


_access_log = logging.getLogger("kvik.access")
PROBES = ("/health", "/ping", "/ready", "/metrics")
MAX_PATH = 200
MAX_REMEMBERED = 256  # unknown fields that are told of once each


class AccessLog:
    def __init__(self) -> None:
        self._ignored: set[str] = set()

    def add(
        self, request: Request, exchange: RequestContext, answer: ResponseSender, seconds: float
    ) -> None:
        """Args:
        seconds: from the request's head to the answer's end.
        """
        # Load balancers ask for the server's health every few seconds.
        dull = request.scope["path"] in PROBES and answer.status == 200
        _access_log.log(
            logging.DEBUG if dull else logging.INFO,
            "%s %s %s %s %.1f ms %d bytes %s",
            exchange.request_id,
            escaped(request.method, 16),
            escaped(request.scope["path"], MAX_PATH),
            answer.status or "unanswered",
            seconds * 1000,
            answer.num_bytes,
            exchange.caller.name,
        )
        for name in exchange.ignored_fields:
            if name not in self._ignored and len(self._ignored) < MAX_REMEMBERED:
                self._ignored.add(name)
                _access_log.warning("the field %s of requests is unknown and ignored", name)


log = logging.getLogger(__name__)
NO_CREDENTIALS = {"www-authenticate": 'Bearer realm="kvik"'}


@dataclass(frozen=True, slots=True)
class AppConfig:
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


def make_app(server: Server, routes: Sequence[Route], limits: BodyLimits = DEFAULT_LIMITS) -> App:
    """What everybody sees of a server, on its main port."""
    config = server.config
    edge = AppConfig(config.host, config.allowed_host, config.cors_origin, limits=limits)
    return App(routes, server.keys, server.drain, edge)


class App:
    """An ASGI application over a table of routes."""

    def __init__(self, routes: Sequence[Route], keys: Keys, drain: Drain, edge: AppConfig) -> None:
        self.routes = tuple(routes)
        self._table = RouteTable(routes)
        self._keys = keys
        self._drain = drain
        self._edge = edge
        self._hosts = Hosts(edge.host, edge.allowed_host, keyed=keys.needed)
        self.origins = Origins(edge.cors_origin)
        self._budget = BodyBudget(edge.limits)
        self._log = AccessLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # none is served: refused before it is open
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http"
        exchange = RequestContext(secrets.token_hex(16), self._budget)
        scope[SCOPE_KEY] = exchange
        request = Request(scope, receive)
        theirs = request.headers.get("x-request-id")
        answer = ResponseSender(send, exchange, theirs, self._added_headers(request, exchange))
        start = time.perf_counter()
        self._drain.enter()
        try:
            await self._answer(request, exchange, answer)
        finally:
            self._drain.leave()
            seconds = time.perf_counter() - start
            self._log.add(request, exchange, answer, seconds)

    async def _answer(
        self, request: Request, exchange: RequestContext, answer: ResponseSender
    ) -> None:
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

    async def _respond(self, request: Request, exchange: RequestContext) -> Response:
        headers = request.headers
        self._hosts.check(headers, request.scope["http_version"])
        if request.method == "OPTIONS":
            allowed = self.origins.preflight(headers)
            if allowed is not None:
                return Response(status_code=204, headers=allowed)
        route, params, methods = self._table.find(request.method, request.scope["path"])
        if route is None or not route.open:
            self.origins.check(headers)
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

    def _added_headers(self, request: Request, exchange: RequestContext) -> Mapping[str, str]:
        headers = dict(self.origins.headers(request.headers))
        if in_messages(request.scope["path"]):
            headers["request-id"] = exchange.request_id
        return headers


def _log_failure(exchange: RequestContext, error: Exception) -> None:
    log.error("request %s failed:\n%s", exchange.request_id, escaped_traceback(error))


def all_routes(server: Server, requests: RequestMetricsObserver) -> list[Route]:
    """The one route table of the main port."""
    table = [
        *openai_routes(server),
        *messages.routes(server),
        *native.routes(server),
        *engine_view.routes(server),
        *Metrics(server, requests).routes(),
        *health.routes(server),
        *playground.routes(),
    ]
    return [*table, *openapi.routes(table)]


def openai_routes(server: Server) -> list[Route]:
    """The routes of the OpenAI API, and of the tokenizer beside it."""
    endpoints = (chat, completions, embeddings, invocations, models, tokenize)
    return [route for endpoint in endpoints for route in endpoint.routes(server)]
