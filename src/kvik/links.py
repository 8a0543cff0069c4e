"""Connections between the processes of an engine that may be on different machines.

The listener and the connecting process prove to each other that they know a token, by an HMAC over
nonces of both; then the connecting process identifies itself. TCP keep-alive detects a lost machine
or network within `SILENT_SECONDS`.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection

import msgspec

from kvik.version import __version__

PROVING_SECONDS = 5.0  # limit for the handshake
SILENT_SECONDS = 8
NONCE, PROOF = 32, 32  # bytes
_LARGEST_HANDSHAKE = 1 << 12


class Address(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int


class Handshake(msgspec.Struct, frozen=True, array_like=True):
    """Identifies the connecting process."""

    role: str  # what the connection is for
    stage: int  # number of the process's stage
    hop: Address | None = None  # address at which it listens for the stage before it
    version: str = __version__  # of kvik


class LinkError(Exception):
    """A connection cannot be made; the message says why."""


class LinkListener:
    """Accepts connections from processes that know the token."""

    def __init__(self, host: str, token: bytes, port: int = 0) -> None:
        """
        Args:
            host: the only address of this machine to listen at.
            port: 0: any free port.
        """
        self._token = token
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except UnicodeError as error:
            raise OSError(errno.EINVAL, f"it is no host name: {error}") from None
        self.address = Address(*self._socket.getsockname()[:2])  # where it listens

    def accept(self, seconds: float) -> tuple[Handshake, Connection]:
        """Return the next connection. Peers that do not know the token are rejected.

        Raises:
            TimeoutError: no peer connected in time.
            LinkError: the peer has another version of kvik.
        """
        end = time.monotonic() + seconds
        while (seconds_left := end - time.monotonic()) > 0:
            admitted = self.admit(self.next_peer(seconds_left), seconds_left)
            if admitted is not None:
                return admitted
        raise TimeoutError

    def next_peer(self, seconds: float) -> socket.socket:
        """Return the next connection, which may be anybody's; raise TimeoutError if none came."""
        self._socket.settimeout(seconds)
        return self._socket.accept()[0]

    def admit(
        self, peer: socket.socket, seconds: float = inf
    ) -> tuple[Handshake, Connection] | None:
        """Return who connected; None: it did not prove in time that it knows the token, and was
        turned away.

        Args:
            seconds: limit for each of its messages, at most `PROVING_SECONDS`.

        Raises:
            LinkError: another version of kvik.
        """
        peer.settimeout(min(seconds, PROVING_SECONDS))
        try:
            handshake = _admit(peer, self._token)
        except (OSError, LinkError, msgspec.MsgspecError):
            peer.close()
            return None
        if handshake.version != __version__:
            peer.close()
            version = handshake.version
            reason = f"stage {handshake.stage} has kvik {version}, and the engine {__version__}"
            raise LinkError(f"{reason}: install one version on all machines")
        return handshake, _watched(peer)

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, token: bytes, handshake: Handshake) -> Connection:
    """Connect to a listener.

    Raises:
        LinkError: the listener cannot be reached, or one side does not know the token.
    """
    where = f"{address.host}:{address.port}"
    try:
        peer = socket.create_connection((address.host, address.port), PROVING_SECONDS)
    except OSError as error:
        raise LinkError(f"cannot reach {where}: {error.strerror or error}") from None
    except UnicodeError as error:
        raise LinkError(f"cannot reach {where}: it is no host name ({error})") from None
    try:
        theirs, ours = _read(peer, NONCE), secrets.token_bytes(NONCE)
        peer.sendall(ours + _proof(token, b"connects", theirs, ours))
        if not hmac.compare_digest(_read(peer, PROOF), _proof(token, b"listens", theirs, ours)):
            raise LinkError(f"{where} does not know the token")
        data = msgspec.msgpack.encode(handshake)
        peer.sendall(len(data).to_bytes(4, "big") + data)
    except OSError as error:
        peer.close()
        raise LinkError(f"{where} has refused this process ({error})") from None
    except LinkError:
        peer.close()
        raise
    return _watched(peer)


def _admit(peer: socket.socket, token: bytes) -> Handshake:
    """Do the listener's side of the handshake.

    Raises:
        OSError, LinkError, MsgspecError: the peer does not know the token or the protocol.
    """
    ours = secrets.token_bytes(NONCE)
    peer.sendall(ours)
    theirs, proof = _read(peer, NONCE), _read(peer, PROOF)
    if not hmac.compare_digest(proof, _proof(token, b"connects", ours, theirs)):
        raise LinkError("does not know the token")
    peer.sendall(_proof(token, b"listens", ours, theirs))
    size = int.from_bytes(_read(peer, 4), "big")
    if size > _LARGEST_HANDSHAKE:
        raise LinkError("sent too much")
    return msgspec.msgpack.decode(_read(peer, size), type=Handshake)


def _proof(token: bytes, side: bytes, listener: bytes, other: bytes) -> bytes:
    return hmac.digest(token, side + listener + other, hashlib.sha256)


def _read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return data


def _watched(peer: socket.socket) -> Connection:
    """Return an unbuffered (TCP_NODELAY) connection that breaks if the peer is silent."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, SILENT_SECONDS // 4),
            (socket.TCP_KEEPINTVL, SILENT_SECONDS // 4),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000),
        ):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(peer.detach())


def host_of(line: Connection) -> str:
    """Return the address of the other side of a connection; "": it has gone."""
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as peer:
        return str(peer.getpeername()[0])
    return ""


def hang_up(line: Connection) -> None:
    """End a connection; a thread that waits on it gets EOF."""
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as peer:
        peer.shutdown(socket.SHUT_RDWR)
