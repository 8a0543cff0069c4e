"""The routes of the operator, on a port of their own on the loopback address."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvik.server.app import App, AppConfig
from kvik.server.body import read_body
from kvik.server.errors import HttpError
from kvik.server.health import routes as health
from kvik.server.route import Route
from kvik.server.server import Drain, Server

LOOPBACK = "127.0.0.1"


class AbortRequest(msgspec.Struct):
    """`request_id`: as in /v1/engine."""

    request_id: str


class DrainRequest(msgspec.Struct):
    """`drain`: take no more requests; false: take them again."""

    drain: bool


class Nothing(msgspec.Struct):
    """An empty object."""


class Done(msgspec.Struct):
    """The request was carried out."""

    done: bool = True


class Forgotten(msgspec.Struct):
    """Blocks of the prefix cache that are free now."""

    num_blocks: int


class Admin:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def abort(self, request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        if not self._server.generations.abort(body.request_id):
            raise HttpError(404, "there is no such request", "request_id", "request_not_found")
        return _json(Done())

    async def reset_prefix_cache(self, request: Request) -> Response:
        await read_body(request, Nothing)
        return _json(Forgotten(await self._server.engine.reset_prefix_cache()))

    async def drain(self, request: Request) -> Response:
        body = await read_body(request, DrainRequest)
        if body.drain:
            self._server.drain.start()
        else:
            self._server.drain.stop()
        return _json(Done())

    async def stats(self, request: Request) -> Response:
        return _json(await self._server.engine.stats())


def make_admin_app(server: Server) -> App:
    """The application on the admin port. The end of the server does not wait for it."""
    return App(routes(server), server.keys, Drain(), AppConfig(LOOPBACK, admin=True))


def routes(server: Server) -> list[Route]:
    admin = Admin(server)
    return [
        *health(server),
        Route("/admin/abort", admin.abort, body=AbortRequest, answer=Done, note="End a request."),
        Route(
            "/admin/reset_prefix_cache",
            admin.reset_prefix_cache,
            body=Nothing,
            answer=Forgotten,
            note="Forget all cached prefixes that no request uses.",
        ),
        Route(
            "/admin/drain",
            admin.drain,
            body=DrainRequest,
            answer=Done,
            note="Take no more requests, or take them again.",
        ),
        Route("/admin/stats", admin.stats, "GET", note="Gauges and counters of the engine."),
    ]


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
