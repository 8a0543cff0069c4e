"""What the routes of all APIs do alike: the model's name, names of fields, JSON out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

from kvik.config.errors import ParamError
from kvik.server.beside import beside
from kvik.server.errors import model_not_found
from kvik.server.parts import Parts
from kvik.server.pieces import encoded


def check_model(parts: Parts, model: str | None) -> None:
    """Raises `HttpError` 404 if it is not the one served; who names none means it."""
    if model and model not in parts.model_names:
        raise model_not_found(model)


def either(body: msgspec.Struct, name: str, other: str) -> Any:
    """The value of a field that has two names; None if it has none.

    Raises:
        ParamError: they contradict each other.
    """
    value, same = getattr(body, name), getattr(body, other)
    if None not in (value, same) and value != same:
        raise ParamError(other, f"must be left out, or be {value} as {name} is, not {same}")
    return same if value is None else value


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def large_response(num_items: int, answer: Callable[[], msgspec.Struct]) -> Response:
    """The same for what may be large: see `beside`."""
    data = await beside(num_items, lambda: encoded(answer()))
    return Response(data, media_type="application/json")
