"""POST /invocations: all endpoints on one path, as SageMaker requires of a container."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvik.server.errors import HttpError
from kvik.server.openai.chat import chat
from kvik.server.openai.completions import completions
from kvik.server.openai.embeddings import embeddings
from kvik.server.route import Endpoint, Route, read_chosen
from kvik.server.server import Server
from kvik.server.unhonoured import Table

# The field that only one of them has, and needs.
_ENDPOINTS: Mapping[str, Endpoint] = {"messages": chat, "prompt": completions, "input": embeddings}


class Invocation(Struct):
    """A body of /v1/chat/completions, /v1/completions or /v1/embeddings, told apart by these
    fields."""

    messages: Any = None
    prompt: Any = None
    input: Any = None


async def invocations(server: Server, request: Request) -> Response:
    """Call the endpoint that the body is meant for."""
    body = await read_chosen(request, _kind)
    (endpoint,) = (entry for entry in _ENDPOINTS.values() if entry.body is type(body))
    return await endpoint.handler(server, request, body)


def _kind(value: dict[str, Any]) -> tuple[type[Struct], Table]:
    endpoints = [endpoint for name, endpoint in _ENDPOINTS.items() if value.get(name) is not None]
    if len(endpoints) != 1 or endpoints[0].body is None:
        raise HttpError(400, f"there must be one of {', '.join(_ENDPOINTS)}")
    return endpoints[0].body, endpoints[0].unhonoured


def routes(server: Server) -> list[Route]:
    note = "Any of the three, as its body says."
    return [Route("/invocations", partial(invocations, server), body=Invocation, note=note)]
