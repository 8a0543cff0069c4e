"""The two ends of the socket between client and engine: in an event loop, and in a step loop."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Callable

from kvik.engine.wire import Frames, FromEngine, Outbox, from_engine

log = logging.getLogger(__name__)

MAX_PENDING = 64 << 20  # bytes that wait for a client; beyond, the engine waits for him
LAST_WORDS_SECONDS = 1.0


class HostLine:
    """The engine's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = Frames()
        self._outbox = Outbox()
        self._poll = select.poll()

    def receive(self, timeout: float | None) -> list[bytes]:
        """Bodies of the frames that have come; waits up to `timeout` seconds for some, without end
        if it is None.

        Raises:
            EOFError: the other side is gone.
            WireError: it sent what is no frame.
        """
        if timeout != 0 or self._outbox:
            self._wait(timeout)
            while len(self._outbox) > MAX_PENDING:
                self._wait(None, select.POLLOUT)
        bodies, open = self._frames.receive(self._sock)
        if not open and not bodies:
            raise EOFError
        return bodies

    def send(self, data: bytes) -> None:
        """Send a frame, or keep it until it can be sent. Raises EOFError as `receive`."""
        try:
            self._outbox.send(self._sock, data)
        except OSError:
            raise EOFError from None

    def close(self) -> None:
        """Hang up, after what is left has been sent, if somebody reads it."""
        try:
            left = 0
            while self._outbox and len(self._outbox) != left:
                left = len(self._outbox)
                self._wait(LAST_WORDS_SECONDS, select.POLLOUT)
        except EOFError:
            pass
        self._sock.close()

    def _wait(self, timeout: float | None, events: int = select.POLLIN) -> None:
        """Until there is something to read, or room to write what is pending."""
        self._poll.register(self._sock, events | (select.POLLOUT if self._outbox else 0))
        self._poll.poll(None if timeout is None else -(-timeout // 0.001))
        try:
            self._outbox.flush(self._sock)
        except OSError:
            raise EOFError from None


class ClientLine:
    """A socket in the event loop: frames out, messages in."""

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[list[FromEngine]], None],
        lost: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._take, self._lost = take, lost
        self._frames, self._outbox = Frames(), Outbox()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self._open, self._writing = True, False

    @property
    def num_pending(self) -> int:
        return len(self._outbox)

    def send(self, data: bytes) -> None:
        try:
            self._outbox.send(self._sock, data)
        except OSError:
            return  # its end is readable, and will be told
        if self._outbox and not self._writing:
            self._loop.add_writer(self._sock, self._writable)
            self._writing = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _readable(self) -> None:
        try:
            bodies, open = self._frames.receive(self._sock)
            if bodies:
                self._take([from_engine.decode(body) for body in bodies])
            if not open and self._open:
                self._lost("the engine has ended unexpectedly")
        except Exception as error:
            log.exception("the engine cannot be understood")
            self._lost(f"the engine cannot be understood: {error}")

    def _writable(self) -> None:
        try:
            self._outbox.flush(self._sock)
        except OSError:
            return
        finally:
            if not self._outbox and self._open:
                self._loop.remove_writer(self._sock)
                self._writing = False
