"""The one route table of the main port."""

from __future__ import annotations

from kvik.server import engine_view, health, native, openapi, playground
from kvik.server.anthropic import routes as anthropic
from kvik.server.metrics import Metrics
from kvik.server.openai import routes as openai
from kvik.server.parts import Parts
from kvik.server.request_metrics import RequestMetrics
from kvik.server.route import Route


def all_routes(parts: Parts, requests: RequestMetrics) -> list[Route]:
    table = [
        *openai.routes(parts),
        *anthropic.routes(parts),
        *native.routes(parts),
        *engine_view.routes(parts),
        *Metrics(parts, requests).routes(),
        *health.routes(parts),
        *playground.routes(),
    ]
    return [*table, *openapi.routes(table)]
