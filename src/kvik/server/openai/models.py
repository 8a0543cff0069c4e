"""GET /v1/models and /v1/models/{id}, for OpenAI and Anthropic clients."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvik.server.errors import model_not_found
from kvik.server.responses import json_response
from kvik.server.route import get, routes_of
from kvik.server.server import Server


class ModelCard(Struct, kw_only=True):
    """A served model, with the fields of both the OpenAI and the Anthropic API."""

    id: str
    object: Literal["model"] = "model"
    created: int  # seconds since 1970
    type: Literal["model"] = "model"
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    owned_by: str = "kvik"
    root: str
    parent: str | None = None  # the model that an adapter changes
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """All served models: one page, with the fields of both APIs."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


@get("/v1/models", answer=ModelList, note="The model that is served, and its adapters.")
async def models(server: Server, request: Request) -> Response:
    """Return the served model under each of its names, and its adapters."""
    names = (*server.model_names, *server.adapters)
    listed = [_model(server, name) for name in names]
    return json_response(ModelList(data=listed, first_id=names[0], last_id=names[-1]))


@get("/v1/models/{model:path}", answer=ModelCard, note="One model.")
async def model(server: Server, request: Request) -> Response:
    """Return the served model under one of its names."""
    name = request.path_params["model"]
    if not name:  # `served` allows requests without one
        raise model_not_found(name, (*server.model_names, *server.adapters))
    server.served(name)
    return json_response(_model(server, name))


def _model(server: Server, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=server.started,
        display_name=name,
        created_at=datetime.fromtimestamp(server.started, UTC).isoformat().replace("+00:00", "Z"),
        root=name if name in server.adapters else server.model_name,
        parent=server.model_name if name in server.adapters else None,
        max_model_len=server.max_model_len,
    )


routes = routes_of(models, model)
