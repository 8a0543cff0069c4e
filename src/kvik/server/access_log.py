"""One line for each answer. Neither prompts nor query strings are in it, and nothing unescaped."""

from __future__ import annotations

import logging

from starlette.requests import Request

from kvik.server.answer import Answer
from kvik.server.escape import escaped
from kvik.server.exchange import Exchange

log = logging.getLogger("kvik.access")

PROBES = ("/health", "/ping", "/ready", "/metrics")
MAX_PATH = 200
MAX_REMEMBERED = 256  # unknown fields that are told of once each


class AccessLog:
    def __init__(self) -> None:
        self._ignored: set[str] = set()

    def add(self, request: Request, exchange: Exchange, answer: Answer, seconds: float) -> None:
        """Args:
        seconds: from the request's head to the answer's end.
        """
        # Load balancers ask for the server's health every few seconds.
        dull = request.scope["path"] in PROBES and answer.status == 200
        log.log(
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
                log.warning("the field %s of requests is unknown and ignored", name)
