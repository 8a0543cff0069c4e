"""The link between the HTTP process and the engine process: frames on one stream socket.

A frame is its length, 4 bytes little-endian, and a message in msgpack. Neither side blocks:
`FrameReader` turns received bytes into frames, `SendBuffer` keeps bytes that the socket does not
accept yet. `ClientSocket` is the end in the event loop of the HTTP process, `HostSocket` the end in
the step loop of the engine.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from kvik.config.config import ResolvedConfig
from kvik.core.routing import ReplicaReport
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.spec.adapters import Adapter

log = logging.getLogger(__name__)

MAX_FRAME = 256 << 20  # bytes; a prompt of ten million tokens is a fifth of it
_HEADER = struct.Struct("<I")
_RECEIVE = 1 << 18  # bytes; a socket holds less
_READS = 8  # in a row, so that a fast writer cannot take all of the reader's time
MAX_VALUES = 8192  # log probabilities of a prompt in a frame: a millisecond or two to decode


class WireError(Exception):
    """The other side sent an invalid frame; later bytes cannot be read either."""


# -- to the engine ---------------------------------------------------------------------------------


class EngineStart(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The first frame: what to load."""

    config: ResolvedConfig
    record: str | None = None  # file of the flight recorder; None: nothing is recorded
    cores: tuple[int, ...] = ()  # cores of the engine; (): those that its parent may use
    reports: bool = False  # the client gets `Report` after steps
    token: bytes = b""  # secret shared by engines that exchange pages; b"": there are none


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Add a request."""

    request_id: str
    n: int  # number of its siblings, each of which must end
    # An `EngineRequest`, encoded separately: if it cannot be decoded, the request still ends with
    # an error.
    request: msgspec.Raw


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """End a request, or one of its siblings."""

    request_id: str
    index: int | None
    reason: FinishReason
    error: str | None


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag="hand"):
    """Let another engine continue a request; its last delta holds the `Handover`."""

    request_id: str


class Query(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Ask the engine a question by name; the `Reply` has the same ticket."""

    ticket: int
    question: str
    adapters: tuple[Adapter, ...] = ()  # what "set_adapters" sets


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="credit"):
    """The service that tenants got from other engines of the router (`FairShare.credit`)."""

    served: dict[str, int]


ToEngine = Add | End | HandOver | Query | Credit  # after `EngineStart`


# -- from the engine -------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""


class Unusable(msgspec.Struct, frozen=True, array_like=True, tag="unusable"):
    """The model cannot be loaded, and a retry would not help: the fields of a `KvikError`."""

    field: str
    message: str


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """This engine computes no further step; another one may."""

    error: str  # of the requests that end with it
    waiting: list[str]  # ids of requests for which no step has computed anything


class Stepped(msgspec.Struct, array_like=True, tag="stepped"):
    """The deltas of one iteration of the step loop.

    Most deltas have only tokens. They are sent as columns, which is several times faster, and
    precede `rows`.
    """

    plans: int  # made since the engine started; it grows while the engine makes progress
    waits: bool  # requests wait because the policy waits for more of them
    ids: Sequence[str] = ()  # of the deltas that have only tokens
    indexes: Sequence[int] = ()  # likewise
    tokens: Sequence[list[int]] = ()  # likewise
    rows: Sequence[RequestDelta] = ()  # all other deltas

    def deltas(self) -> list[RequestDelta]:
        """Return all deltas, in order."""
        columns = zip(self.ids, self.indexes, self.tokens, strict=True)
        deltas = [RequestDelta(id, index, tokens) for id, index, tokens in columns]
        deltas += self.rows
        return deltas


class StepLimit(msgspec.Struct, frozen=True, array_like=True, tag="limit"):
    """From now on the engine counts as hung when a step takes longer than `seconds`."""

    seconds: float


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The encoded answer to a `Query`; or the `error` why there is none."""

    ticket: int
    body: msgspec.Raw
    error: str | None = None
    field: str = ""  # of a `ParamError`; "": it is another error


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """A report for a router, if the client wants reports."""

    report: ReplicaReport


FromEngine = Ready | Unusable | Lost | Stepped | StepLimit | Reply | Report

to_start = msgspec.msgpack.Decoder(EngineStart)
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
engine_request = msgspec.msgpack.Decoder(EngineRequest)
encode = msgspec.msgpack.Encoder().encode


def stepped(plans: int, waits: bool, deltas: Sequence[RequestDelta]) -> Stepped:
    """Make a message of deltas: columns for those that have only tokens, and rows."""
    ids: list[str] = []
    indexes: list[int] = []
    tokens: list[list[int]] = []
    rows: list[RequestDelta] = []
    for delta in deltas:
        if delta.prompt_logprobs is not None:  # these must stay before the first token
            return Stepped(plans, waits, rows=deltas)
        if delta.finish_reason is None and delta.logprobs is None and delta.prompt is None:
            ids.append(delta.request_id)
            indexes.append(delta.index)
            tokens.append(delta.token_ids)
        else:
            rows.append(delta)
    return Stepped(plans, waits, ids, indexes, tokens, rows)


def split_logprobs(delta: RequestDelta) -> Iterator[RequestDelta]:
    """Split the log probabilities of a long prompt over several deltas, so that the reader's event
    loop serves other requests in between. The last one has the rest of the delta."""
    logprobs = delta.prompt_logprobs or []
    length = max(1, MAX_VALUES // (1 + len(logprobs[-1].top))) if logprobs else 1
    while len(logprobs) > length:
        piece, logprobs = logprobs[:length], logprobs[length:]
        yield RequestDelta(delta.request_id, delta.index, [], prompt_logprobs=piece)
    yield replace(delta, prompt_logprobs=logprobs) if logprobs else delta


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message as a frame.

    Raises:
        Exception: something in it cannot be encoded, or it is too long.
    """
    body = encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body)} bytes; at most {MAX_FRAME} can be sent")
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Turns received bytes into the bodies of complete frames."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._rest = bytearray()
        # `recv` would allocate this size for each frame, and the heap would grow around the frames.
        self._buffer = memoryview(bytearray(_RECEIVE))

    def receive(self, sock: socket.socket) -> tuple[list[bytes], bool]:
        """Return the frames that are complete now, and whether the connection is still open.

        Reads until there is nothing more: some event loops report the end of a connection once,
        together with the last data.

        Raises:
            WireError: a frame is too long.
        """
        bodies: list[bytes] = []
        for _ in range(_READS):
            try:
                size = sock.recv_into(self._buffer)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                return bodies, False
            if not size:
                return bodies, False
            bodies += self.feed(bytes(self._buffer[:size]))
        return bodies, True

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete with `data`."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._next_size():
                return []
            data = bytes(self._rest)
        bodies, at = [], 0
        while len(data) - at >= 4:
            (size,) = _HEADER.unpack_from(data, at)
            if size > self._limit:
                raise WireError(f"a frame of {size} bytes; at most {self._limit} are allowed")
            if len(data) - at - 4 < size:
                break
            bodies.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        self._rest = bytearray(data[at:])
        return bodies

    def _next_size(self) -> int:
        """Return the size of the first frame, so that a long one is copied once, not with each
        part."""
        if len(self._rest) < 4:
            return 4
        size: int = _HEADER.unpack_from(self._rest)[0]
        return 4 + min(size, self._limit)


class SendBuffer:
    """Bytes of frames that a non-blocking socket has not accepted."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def __len__(self) -> int:
        """Number of bytes that the socket has not accepted."""
        return len(self._pending)

    def send(self, sock: socket.socket, data: bytes) -> None:
        """Send as much of a frame as the socket accepts, and keep the rest. Raises OSError if the
        connection is closed."""
        if not self._pending:
            sent = _send(sock, data)
            if sent == len(data):
                return
            data = data[sent:]
        self._pending += data

    def flush(self, sock: socket.socket) -> None:
        """Send as much of the kept bytes as the socket accepts. Raises OSError as `send`."""
        while self._pending:
            with memoryview(self._pending) as view:
                sent = _send(sock, view[:_RECEIVE])
            if not sent:
                return
            del self._pending[:sent]


def _send(sock: socket.socket, data: bytes | memoryview) -> int:
    try:
        return sock.send(data)
    except (BlockingIOError, InterruptedError):
        return 0


# -- the two ends of the socket --------------------------------------------------------------------

MAX_UNSENT = 64 << 20  # bytes that wait for the client; beyond, the engine waits for it
CLOSE_SECONDS = 1.0  # without progress, until unsent bytes are dropped


class HostSocket:
    """The engine's end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameReader()
        self._outbox = SendBuffer()
        self._poll = select.poll()

    def receive(self, timeout: float | None) -> list[bytes]:
        """Return the bodies of the frames received.

        Args:
            timeout: seconds to wait for some; None: without limit.

        Raises:
            EOFError: the client has closed the connection.
            WireError: it sent an invalid frame.
        """
        if timeout != 0 or self._outbox:
            self._wait(timeout)
            while len(self._outbox) > MAX_UNSENT:
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
        """Close the socket, after sending unsent bytes as long as the client reads them."""
        try:
            num_unsent = 0
            while self._outbox and len(self._outbox) != num_unsent:
                num_unsent = len(self._outbox)
                self._wait(CLOSE_SECONDS, select.POLLOUT)
        except EOFError:
            pass
        self._sock.close()

    def _wait(self, timeout: float | None, events: int = select.POLLIN) -> None:
        """Wait until there is something to read, or unsent bytes can be written."""
        self._poll.register(self._sock, events | (select.POLLOUT if self._outbox else 0))
        self._poll.poll(None if timeout is None else -(-timeout // 0.001))
        try:
            self._outbox.flush(self._sock)
        except OSError:
            raise EOFError from None


class ClientSocket:
    """The HTTP process's end of the socket.

    Args:
        take: takes the messages received at once.
        lost: takes the reason why the connection cannot be used any more.
    """

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[list[FromEngine]], None],
        lost: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._take, self._lost = take, lost
        self._frames, self._outbox = FrameReader(), SendBuffer()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self._open, self._writing = True, False

    @property
    def num_unsent(self) -> int:
        """Bytes that the engine has not received."""
        return len(self._outbox)

    def send(self, data: bytes) -> None:
        """Send a frame, or keep it until it can be sent."""
        try:
            self._outbox.send(self._sock, data)
        except OSError:
            return  # `_readable` finds the end of the connection
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
            log.exception("the engine sent an invalid message")
            self._lost(f"the engine sent an invalid message: {error}")

    def _writable(self) -> None:
        try:
            self._outbox.flush(self._sock)
        except OSError:
            return
        finally:
            if not self._outbox and self._open:
                self._loop.remove_writer(self._sock)
                self._writing = False
