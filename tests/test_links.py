"""Connections between machines: authentication by a token."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvik.links import Address, Handshake, LinkError, LinkListener, connect, hang_up

HERE, TOKEN = "127.0.0.1", b"t" * 32


@pytest.fixture
def listener():
    made = LinkListener(HERE, TOKEN)
    yield made
    made.close()


def accept(listener: LinkListener):
    return ThreadPoolExecutor(1).submit(listener.accept, 30.0)


def test_authenticated_connections_are_distinguished_by_their_hello(listener) -> None:
    waiting = accept(listener)
    handshake = Handshake("line", 3, Address("10.0.0.1", 80))
    line = connect(listener.address, TOKEN, handshake)
    found, other = waiting.result()
    assert found == handshake
    line.send_bytes(b"x" * 100_000)
    assert other.recv_bytes() == b"x" * 100_000


@pytest.mark.parametrize("sent", [b"", b"x" * 200, b"GET / HTTP/1.1\r\n\r\n" * 4])
def test_other_connections_are_refused_at_no_cost(listener, sent: bytes) -> None:
    """Connections after them are accepted."""
    with socket.create_connection((HERE, listener.address.port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        waiting = accept(listener)
        connect(listener.address, TOKEN, Handshake("line", 0)).close()
        assert waiting.result()[0].stage == 0


def test_a_wrong_token_is_one_error_on_its_side(listener) -> None:
    waiting = accept(listener)
    with pytest.raises(LinkError, match="has refused this process"):
        connect(listener.address, b"u" * 32, Handshake("line", 1))
    connect(listener.address, TOKEN, Handshake("line", 0)).close()
    assert waiting.result()[0].stage == 0


def test_a_listener_that_does_not_know_the_token_is_left() -> None:
    """An unknown listener at that address learns nothing."""
    with socket.create_server((HERE, 0)) as server:

        def pretend() -> None:
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"n" * 32)
                peer.recv(64, socket.MSG_WAITALL)
                peer.sendall(b"p" * 32)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(LinkError, match="does not know the token"):
            connect(Address(*server.getsockname()), TOKEN, Handshake("line", 0))


def test_another_version_is_refused_by_name(listener) -> None:
    waiting = accept(listener)
    connect(listener.address, TOKEN, Handshake("line", 2, version="9.9"))
    with pytest.raises(LinkError, match="stage 2 has kvik 9.9, and the engine "):
        waiting.result()


def test_a_missing_listener_is_one_error() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    for host in (HERE, "no..name"):
        with pytest.raises(LinkError, match=f"cannot reach {host}:{port}"):
            connect(Address(host, port), TOKEN, Handshake("line", 0))


def test_closing_ends_the_wait_of_another_thread(listener) -> None:
    waiting = accept(listener)
    connect(listener.address, TOKEN, Handshake("line", 0))
    _, line = waiting.result()
    reading = ThreadPoolExecutor(1).submit(line.recv_bytes)
    time.sleep(0.05)
    hang_up(line)
    with pytest.raises(EOFError):
        reading.result(5)
