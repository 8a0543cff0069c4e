"""`kvik top`: what a running server does now, in the terminal."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException

from rich.console import Console
from rich.live import Live

from kvik.cli.flags import Parser, number
from kvik.cli.remote_server import RemoteServer, add_key_flag
from kvik.cli.top_picture import Frame, picture, plain
from kvik.errors import KvikError

PATH = "/v1/engine"
TIMEOUT = 5.0  # seconds that the server may be silent
MAX_BYTES = 1 << 24
MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0
LINES_ABOVE = 12  # of a frame that are not rows of requests
MIN_ROWS = 3


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("top", "[--url URL]", "Watch a running server. Ctrl-C leaves.")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)"
    )
    add_key_flag(parser, "of an administrator, if the server has keys")
    parser.add_argument(
        "--interval", type=number, default=0.5, metavar="S", help="seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one frame (so it is without a terminal)"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    interval: float = arguments.interval
    if not MIN_INTERVAL <= interval <= MAX_INTERVAL:
        raise KvikError("interval", f"must be {MIN_INTERVAL} to {MAX_INTERVAL:.0f} seconds")
    server = RemoteServer.at(arguments.url, arguments.api_key)
    first = ask(server)
    console = Console()
    if arguments.once or not console.is_terminal:
        console.print(picture(first, console.width))
        return 0
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for frame, trouble in frames(lambda: ask(server), first, lambda: time.sleep(interval)):
            rows = max(MIN_ROWS, console.height - LINES_ABOVE)
            live.update(picture(frame, console.width, rows, trouble), refresh=True)
    return 0


def ask(server: RemoteServer) -> Frame:
    """
    Raises:
        KvikError: there is no answer, or none that can be used.
    """
    try:
        connection = server.connection(TIMEOUT)
        try:
            connection.request("GET", server.target(PATH), headers=dict(server.headers))
            answer = connection.getresponse()
            status, body = answer.status, answer.read(MAX_BYTES)
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:  # ValueError: a host of odd letters
        why = plain(str(error) or type(error).__name__)
        raise KvikError("url", f"no server answers at {plain(server.url)} ({why})") from None
    return read(status, body)


def read(status: int, body: bytes) -> Frame:
    """A frame from an answer.

    Raises:
        KvikError: it is none.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if status == 200 and isinstance(found, dict) and {"model", "state", "live"} <= found.keys():
        return found
    error = found.get("error") if isinstance(found, dict) else None
    told = error if isinstance(error, dict) else {}
    message = plain(str(told.get("message", "")))
    if status == 401 or told.get("code") == "admin_key_needed":
        raise KvikError("api_key", message or "the server does not take it")
    if status in (200, 404):
        raise KvikError("url", f"what answers there has no {PATH}: it is not a server of kvik")
    raise KvikError("url", f"the server answers with status {status} {message}".rstrip())


def frames(
    ask: Callable[[], Frame], first: Frame, rest: Callable[[], None]
) -> Iterator[tuple[Frame, str]]:
    """The last frame there was, and why there is no newer one, or "": for ever."""
    frame, trouble = first, ""
    while True:
        yield frame, trouble
        rest()
        try:
            frame, trouble = ask(), ""
        except KvikError as error:
            trouble = str(error)
