"""The application: every request enters and every response leaves here.

In this order: the request gets its id, Host and Origin are checked, the route is found, the API key
is checked unless the route is open, and only then the handler runs and may read the body. Unknown
paths need a key too, so that they reveal nothing to strangers.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import formatdate
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.engine.client import EngineClient
from kvik.errors import KvikError, UnavailableError
from kvik.options import did_you_mean
from kvik.server import anthropic, engine_view, health, llama_server, native, pages
from kvik.server.access import ANY, Caller, Hosts, Keys, Origins
from kvik.server.errors import HttpError, escaped, escaped_traceback, http_error, in_messages
from kvik.server.generation import Observer
from kvik.server.metrics import Metrics, MoreMetrics, RequestMetricsObserver, no_more
from kvik.server.openai import (
    chat,
    classify,
    completions,
    embeddings,
    invocations,
    models,
    rerank,
    responses,
    tokenize,
)
from kvik.server.route import (
    DEFAULT_LIMITS,
    SCOPE_KEY,
    BodyBudget,
    BodyLimits,
    RequestContext,
    Route,
    break_connection,
)
from kvik.server.server import Drain, Server, assemble
from kvik.server.texts import Texts
from kvik.server.tracing import Tracing, otlp_exporter
from kvik.server.transfer import MOVES_HEADER, RESUMED_HEADER, Resumption, read_signed
from kvik.server.unhonoured import NOTHING_KEPT, RESPONSES_KEPT

log = logging.getLogger(__name__)
access_log = logging.getLogger("kvik.access")

SAFE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
NO_CREDENTIALS = {"www-authenticate": 'Bearer realm="kvik"'}
PROBES = ("/health", "/ping", "/ready", "/metrics")
MAX_LOGGED_PATH = 200
MAX_COMPARED = 64  # characters of an unknown path
BATCHES = "kvik generate --prompts FILE answers a batch file"
# What the paths of OpenAI's and Anthropic's APIs that this server lacks begin with -> what to do.
ABSENT: Mapping[str, str] = {
    "/v1/responses/compact": RESPONSES_KEPT,
    "/v1/conversations": RESPONSES_KEPT,
    "/v1/chat/completions/": NOTHING_KEPT,
    "/v1/files": BATCHES,
    "/v1/batches": BATCHES,
    "/v1/messages/batches": BATCHES,
}
MAX_REPORTED_FIELDS = 256  # unknown fields that the log warns of, once each


class RouteTable:
    """Method and path -> route. Paths match exactly: case and doubled slashes matter."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            methods = (patterns if "{" in route.path else self._exact).setdefault(route.path, {})
            if route.method in methods:
                raise ValueError(f"{route.method} {route.path} has two routes")
            methods[route.method] = route
        for methods in (*self._exact.values(), *patterns.values()):
            if "GET" in methods:
                methods.setdefault("HEAD", methods["GET"])  # the protocol leaves out the body
        self._patterns = [(*compile_path(path)[::2], methods) for path, methods in patterns.items()]

    def methods(self, path: str) -> tuple[Mapping[str, Route], Mapping[str, Any]]:
        """Return the routes of a path by method, and the parameters in the path."""
        if path in self._exact:
            return self._exact[path], {}
        for regex, convertors, methods in self._patterns:
            if match := regex.fullmatch(path):
                return methods, {k: convertors[k].convert(v) for k, v in match.groupdict().items()}
        return {}, {}


class ResponseSender:
    """Sends a response with the common headers.

    Args:
        headers: further headers.
    """

    def __init__(self, send: Send, context: RequestContext, headers: Mapping[str, str]) -> None:
        self.status: int | None = None  # None until the response has begun
        self.num_bytes = 0  # bytes of the body so far
        self._send = send
        self._context = context
        self._headers = headers

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(self._headers)
            if self._context.ignored_fields:
                headers["x-kvik-ignored-fields"] = ", ".join(self._context.ignored_fields)
            added = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            message = {**message, "headers": [*message["headers"], *added]}
        else:
            self.num_bytes += len(message.get("body", b""))
        await self._send(message)


def make_app(server: Server, routes: Sequence[Route]) -> App:
    """Return the application on the main port."""
    return App(routes, server.keys, server.drain, server.config)


class App:
    """An ASGI application over a table of routes.

    Args:
        admin: every non-open route needs an administrator's key.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        keys: Keys,
        drain: Drain,
        config: ServerConfig,
        *,
        admin: bool = False,
        limits: BodyLimits = DEFAULT_LIMITS,
    ) -> None:
        # Web pages cannot reach a Unix socket, and a proxy in front of it may forward any Host.
        allowed = config.allowed_host or ((ANY,) if config.uds is not None else ())
        self.routes = tuple(routes)
        self.origins = Origins(config.cors_origin)
        self._table = RouteTable(routes)
        self._keys = keys
        self._drain = drain
        self._admin = admin
        self._root_path = config.root_path
        self._kv_token = (config.kv_token or "").encode()
        self._hosts = Hosts(config.host, allowed, keyed=keys.needed)
        self._budget = BodyBudget(limits)
        self._reported_fields: set[str] = set()
        bodies = [route.body for route in routes if route.body is not None]
        self._fields = sorted({name for body in bodies for name in body.__struct_encode_fields__})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no route is a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        assert scope["type"] == "http"
        # An outer app sets the prefix at which this one is mounted.
        prefix = scope.get("root_path") or self._root_path
        if scope["path"].startswith(f"{prefix}/"):
            scope["path"] = scope["path"].removeprefix(prefix)
        context = RequestContext(secrets.token_hex(16), self._budget)
        scope[SCOPE_KEY] = context
        request = Request(scope, receive)
        sender = ResponseSender(send, context, self._headers(request, context))
        start = time.perf_counter()
        self._drain.enter()
        try:
            await self._serve(request, context, sender)
        finally:
            self._drain.leave()
            self._log_access(request, context, sender, time.perf_counter() - start)

    async def _serve(
        self, request: Request, context: RequestContext, sender: ResponseSender
    ) -> None:
        try:
            response = await self._respond(request, context)
            await response(request.scope, request.receive, sender.send)
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, KvikError):
                text = escaped_traceback(error)
                log.error("request %s failed:\n%s", context.request_id, text)
            if sender.status is None:
                anthropic = in_messages(request.scope["path"])
                response = http_error(error).response(anthropic=anthropic)
                await response(request.scope, request.receive, sender.send)
            # The client must not mistake the partial response for a complete one.
            elif not break_connection(request.scope):
                raise

    async def _respond(self, request: Request, context: RequestContext) -> Response:
        headers, path = request.headers, request.scope["path"]
        self._hosts.check(headers, request.scope["http_version"])
        if request.method == "OPTIONS":
            allowed = self.origins.preflight(headers)
            if allowed is not None:
                return Response(status_code=204, headers=allowed)
        methods, params = self._table.methods(path)
        route = methods.get(request.method)
        if route is None or not route.open:
            self.origins.check(headers)
            context.caller = self._authenticate(request, route)
        if route is None:
            raise self._no_route(path, methods)
        if self._drain.started and not (route.open or route.operator or self._returns(headers)):
            refusal = http_error(UnavailableError("server", self._drain.reason))
            # Behind a balancer of connections, a retry on this one would come here again.
            refusal.headers["connection"] = "close"
            raise refusal
        request.scope["path_params"] = params
        return await route.handler(request)

    def _returns(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request that a server handed over comes back, as no other one takes
        it."""
        resumed = read_signed(headers.get(RESUMED_HEADER, ""), Resumption, self._kv_token)
        return MOVES_HEADER not in headers and resumed is not None

    def _no_route(self, path: str, methods: Mapping[str, Route]) -> HttpError:
        full = (path if path.startswith("/v1/") else f"/v1{path}").rstrip("/")
        hint = next(
            (hint_of_path for start, hint_of_path in ABSENT.items() if full.startswith(start)), None
        )
        if methods and hint is None:
            allowed = ", ".join(sorted(methods))
            message = f"this path takes {allowed}"
            return HttpError(405, message, code="method_not_allowed", headers={"allow": allowed})
        described = sorted({route.path for route in self.routes if route.note})
        hint = hint or did_you_mean(path[:MAX_COMPARED], described)
        message = "there is nothing at this path" + (f"; {hint}" if hint else "")
        return HttpError(404, message, code="not_found")

    def _authenticate(self, request: Request, route: Route | None) -> Caller:
        caller = self._keys.caller(request.headers)
        if caller is None:
            message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise HttpError(401, message, code="invalid_api_key", headers=NO_CREDENTIALS)
        operator = self._keys.needed and route is not None and route.operator
        if (operator or self._admin) and not caller.is_admin:
            raise HttpError(403, "the key of an administrator is needed", code="admin_key_needed")
        return caller

    def _headers(self, request: Request, context: RequestContext) -> Mapping[str, str]:
        """Return the common headers of responses."""
        client_id = request.headers.get("x-request-id", "")
        headers = {
            "date": formatdate(usegmt=True),
            "x-request-id": client_id if SAFE_ID.fullmatch(client_id) else context.request_id,
            "x-kvik-request-id": context.request_id,
            **self.origins.headers(request.headers),
        }
        if in_messages(request.scope["path"]):
            headers["request-id"] = context.request_id
        return headers

    def _log_access(
        self, request: Request, context: RequestContext, sender: ResponseSender, seconds: float
    ) -> None:
        """Log one line for each response: escaped, and without prompts and query strings."""
        # Load balancers ask for the server's health every few seconds.
        is_probe = request.scope["path"] in PROBES and sender.status == 200
        access_log.log(
            logging.DEBUG if is_probe else logging.INFO,
            "%s %s %s %s %.1f ms %d bytes %s",
            context.request_id,
            escaped(request.method, 16),
            escaped(request.scope["path"], MAX_LOGGED_PATH),
            sender.status or "unanswered",
            seconds * 1000,
            sender.num_bytes,
            context.caller.name,
        )
        fields = [name for name in context.ignored_fields if name not in self._reported_fields]
        for name in fields[: MAX_REPORTED_FIELDS - len(self._reported_fields)]:
            self._reported_fields.add(name)
            # Such as effort, which this model does not use; or another route has it.
            is_known = context.ignored_fields[name] or name in self._fields
            hint = "" if is_known else did_you_mean(name, self._fields)
            message = f"the field %s of requests is {'' if is_known else 'unknown and '}ignored%s"
            access_log.warning(message, name, f"; {hint}" if hint else "")


def all_routes(
    server: Server, requests: RequestMetricsObserver, more: MoreMetrics = no_more
) -> list[Route]:
    """Return the route table of the main port.

    Args:
        requests: observes the server's requests, for `/metrics`.
        more: see `Metrics`.
    """
    table = [
        *openai_routes(server),
        *anthropic.routes(server),
        *native.routes(server),
        *llama_server.routes(server),
        *engine_view.routes(server),
        *Metrics(server, requests, more).routes(),
        *health.routes(server),
        *pages.playground_routes(),
    ]
    table += without_version(table)
    return [*table, *pages.document_routes(table, server.config.root_path)]


def without_version(table: Sequence[Route]) -> list[Route]:
    """Return the routes below /v1 at their paths without /v1, if those are free: clients' base URLs
    may end with /v1 or not. They are not described again."""
    existing = {(route.method, route.path) for route in table}
    below = [replace(route, path=route.path.removeprefix("/v1"), note="") for route in table]
    return [route for route in below if (route.method, route.path) not in existing]


def openai_routes(server: Server) -> list[Route]:
    """Return the routes of the OpenAI API and of the tokenizer."""
    endpoints = (
        *(chat, completions, responses, embeddings, rerank, classify),
        *(invocations, models, tokenize),
    )
    return [route for endpoint in endpoints for route in endpoint.routes(server)]


def complete_app(
    config: ServerConfig,
    engine: EngineClient,
    texts: Texts,
    default_params: SamplingParams,
    keys: Keys,
    names: Sequence[str],
    more: MoreMetrics = no_more,
) -> tuple[Server, App]:
    """Build a server with all routes and observers: see `assemble`, and `Metrics` for `more`."""
    requests = RequestMetricsObserver()
    observers: list[Observer] = [requests]
    if config.otlp_endpoint is not None:
        observers.append(Tracing(otlp_exporter(config.otlp_endpoint), names[0]))
    server = assemble(config, engine, texts, default_params, keys, names, observers)
    return server, make_app(server, all_routes(server, requests, more))
