"""A socket that an app answers on."""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import replace

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvik.config.errors import ConfigError
from kvik.server.http_protocol import (
    DEFAULT_LIMITS,
    Connection,
    ConnectionLimits,
    Connections,
)

BACKLOG = 1024
LAST_SECONDS = 1.0  # for handlers whose connection is gone
RESERVED_FILES = 128  # that are no connections


def bind(host: str, port: int, field: str = "port") -> socket.socket:
    """A socket that listens; a port that is taken is told of before anything else is begun.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"{host!r} is no address here ({error})") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(field, f"cannot listen on {host} port {port}: {reason}") from None
    listening.setblocking(False)
    return listening


class Listener:
    """Connections of one socket, from `start` to `close`."""

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        limits: ConnectionLimits = DEFAULT_LIMITS,
    ) -> None:
        self._socket = listening
        self._shared = Connections(_affordable(limits))
        self._config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        return len(self._state.connections)

    async def start(self) -> None:
        self._config.load()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._config, self._state, self._shared),
            sock=self._socket,
            backlog=BACKLOG,
        )

    async def close(self, grace: float = 0.0) -> None:
        """Take no more connections, and break those that are not done after `grace` seconds."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        end = asyncio.get_running_loop().time() + grace
        while self._state.connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self._state.connections):
            connection.transport.abort()
        # Handlers hear of it, and end by themselves.
        tasks = list(self._state.tasks)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=LAST_SECONDS)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


def _affordable(limits: ConnectionLimits) -> ConnectionLimits:
    """No more connections than this process may have files, after it has taken all it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        limits = replace(limits, max_connections=max(1, soft - RESERVED_FILES))
    return limits
