"""Wrap an `AsyncLLM` as the server's ASGI application, alone or mounted in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from kvik.config.config import ResolvedConfig
from kvik.config.server_config import ServerConfig, check_server_config
from kvik.core.sampling_params import SamplingParams
from kvik.engine.client import EngineClient
from kvik.errors import ConfigError
from kvik.options import options_of, unknown
from kvik.server.access import read_keys
from kvik.server.app import App, complete_app
from kvik.server.server import model_names
from kvik.server.texts import Texts

# Options of a program that listens itself and loads the engine itself.
ELSEWHERE = frozenset((
    *("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "admin_port", "shutdown_timeout"),
    *("sleep_after", "record", "log_level"),
))  # fmt: skip


class LoadedEngine(Protocol):
    """The part of an `AsyncLLM` that `build_app` needs."""

    model: str
    resolved: ResolvedConfig
    client: EngineClient
    texts: Texts
    default_params: SamplingParams

    def begin(self) -> None:
        """Begin to load it, unless it has begun."""
        ...

    async def start(self) -> None:
        """Load it, unless it is loaded, and wait until it accepts requests."""
        ...

    async def close(self) -> None:
        """Free it."""
        ...


def build_app(engine: LoadedEngine, **options: Any) -> EngineApp:
    """Return the server of an `AsyncLLM` as an ASGI application, alone or mounted in another one.

    It has all routes of `kvik serve`, and its requests share the batch with calls in Python. As a
    standalone app it loads the engine at startup and closes it at shutdown. If it is mounted, the
    outer app does this with `async with engine`, or the first request begins to load the engine.

    Args:
        options: fields of `ServerConfig`, except those of `ELSEWHERE`.

    Raises:
        ConfigError: an option does not exist, belongs to the program, or is out of range.
    """
    allowed = [option.name for option in options_of(ServerConfig) if option.name not in ELSEWHERE]
    for name in options:
        if name in ELSEWHERE:
            raise ConfigError(name, "is for the program that listens, or that loads the engine")
        if name not in allowed:
            raise ConfigError(name, unknown(name, "server option", allowed))
    config = ServerConfig(**{**options, "host": ""})
    check_server_config(config)
    names = model_names(config, engine.model, Path(engine.resolved.runner.model_path))
    keys = read_keys(config.api_key, config.api_key_file)
    server, app = complete_app(
        config,
        engine.client,
        engine.texts.with_format(config.tool_format),
        engine.default_params,
        keys,
        names,
    )
    engine.client.add_sink(server.generations.take)
    return EngineApp(engine, app)


class EngineApp:
    """An ASGI application for an engine, which it loads at the first request."""

    def __init__(self, engine: LoadedEngine, app: App) -> None:
        self._engine = engine
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        self._engine.begin()
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # startup
        try:
            await self._engine.start()
        except BaseException as error:
            await self._engine.close()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.startup.complete"})
        await receive()  # shutdown
        await self._engine.close()
        await send({"type": "lifespan.shutdown.complete"})
