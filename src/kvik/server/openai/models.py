"""GET /v1/models and /v1/models/{id}, for clients of OpenAI and of Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from kvik.server.asking import json_response
from kvik.server.errors import model_not_found
from kvik.server.openai.answers import Model, Models
from kvik.server.parts import Parts


async def models(parts: Parts, request: Request) -> Response:
    """The model that is served, under each of its names."""
    names = parts.model_names
    listed = [_model(parts, name) for name in names]
    return json_response(Models(data=listed, first_id=names[0], last_id=names[-1]))


async def model(parts: Parts, request: Request) -> Response:
    """One of the names."""
    name = request.path_params["model"]
    if name not in parts.model_names:
        raise model_not_found(name)
    return json_response(_model(parts, name))


def _model(parts: Parts, name: str) -> Model:
    return Model(
        id=name,
        created=parts.started,
        display_name=name,
        created_at=datetime.fromtimestamp(parts.started, UTC).isoformat().replace("+00:00", "Z"),
        root=parts.model_name,
        max_model_len=parts.engine.config.scheduler.max_model_len,
    )
