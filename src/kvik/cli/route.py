"""`kvik route URL...`: one address in front of several servers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket

from kvik.cli.flags import Parser, number
from kvik.cli.terminal import say
from kvik.config.server_config import ServerConfig, check_server_config
from kvik.errors import ConfigError
from kvik.remote_server import RemoteServer
from kvik.server.access import Hosts
from kvik.server.http_protocol import ConnectionLimits
from kvik.server.proxy import Proxy
from kvik.server.run import Listener, StopSignal, bind

MAX_TIMEOUT = 86_400.0
SHUTDOWN_SECONDS = 30.0  # for running answers
# Of a client, and of two servers while a request moves.
LIMITS = ConnectionLimits(files_per_connection=3)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "route",
        "URL...",
        "Forward requests to servers of kvik, or others with OpenAI's API, each to the server that "
        "has its prefix cached and a short queue. Keys and bodies pass through unchanged.",
    )
    parser.add_argument(
        "url", nargs="+", metavar="URL", help="URL of a server, such as http://a:8000"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name under which it may be reached, in addition to IP addresses (with --host), "
        "localhost and the machine's name; *: any",
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=number,
        default=600.0,
        metavar="S",
        help="maximum silence of a server during a request, in seconds (default: %(default)s)",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    import uvloop

    urls = [RemoteServer.at(url, "").url for url in arguments.url]
    twice = next((url for i, url in enumerate(urls) if url in urls[:i]), None)
    if twice is not None:
        raise ConfigError("url", f"must name different servers: {twice} is given twice")
    timeout: float = arguments.timeout
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ConfigError("timeout", f"must be above 0 and at most {MAX_TIMEOUT:.0f} seconds")
    allowed_host = tuple(arguments.allowed_host)
    edge = ServerConfig(host=arguments.host, port=arguments.port, allowed_host=allowed_host)
    check_server_config(edge)
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=line)
    hosts = Hosts(edge.host, edge.allowed_host, keyed=False)  # the keys are the servers'
    with bind(edge.host, edge.port) as listening:
        return uvloop.run(_route(Proxy(urls, hosts, timeout), listening))


async def _route(proxy: Proxy, listening: socket.socket) -> int:
    """Forward requests until a signal arrives; a second one does not wait for running answers."""
    stop = StopSignal()
    stop.listen()
    starting = asyncio.ensure_future(proxy.servers.start())
    stopping = asyncio.ensure_future(stop.requested.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return 0
    stopping.cancel()
    starting.result()
    listener = Listener(proxy, listening, LIMITS)
    try:
        await listener.start()
        host, port = listening.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        say(f"http://{name}:{port}/v1 in front of {len(proxy.servers.listed)} servers", flush=True)
        await stop.requested.wait()
        closing = asyncio.ensure_future(listener.close(SHUTDOWN_SECONDS))
        second_signal = asyncio.ensure_future(stop.repeated.wait())
        await asyncio.wait((closing, second_signal), return_when=asyncio.FIRST_COMPLETED)
        for task in (closing, second_signal):
            task.cancel()
        await asyncio.gather(closing, second_signal, return_exceptions=True)
    finally:
        await proxy.servers.close()
    return 0
