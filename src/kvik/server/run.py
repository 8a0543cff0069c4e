"""Runs a server, from binding its sockets to the signal that stops it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import ssl
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvik.engine.remote import EngineState
from kvik.errors import ConfigError, UnavailableError
from kvik.files import allow_files
from kvik.server.app import App
from kvik.server.http_protocol import (
    DEFAULT_LIMITS,
    Connection,
    ConnectionLimits,
    Connections,
    ErrorHeaders,
)
from kvik.server.server import Server

BACKLOG = 1024
LAST_SECONDS = 1.0  # for handlers to end after their connection is closed
RESERVED_FILES = 128  # open files that are not connections


def bind(host: str, port: int, field: str = "port") -> socket.socket:
    """Open a listening socket, so that a port in use is reported before the model is loaded.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", f"{host!r} is not an address of this machine ({error})") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            field = "host"
        raise ConfigError(field, f"cannot listen on {host} port {port}: {reason}") from None
    listening.setblocking(False)
    return listening


@contextmanager
def bind_unix(path: str) -> Iterator[socket.socket]:
    """Listen on a Unix socket until the block ends, then remove its file. The umask and the
    permissions of the folder decide who may connect. A stale socket file, on which no server
    listens, is replaced.

    Raises:
        ConfigError: the path cannot be used.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            _remove_stale(path)
            listening.bind(path)
        except (OSError, ValueError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise ConfigError("uds", f"cannot listen on {path!r}: {reason}") from None
        try:
            listening.listen(BACKLOG)
            listening.setblocking(False)
            yield listening
        finally:
            listening.close()
            with suppress(OSError):
                _remove_stale(path)  # not the file of another server that has begun meanwhile


def _remove_stale(path: str) -> None:
    """Remove a stale socket file; raise OSError if the file is not a socket. Binding fails later if
    another server still uses it."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(errno.ENOTSOCK, "it exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def server_tls(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for HTTPS; None without a certificate: HTTP is served.

    Args:
        certfile: in PEM format, the certificate followed by its chain.
        keyfile: its private key; None: it is in `certfile`.

    Raises:
        ConfigError: `ssl_certfile` or `ssl_keyfile` cannot be used.
    """
    if certfile is None:
        return None
    for field, file in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if file is not None:
            _check_readable(field, file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    key_field = "ssl_certfile" if keyfile is None else "ssl_keyfile"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certfile)
    except ssl.SSLError:
        raise ConfigError(
            "ssl_certfile", f"{certfile!r} has no certificate in PEM format"
        ) from None
    try:
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"{keyfile or certfile!r} is not the key of the certificate in {certfile!r}"
        else:
            message = f"{keyfile or certfile!r} has no private key in PEM format without a password"
        raise ConfigError(key_field, message) from None
    return context


def _check_readable(field: str, file: str) -> None:
    try:
        Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(field, f"{file!r} cannot be read: {reason}") from None


class Listener:
    """Accepts the connections of one socket, from `start` to `close`.

    Args:
        tls: for HTTPS; None: serve HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        error_headers: ErrorHeaders = lambda headers: {},
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._socket = listening
        self._shared = Connections(_affordable(limits), error_headers)
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
        self._tls = tls
        self._handshake_seconds = limits.head_seconds if tls is not None else None
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
        loop = asyncio.get_running_loop()
        is_unix = self._socket.family == socket.AF_UNIX
        create = loop.create_unix_server if is_unix else loop.create_server
        self._server = await create(
            lambda: Connection(self._config, self._state, self._shared),
            sock=self._socket,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=self._handshake_seconds,
        )

    async def close(self, grace: float = 0.0) -> None:
        """Accept no more connections, and abort those still open after `grace` seconds."""
        assert self._server is not None
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        end = asyncio.get_running_loop().time() + grace
        while self._state.connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        for connection in list(self._state.connections):
            connection.transport.abort()
        # Their handlers see a disconnect and end by themselves.
        tasks = list(self._state.tasks)
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=LAST_SECONDS)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


def _affordable(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the limit on open files as far as allowed, and limit the connections by it."""
    files = allow_files(limits.max_connections * limits.files_per_connection + RESERVED_FILES)
    usable = files - min(RESERVED_FILES, files // 2)
    max_connections = min(limits.max_connections, usable // limits.files_per_connection)
    if max_connections < limits.max_connections:
        message = "at most %d connections, not %d: the limit of open files (ulimit -n) is %d"
        log.warning(message, max_connections, limits.max_connections, files)
    return replace(limits, max_connections=max_connections)


log = logging.getLogger(__name__)
START_POLL_SECONDS = 0.05  # between polls of the engine while it starts
SERVE_POLL_SECONDS = 0.5  # the same while it serves
MOVE_POLL_SECONDS = 0.5  # between checks for requests that can be moved
ABORT_GRACE = 2.0  # seconds for aborted responses to reach their clients
QUICK_GRACE = 0.2  # the same after a second signal
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Port:
    """An app and its listening socket, with HTTPS if it has `tls`."""

    app: App
    socket: socket.socket
    tls: ssl.SSLContext | None = None


async def serve(server: Server, ports: Sequence[Port], tell: Callable[[str], None]) -> int:
    """Serve until a signal arrives or the engine fails for good.

    After the first SIGTERM, SIGINT or SIGHUP, new requests are refused. Running ones may finish for
    at most `shutdown_timeout` seconds, then end with an error. A second signal stops at once.

    Args:
        tell: prints a line for the operator.

    Returns:
        The exit code: 1 if the engine failed, so that a supervisor restarts the server.
    """
    stop = StopSignal()
    listeners = [
        Listener(port.app, port.socket, DEFAULT_LIMITS, port.app.origins.headers, port.tls)
        for port in ports
    ]
    stop.listen()
    try:
        server.engine.start(server.generations.take)
        for listener in listeners:
            await listener.start()
        failed = await _run_engine(server, stop, tell)
        if not failed:
            await _drain(server, stop, tell)
    finally:
        quick = stop.repeated.is_set()
        server.drain.start()
        server.generations.abort_all("the server is being stopped")
        await server.drain.wait(QUICK_GRACE if quick else ABORT_GRACE)
        for listener in listeners:
            await listener.close(QUICK_GRACE)
        await _close(server, QUICK_GRACE if quick else None)
        stop.close()
    return 1 if failed else 0


class StopSignal:
    """Records whether the server was asked to stop, and whether it was asked again."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.repeated = asyncio.Event()

    def listen(self) -> None:
        """Receive the signals of this process until `close`; SIGHUP unless it is ignored."""
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self.ask)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # by nohup
            # A terminal that closes may send it twice: it never counts as the second signal.
            self._loop.add_signal_handler(signal.SIGHUP, self.requested.set)

    def close(self) -> None:
        for number in (*SIGNALS, signal.SIGHUP):
            self._loop.remove_signal_handler(number)

    def ask(self) -> None:
        (self.repeated if self.requested.is_set() else self.requested).set()


async def _run_engine(server: Server, stop: StopSignal, tell: Callable[[str], None]) -> bool:
    """Wait until the server is to stop or the engine fails for good; return whether it failed."""
    ready, seconds = False, server.config.sleep_after
    while not stop.requested.is_set():
        match server.engine.state:
            case EngineState.FAILED:
                consequence = "the server ends" if ready else "the engine cannot be started"
                log.error("%s: %s", consequence, server.engine.reason)
                return True
            case EngineState.READY if not ready:
                ready = True
                tell("ready")
            case EngineState.READY if seconds is not None and server.engine.idle_seconds >= seconds:
                with suppress(UnavailableError):  # a request has come, or a replica has failed
                    await server.engine.sleep()
        with suppress(TimeoutError):
            async with asyncio.timeout(SERVE_POLL_SECONDS if ready else START_POLL_SECONDS):
                await stop.requested.wait()
    return False


async def _drain(server: Server, stop: StopSignal, tell: Callable[[str], None]) -> None:
    server.drain.start()
    seconds = server.config.shutdown_timeout
    if server.drain.num_open:
        tell(
            f"stopping: {server.drain.num_open} answers have {seconds:g} s; once more ends at once"
        )
    empty = asyncio.ensure_future(server.drain.wait(seconds))
    again = asyncio.ensure_future(stop.repeated.wait())
    moving = asyncio.ensure_future(_move(server))
    _, pending = await asyncio.wait((empty, again), return_when=asyncio.FIRST_COMPLETED)
    for task in (*pending, moving):
        task.cancel()


async def _move(server: Server) -> None:
    """Hand over running requests to other servers as soon as they can be moved."""
    while True:
        server.generations.hand_over()
        await asyncio.sleep(MOVE_POLL_SECONDS)


async def _close(server: Server, seconds: float | None) -> None:
    """Close the engine, or abandon it after `seconds`: its process ends by itself."""
    try:
        async with asyncio.timeout(seconds):
            await server.engine.close()
            await server.texts.close()
    except TimeoutError:
        log.warning("the engine process has not ended yet; it will end by itself")


# Output is written by a thread, so that a stalled reader does not block an event loop.

MAX_PENDING = 1 << 20  # bytes that wait for the reader; more are dropped, and their lines counted


class Printer:
    """A text stream that never blocks its writers.

    Args:
        fd: file to write to. Python's stream for the same file is not used: its lock would be held
            while the reader stalls.
    """

    def __init__(self, fd: int, limit: int = MAX_PENDING) -> None:
        self._fd = fd
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._size = 0  # bytes that wait or are being written
        self._num_lost = 0  # lines
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue a text for printing, or drop it and count its lines."""
        data = text.encode("utf-8", "replace")
        with self._changed:
            if self._size + len(data) > self._limit:
                self._num_lost += max(1, data.count(b"\n"))
            else:
                self._put(self._note() + data)
        return len(text)

    def tell(self, line: str) -> None:
        """Queue a line for printing."""
        self.write(f"{line}\n")

    def flush(self) -> None:
        """Do nothing: the thread prints what was written."""

    def close(self, seconds: float) -> None:
        """Wait until everything is printed, at most `seconds`."""
        with self._changed:
            self._put(self._note())
            self._changed.wait_for(lambda: not self._size, seconds)

    def _note(self) -> bytes:
        """Return the message about lost lines and reset their count."""
        lost, self._num_lost = self._num_lost, 0
        return f"{lost} lines were lost: the output was not read\n".encode() if lost else b""

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._size += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            self._print(data)
            with self._changed:
                self._size -= len(data)
                self._changed.notify_all()

    def _print(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process may have made it non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:  # the reader is gone
                return
