"""HTTP over a bare socket, for clients that behave unlike any library."""

from __future__ import annotations

import json
import socket
from typing import Any

RECEIVE = 1 << 18


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """Connect to a port; `receive_buffer` is the size of the kernel's buffer in bytes."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(30)
    sock.connect(("127.0.0.1", port))
    return sock


def post(sock: socket.socket, path: str, body: Any, version: str = "1.1", key: str = "") -> None:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    sock.sendall(head.encode() + data)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """Read up to the first `mark`, and return all data received."""
    data = bytearray()
    while data.find(mark, max(0, len(data) - RECEIVE - len(mark))) < 0:
        more = sock.recv(RECEIVE)
        if not more:
            raise EOFError(f"the connection ended after {len(data)} bytes")
        data += more
    return bytes(data)


def read_all(sock: socket.socket) -> bytes:
    """Read until the connection ends or breaks."""
    data = bytearray()
    try:
        while more := sock.recv(RECEIVE):
            data += more
    except ConnectionResetError:
        pass
    return bytes(data)
