"""Health and readiness of the server. Open routes, since load balancers have no key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from kvik import __version__
from kvik.server.errors import state_in_words
from kvik.server.route import get, routes_of
from kvik.server.server import Server

NO_FACTS: Mapping[str, str] = {}


@get("/health", open=True, note="200 while the engine advances or sleeps, else 503 and the reason.")
async def health(server: Server, request: Request) -> Response:
    role = server.engine.config.runner.role
    facts = {"role": role} if role != "both" else {}  # `kvik route` reads these
    return _answer(_problem(server), facts | {"store": server.stored.name})


@get("/ready", open=True, note="200 if there is room, too.")
async def ready(server: Server, request: Request) -> Response:
    full = server.admission.fill >= 1.0
    return _answer(_problem(server) or (("full", "the queue is full") if full else None))


@get("/version", open=True, note="Which kvik this is.")
async def version(server: Server, request: Request) -> Response:
    return _json(200, {"version": __version__})


def _problem(server: Server) -> tuple[str, str] | None:
    """Return the problem as a status and a sentence; None if there is none."""
    state = server.engine.state
    if server.drain.started:
        return "draining", f"the server {server.drain.reason}"
    if not server.engine.accepts:
        return str(state), f"the engine {state_in_words(state)}"
    if refusal := server.engine.refusal:
        return "draining", refusal
    return None


def _answer(problem: tuple[str, str] | None, facts: Mapping[str, str] = NO_FACTS) -> Response:
    if problem is None:
        return _json(200, {"status": "ok", **facts})
    status, reason = problem
    return _json(503, {"status": status, "reason": reason})


def _json(status: int, body: dict[str, str]) -> Response:
    headers = {"cache-control": "no-store"}
    data = json.dumps(body).encode()
    return Response(data, status, headers=headers, media_type="application/json")


ENDPOINTS = (health, replace(health, path="/ping", note="As /health."), ready, version)
routes = routes_of(*ENDPOINTS)
