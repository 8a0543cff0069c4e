"""The operator's routes, on a separate port on the loopback address."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.server_config import ServerConfig
from kvik.engine.remote import EngineState
from kvik.server.app import App
from kvik.server.errors import HttpError, rename_fields
from kvik.server.health import ENDPOINTS as HEALTH
from kvik.server.responses import json_response
from kvik.server.route import get, post, routes_of
from kvik.server.server import Drain, Server

LOOPBACK = "127.0.0.1"


class AbortRequest(msgspec.Struct):
    """`request_id`: as in /v1/engine."""

    request_id: str


class DrainRequest(msgspec.Struct):
    """`drain`: stop accepting requests; false: accept them again."""

    drain: bool


class Drained(msgspec.Struct):
    """`unfinished`: number of requests that the replica still has."""

    unfinished: int


class Sleeps(msgspec.Struct):
    """`is_sleeping`: the engine holds no memory until a request arrives."""

    is_sleeping: bool


class LoadLora(msgspec.Struct):
    """The names are vLLM's. `lora_path`: a folder, or a hub id."""

    lora_name: str
    lora_path: str


class UnloadLora(msgspec.Struct):
    lora_name: str


class Nothing(msgspec.Struct):
    """An empty object."""


class Done(msgspec.Struct):
    """The request was carried out."""

    done: bool = True


class Forgotten(msgspec.Struct):
    """`num_blocks`: blocks of the prefix cache that were freed."""

    num_blocks: int


@post("/admin/abort", answer=Done, note="End a request.")
async def abort(server: Server, request: Request, body: AbortRequest) -> Response:
    if not server.generations.abort(body.request_id):
        raise HttpError(404, "there is no such request", "request_id", "request_not_found")
    return json_response(Done())


@post(
    "/admin/reset_prefix_cache",
    answer=Forgotten,
    note="Forget all cached prefixes that no request uses.",
)
async def reset_prefix_cache(server: Server, request: Request, body: Nothing) -> Response:
    return json_response(Forgotten(await server.engine.reset_prefix_cache()))


@get(
    "/admin/sleep",
    method="POST",
    answer=Done,
    note="Free the engine's memory until a request arrives; it must have none.",
)
async def sleep(server: Server, request: Request) -> Response:
    await server.engine.sleep()
    return json_response(Done())


@get("/admin/wake_up", method="POST", answer=Done, note="Start an engine that sleeps, and wait.")
async def wake_up(server: Server, request: Request) -> Response:
    await server.engine.ready()
    return json_response(Done())


@get("/admin/is_sleeping", answer=Sleeps, note="Whether the engine sleeps.")
async def is_sleeping(server: Server, request: Request) -> Response:
    return json_response(Sleeps(server.engine.state is EngineState.ASLEEP))


@post("/admin/drain", answer=Done, note="Take no more requests, or take them again.")
async def drain(server: Server, request: Request, body: DrainRequest) -> Response:
    if body.drain:
        server.drain.start("is drained by its operator")
        server.generations.hand_over()
    else:
        server.drain.stop()
    return json_response(Done())


@post(
    "/admin/replicas/{replica:int}/drain",
    answer=Drained,
    note="Send one of several engines no more requests, or send it some again.",
)
async def drain_replica(server: Server, request: Request, body: DrainRequest) -> Response:
    replica: int = request.path_params["replica"]
    return json_response(Drained(server.engine.drain_replica(replica, drain=body.drain)))


@post("/admin/adapters/load", answer=Done, note="Let requests choose another adapter.")
async def load(server: Server, request: Request, body: LoadLora) -> Response:
    with rename_fields(name="lora_name"):
        await server.load_adapter(body.lora_name, body.lora_path)
    return json_response(Done())


@post("/admin/adapters/unload", answer=Done, note="Refuse requests for an adapter from now on.")
async def unload(server: Server, request: Request, body: UnloadLora) -> Response:
    with rename_fields(model="lora_name"):
        await server.unload_adapter(body.lora_name)
    return json_response(Done())


@get("/admin/stats", note="Gauges and counters of the engine.")
async def stats(server: Server, request: Request) -> Response:
    return json_response(await server.engine.stats())


def make_admin_app(server: Server) -> App:
    """Return the application on the admin port. Shutdown does not wait for its requests."""
    return App(routes(server), server.keys, Drain(), ServerConfig(host=LOOPBACK), admin=True)


ADAPTERS = (
    *(load, replace(load, path="/v1/load_lora_adapter")),  # the latter: vLLM's
    *(unload, replace(unload, path="/v1/unload_lora_adapter")),
)
SLEEP = tuple(
    replace(route, path=path)
    for route in (sleep, wake_up, is_sleeping)
    for path in (route.path, route.path.removeprefix("/admin"))  # the latter: vLLM's
)
routes = routes_of(
    *HEALTH, abort, reset_prefix_cache, drain, drain_replica, *SLEEP, *ADAPTERS, stats
)
