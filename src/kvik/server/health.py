"""Whether the server is alive and ready. Open, since load balancers have no key."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from kvik import __version__
from kvik.engine.remote import EngineState
from kvik.server.errors import state_in_words
from kvik.server.route import Route
from kvik.server.server import Server


class Health:
    def __init__(self, server: Server) -> None:
        self._server = server

    async def health(self, request: Request) -> Response:
        """200 while the engine advances or is idle."""
        return _answer(self._trouble())

    async def ready(self, request: Request) -> Response:
        """As `health`, and the queue is not full."""
        full = self._server.admission.fill >= 1.0
        return _answer(self._trouble() or (("full", "the queue is full") if full else None))

    async def version(self, request: Request) -> Response:
        return _json(200, {"version": __version__})

    def _trouble(self) -> tuple[str, str] | None:
        """Return what is wrong: a status and a sentence."""
        engine = self._server.engine
        if self._server.drain.started:
            return "draining", "the server is being stopped"
        if engine.state is not EngineState.READY:
            return str(engine.state), f"the engine {state_in_words(engine.state)}"
        return None


def routes(server: Server) -> list[Route]:
    health = Health(server)
    alive = "200 while the engine advances, else 503 and the reason."
    return [
        Route("/health", health.health, "GET", open=True, note=alive),
        Route("/ping", health.health, "GET", open=True, note="As /health."),
        Route("/ready", health.ready, "GET", open=True, note="200 if there is room, too."),
        Route("/version", health.version, "GET", open=True, note="Which kvik this is."),
    ]


def _answer(trouble: tuple[str, str] | None) -> Response:
    if trouble is None:
        return _json(200, {"status": "ok"})
    status, reason = trouble
    return _json(503, {"status": status, "reason": reason})


def _json(status: int, body: dict[str, str]) -> Response:
    headers = {"cache-control": "no-store"}
    data = json.dumps(body).encode()
    return Response(data, status, headers=headers, media_type="application/json")
