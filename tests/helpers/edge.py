"""A server with a few routes, to test the checks that every request passes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ssl import SSLContext

import msgspec
from helpers.http_server import HttpServer, http_server
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvik.config.server_config import ServerConfig
from kvik.errors import CapacityError, Overflow, OverloadError, ParamError
from kvik.server.access import read_keys
from kvik.server.app import App
from kvik.server.route import Route, caller_of, read_body
from kvik.server.server import Drain

KEY = {"authorization": "Bearer right"}


class Body(msgspec.Struct):
    number: int = 0


class Message(msgspec.Struct):
    text: str = ""


class Calls(list[str]):
    """Records which handlers ran, and for which tenant."""


def table(calls: Calls) -> list[Route]:
    async def echo(request: Request) -> Response:
        calls.append("echo")
        body = await read_body(request, Body)
        return JSONResponse({"number": body.number, "caller": caller_of(request).name})

    async def read(request: Request) -> Response:
        calls.append("read")
        return JSONResponse({"path": request.path_params.get("model")})

    async def fail(request: Request) -> Response:
        secret = "a secret\n2026 INFO kvik.access forged"
        raise RuntimeError(secret)

    async def late(request: Request) -> Response:
        async def pieces() -> object:
            yield b"data: 1\n\n"
            raise RuntimeError("too late")

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def stream(request: Request) -> Response:
        async def pieces() -> object:
            for number in range(3):
                await asyncio.sleep(0.01)
                yield b"data: %d\n\n" % number

        return StreamingResponse(pieces(), media_type="text/event-stream")

    errors = {
        "param": ParamError("top_p", "must be in (0, 1]"),
        "context": ParamError("prompt", "has 9 tokens", overflow=Overflow(8, 9)),
        "capacity": CapacityError("n", "never fits"),
        "own": OverloadError("queue", "is full", 2.4, of_caller=True),
        "all": OverloadError("queue", "is full", 0.0, of_caller=False),
    }

    async def refuse(request: Request) -> Response:
        raise errors[request.path_params["which"]]

    return [
        Route("/v1/echo", echo, body=Body),
        Route("/v1/messages", echo, body=Message),
        Route("/v1/messages/fail", fail),
        Route("/v1/models", read, "GET"),
        Route("/v1/models/{model:path}", read, "GET"),
        Route("/v1/fail", fail, "GET"),
        Route("/v1/late", late, "GET"),
        Route("/v1/stream", stream, "GET"),
        Route("/v1/refuse/{which}", refuse, "GET"),
        Route("/health", read, "GET", open=True),
    ]


@contextmanager
def edge_server(
    keys: Sequence[str],
    edge: ServerConfig,
    calls: Calls | None = None,
    drain: Drain | None = None,
    *,
    listening: socket.socket | None = None,
    tls: SSLContext | None = None,
) -> Iterator[HttpServer]:
    routes = table(Calls() if calls is None else calls)
    app = App(routes, read_keys(keys), Drain() if drain is None else drain, edge)
    with http_server(app, listening=listening, tls=tls) as running:
        yield running
