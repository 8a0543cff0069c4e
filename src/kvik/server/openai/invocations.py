"""POST /invocations: all endpoints on one path, which is how SageMaker calls a container."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvik.server.errors import HttpError
from kvik.server.openai.chat import CHAT, ChatRequest, chat
from kvik.server.openai.completions import COMPLETION, CompletionRequest, completions
from kvik.server.openai.embeddings import EMBEDDING, EmbeddingRequest, embeddings
from kvik.server.route import Route, read_chosen
from kvik.server.server import Server
from kvik.server.unhonoured import Table

Body = ChatRequest | CompletionRequest | EmbeddingRequest
# The field that only one kind has, and needs.
_KINDS: Mapping[str, tuple[type[Body], Table]] = {
    "messages": (ChatRequest, CHAT),
    "prompt": (CompletionRequest, COMPLETION),
    "input": (EmbeddingRequest, EMBEDDING),
}


class Invocation(Struct):
    """The body of /v1/chat/completions, /v1/completions or /v1/embeddings, recognised by these."""

    messages: Any = None
    prompt: Any = None
    input: Any = None


async def invocations(server: Server, request: Request) -> Response:
    """Do what the body asks for."""
    body = await read_chosen(request, _kind)
    if isinstance(body, ChatRequest):
        return await chat(server, request, body)
    if isinstance(body, CompletionRequest):
        return await completions(server, request, body)
    assert isinstance(body, EmbeddingRequest)
    return await embeddings(server, request, body)


def _kind(value: dict[str, Any]) -> tuple[type[Body], Table]:
    kinds = [kind for name, kind in _KINDS.items() if value.get(name) is not None]
    if len(kinds) != 1:
        raise HttpError(400, f"there must be one of {', '.join(_KINDS)}")
    return kinds[0]


def routes(server: Server) -> list[Route]:
    return [
        Route(
            "/invocations",
            partial(invocations, server),
            body=Invocation,
            note="Any of the three, as its body says.",
        ),
    ]
