"""Health and readiness of the server. Open routes, since load balancers have no key."""

from __future__ import annotations

import json
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from kvik import __version__
from kvik.engine.remote import EngineState
from kvik.server.errors import state_in_words
from kvik.server.route import get, routes_of
from kvik.server.server import Server


@get("/health", open=True, note="200 while the engine advances, else 503 and the reason.")
async def health(server: Server, request: Request) -> Response:
    problem = _problem(server)
    return _answer(problem, server.engine.config.runner.role if problem is None else "both")


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
    if state is not EngineState.READY:
        return str(state), f"the engine {state_in_words(state)}"
    if server.engine.drained:
        return "draining", "all replicas are drained"
    return None


def _answer(problem: tuple[str, str] | None, role: str = "both") -> Response:
    if problem is None:  # `kvik route` reads the role
        return _json(200, {"status": "ok"} | ({"role": role} if role != "both" else {}))
    status, reason = problem
    return _json(503, {"status": status, "reason": reason})


def _json(status: int, body: dict[str, str]) -> Response:
    headers = {"cache-control": "no-store"}
    data = json.dumps(body).encode()
    return Response(data, status, headers=headers, media_type="application/json")


ENDPOINTS = (health, replace(health, path="/ping", note="As /health."), ready, version)
routes = routes_of(*ENDPOINTS)
