"""A disconnect frees the request's resources within a step, in every phase."""

from __future__ import annotations

import math
import socket
import sys
import time

import pytest
from helpers.http_server import until
from helpers.raw_http import connect, post, read_all, read_until
from helpers.served_engine import FakeExecutor
from helpers.serving import Served, served

from kvik.server.native import routes

LONG = {"prompt": "ABCDEFGH", "max_tokens": 240, "ignore_eos": True}


class Steps(FakeExecutor):
    """Runs allowed steps one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = 0.0
        self.begun = 0

    def submit(self, plan):
        self.begun += 1
        while self.begun > self.allowed:
            time.sleep(0.0005)
        return super().submit(plan)


def hang_up(sock: socket.socket, how: str) -> None:
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()


def used_blocks(server: Served) -> int:
    pool = server.inner.engine.core.scheduler.kv.pool
    return pool.num_blocks - pool.num_free


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode", "last"])
def test_running(phase, stream, how):
    """The running step may finish, and one that began before the abort arrived; then its blocks are
    free."""
    steps = Steps()
    # The prompt takes two steps: chunks of 4 tokens.
    with served(routes, steps, max_num_batched_tokens=8, max_num_seqs=8) as server:
        prompt = "ABCDEFGH" * 2
        sock = connect(server.http.port)
        body = {**LONG, "prompt": prompt, "stream": stream}
        if phase == "last":
            body["max_tokens"] = 6
        post(sock, "/v1/generate", body)
        steps.allowed = {"prefill": 1, "decode": 4, "last": 6}[phase]
        until(lambda: steps.begun == steps.allowed + 1)  # the next one has begun
        assert used_blocks(server) > 0
        hang_up(sock, how)
        until(lambda: not server.inner.generations.live)
        under_way = steps.begun

        def freed() -> bool:
            steps.allowed = steps.begun
            return used_blocks(server) == 0

        until(freed)
        assert steps.begun <= under_way + 1, "another step was begun"
        server.at_rest()
        steps.allowed = math.inf


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_queued(stream, how):
    """It never gets a slot, and the others are not affected."""
    steps = Steps()
    with served(routes, steps, max_num_seqs=1) as server:
        first, second = connect(server.http.port), connect(server.http.port)
        post(first, "/v1/generate", {**LONG, "max_tokens": 10})
        until(lambda: len(server.inner.generations.live) == 1)
        post(second, "/v1/generate", {**LONG, "stream": stream, "stop": ["x"]})
        until(lambda: len(server.inner.generations.live) == 2)
        hang_up(second, how)
        until(lambda: len(server.inner.generations.live) == 1)
        assert server.inner.admission.num_waiting == 1  # the first one, which has no token yet
        steps.allowed = math.inf
        assert b'"tokens_generated":10' in read_until(first, b"request_id")
        first.close()
        server.at_rest()
        assert steps.begun <= 12


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_pipelined(stream, how, caplog):
    """The request that runs is not the last one that came."""
    steps = Steps()
    with served(routes, steps) as server:
        sock = connect(server.http.port)
        for _ in range(3):
            post(sock, "/v1/generate", {**LONG, "stream": stream})
        steps.allowed = 4
        until(lambda: steps.begun == 5)
        hang_up(sock, how)
        if stream:
            steps.allowed = 20  # without a token to send, the system does not say that it is gone
        until(lambda: not server.inner.generations.live)
        steps.allowed = math.inf
        server.at_rest()
        assert steps.begun <= 25
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_client_gets_the_whole_answer(stream, version):
    steps = Steps()
    with served(routes, steps) as server, connect(server.http.port) as sock:
        post(sock, "/v1/generate", {**LONG, "max_tokens": 20, "stream": stream}, version)
        sock.shutdown(socket.SHUT_WR)
        until(lambda: server.inner.generations.live)
        time.sleep(0.4)  # longer than the detection of a disconnect takes
        steps.allowed = math.inf
        answer = read_all(sock)
        assert b'"tokens_generated":20' in answer
        # HTTP/1.0 has neither interim answers nor chunks.
        assert (b" 100 Continue" in answer) == (version == "1.1")
        server.at_rest()
        assert list(server.inner.watcher.ended.values()) == ["length"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.full
def test_a_half_closed_client_that_disconnects(stream):
    steps = Steps()
    with served(routes, steps) as server:
        sock = connect(server.http.port)
        post(sock, "/v1/generate", {**LONG, "stream": stream})
        sock.shutdown(socket.SHUT_WR)
        read_until(sock, b" 100 Continue")
        sock.close()
        until(lambda: not server.inner.generations.live)
        steps.allowed = math.inf


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="keepalive is set on Linux alone")
def test_a_client_of_http_1_0_that_leaves_is_noticed_by_its_silence():
    """It cannot be sent an interim answer, by which a disconnect would be detected."""
    steps = Steps()
    with served(routes, steps) as server:
        sock = connect(server.http.port)
        # Otherwise the kernel answers for the ended program for a minute.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
        post(sock, "/v1/generate", LONG, "1.0")
        until(lambda: server.inner.generations.live)
        sock.close()
        until(lambda: not server.inner.generations.live, 30.0)
        steps.allowed = math.inf


@pytest.mark.parametrize("stream", [True, False])
def test_a_storm_of_disconnects_and_reconnects(stream):
    """The limits of the queue hold, and nothing is left."""
    with served(routes, FakeExecutor(seconds=0.001), max_requests=16) as server:
        for round_ in range(20):
            socks = [connect(server.http.port) for _ in range(12)]
            for sock in socks:
                post(sock, "/v1/generate", {**LONG, "stream": stream})
            if round_ % 3 == 0:
                socks[0].recv(100) if stream else time.sleep(0.002)
            for i, sock in enumerate(socks):
                hang_up(sock, "reset" if i % 2 else "close")
        server.at_rest()
        until(lambda: not server.inner.admission.num_waiting)  # bodies that were just read


def test_before_the_body_is_complete():
    with served(routes) as server:
        sock = connect(server.http.port)
        sock.sendall(
            b"POST /v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        sock.close()
        server.at_rest()
        assert not server.inner.watcher.arrived_ids


def test_text_of_another_client_continues():
    steps = Steps()
    with served(routes, steps) as server:
        stays, goes = connect(server.http.port), connect(server.http.port)
        post(stays, "/v1/generate", {**LONG, "stream": True})
        post(goes, "/v1/generate", {**LONG, "stream": True})
        until(lambda: len(server.inner.generations.live) == 2)
        steps.allowed = 20
        read_until(goes, b'"text"')
        hang_up(goes, "reset")
        until(lambda: len(server.inner.generations.live) == 1)
        steps.allowed = math.inf
        assert b'"tokens_generated":240' in read_until(stays, b"request_id")
        stays.close()
        server.at_rest()
        assert sorted(server.inner.watcher.ended.values()) == ["abort", "length"]
