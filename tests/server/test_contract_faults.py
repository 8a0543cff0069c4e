"""Failures behind a running server, as its clients see them."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.http_server import Listening, Reply, ask, until
from helpers.raw_http import connect, post, read_all, read_until
from helpers.served_engine import FakeExecutor
from helpers.server_process import ServerProcess, gone, server_process
from helpers.serving import served
from helpers.story_site import Site, site_fixture

from kvik.server import health
from kvik.server.app import openai_routes as openai

pytestmark = pytest.mark.usefixtures("forked")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True}
SHORT = {"prompt": "The fox", "max_tokens": 8, "temperature": 0, "seed": 1}
RETRY = "x-should-retry"
NUM_RUNNING = 60  # enough that their steps take seconds in total
SIZES = ("--max-num-seqs", str(NUM_RUNNING), "--max-model-len", "1024")


site = site_fixture()


@pytest.fixture(autouse=True, scope="module")
def expected(site: Site) -> str:
    """Return the text of the undisturbed engine."""
    return said(site.server)


def said(server: Listening) -> str:
    reply = ask(server, "POST", "/v1/completions", SHORT)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


# Failures in one step


@dataclass
class Graph:
    """The model's forward pass, which fails in its call of this number from now."""

    genuine: Callable[[Any], Any]
    fails_at: int
    spoil: Callable[[Any], None]
    calls: int = 0

    def run(self, batch: Any) -> Any:
        self.calls += 1
        output = self.genuine(batch)
        if self.calls == self.fails_at:
            self.spoil(output)
        return output


def out_of_memory(output: Any) -> None:
    raise MemoryError("out of memory: tried to allocate 20.00 GiB")


def lost_device(output: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def no_numbers(output: Any) -> None:
    output.logits[:] = output.top[:] = float("nan")


FAULTS = [out_of_memory, lost_device, no_numbers]


def break_step(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int, spoil: Callable[[Any], None]
) -> None:
    executor: Any = site.engine.executor
    graph = executor._runner.graph
    monkeypatch.setattr(graph, "run", Graph(graph.run, number, spoil).run)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/generate"])
@pytest.mark.parametrize("spoil", FAULTS)
def test_a_failed_step_only_ends_its_requests(
    site: Site, monkeypatch: pytest.MonkeyPatch, expected: str, spoil: Any, path: str
) -> None:
    before = ended(site, "error")
    break_step(site, monkeypatch, 20, spoil)
    reply = ask(site.server, "POST", path, LONG)
    assert reply.status == 500
    assert reply.headers[RETRY] == "false"  # a retry would break another step
    assert (reply.error["type"], reply.error["code"]) == ("server_error", "engine_error")
    assert ask(site.server, "GET", "/health").status == 200
    assert said(site.server) == expected
    assert ended(site, "error") == before + 1
    site.at_rest()


def ended(site: Site, reason: str) -> float:
    text = ask(site.server, "GET", "/metrics").body.decode()
    rows = [r for r in text.splitlines() if r.startswith("kvik:request_success_total")]
    (row,) = [r for r in rows if f'finished_reason="{reason}"' in r]
    return float(row.split()[-1])


def test_an_engine_whose_steps_all_fail_is_abandoned() -> None:
    """The failed requests get its error; the next ones are asked to retry."""

    class Lost(FakeExecutor):
        def submit(self, plan: Any) -> object:
            raise RuntimeError("device lost")

    routes = [openai, health.routes]
    with served(lambda parts: [r for each in routes for r in each(parts)], Lost()) as server:
        body = {"prompt": [1, 2], "max_tokens": 4}
        for _ in range(3):
            reply = ask(server.http, "POST", "/v1/completions", body)
            assert (reply.status, reply.headers[RETRY]) == (500, "false")
        until(lambda: ask(server.http, "GET", "/health").status != 200)
        for _ in range(3):
            reply = ask(server.http, "POST", "/v1/completions", body)
            answer = (reply.status, reply.headers[RETRY], reply.headers["retry-after"])
            assert answer == (503, "true", "1")
        assert [reason for _, reason in server.inner.watcher.refusals] == ["unavailable"] * 3
        for path in ("/health", "/ready", "/ping"):
            assert ask(server.http, "GET", path).status == 503
        assert not server.inner.generations.live


# The clock


@pytest.mark.full
@pytest.mark.parametrize("jump", [3.2e8, -3.2e8])
def test_a_clock_that_jumps_ends_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, expected: str, jump: float
) -> None:
    """Deadlines and limits count elapsed seconds, not the time of day."""
    genuine = time.time
    with ThreadPoolExecutor() as pool:
        body = {**LONG, "deadline_ms": 60_000}
        running = pool.submit(ask, site.server, "POST", "/v1/completions", body)
        monkeypatch.setattr(time, "time", lambda: genuine() + jump)
        reply = running.result()
    assert reply.status == 200
    assert reply.json["usage"]["completion_tokens"] == 300
    assert said(site.server) == expected
    assert ask(site.server, "GET", "/health").status == 200
    site.at_rest()


# The process of the engine


@linux
@pytest.mark.full
def test_an_engine_process_that_is_killed_is_replaced() -> None:
    with server_process(*SIZES) as server:
        text, pid = said(server), server.engine_pid
        for number in (signal.SIGKILL, signal.SIGSEGV):
            with ThreadPoolExecutor() as pool:
                stream, whole = under_way(server, pool)
                waits = pool.submit(said, server)
                until(lambda: server.metrics()["num_requests_waiting"] == 1)
                os.kill(pid, number)
                reply = whole.result()
                assert reply.status == 503  # no part of it was sent
                assert (reply.headers[RETRY], reply.headers["retry-after"]) == ("true", "1")
                assert reply.error["code"] == "engine_error"
                assert waits.result() == text
                pid = server.engine_pid
            events = read_until(stream, b"\r\n0\r\n\r\n")  # the answer is complete
            assert b"engine_error" in events
            assert b"[DONE]" not in events
            stream.close()
            # While there is no engine
            os.kill(pid, number)
            while (health := ask(server, "GET", "/health")).status == 200:
                time.sleep(0.01)
            assert health.json["reason"]
            assert ask(server, "GET", "/version").status == 200
            refused = ask(server, "POST", "/v1/completions", SHORT)
            assert refused.status == 503
            assert (refused.headers[RETRY], refused.headers["retry-after"]) == ("true", "1")
            # Afterwards
            server.wait_ready()
            assert said(server) == text
            assert server.engine_pid != pid
            pid = server.engine_pid
            assert server.metrics()["kv_cache_usage_perc"] == 0.0
        assert server.metrics()["engine_starts_total"] == 5


@linux
@pytest.mark.full
@pytest.mark.usefixtures("fresh")
def test_an_engine_is_replaced_though_the_folder_of_the_server_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with server_process(*SIZES) as server:
        monkeypatch.chdir(tmp_path)
        folder.rmdir()
        text, pid = said(server), server.engine_pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.metrics()["engine_starts_total"] == 2)
        server.wait_ready()
        assert said(server) == text


@linux
@pytest.mark.full
def test_an_idle_engine_ends_and_requests_start_it_again() -> None:
    with server_process(*SIZES, "--sleep-after", "0.2") as server:
        for starts in (1, 2):
            text, pid = said(server), server.engine_pid
            until(lambda: b'sleep_state="discard_all"} 1' in server.get("/metrics")[1])
            until(partial(gone, pid))
            assert server.metrics()["engine_starts_total"] == starts
            assert ask(server, "GET", "/ready").status == 200
            with ThreadPoolExecutor(4) as pool:
                assert set(pool.map(said, [server] * 4)) == {text}


@linux
@pytest.mark.full
def test_a_server_whose_engine_crashes_repeatedly_ends() -> None:
    with server_process("--max-num-seqs", "4", exit_code=1) as server:
        for _ in range(5):
            server.wait_ready()
            pid, deadline = server.engine_pid, time.monotonic() + 30
            os.kill(pid, signal.SIGKILL)
            while server.process.poll() is None:
                with suppress(OSError, ValueError):  # there is none
                    if server.engine_pid != pid:
                        break
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert server.process.wait(30) == 1


def under_way(
    server: ServerProcess, pool: ThreadPoolExecutor
) -> tuple[socket.socket, Future[Reply]]:
    """Provide a stream and a request without streaming that have begun but not ended."""
    stream = connect(server.port)
    body = {**LONG, "max_tokens": 1000, "n": NUM_RUNNING // 2}
    post(stream, "/v1/completions", {**body, "stream": True})
    read_until(stream, b"data: ")
    whole = pool.submit(ask, server, "POST", "/v1/completions", body)
    until(lambda: server.metrics()["num_requests_running"] == NUM_RUNNING)
    return stream, whole


# The end of the server


@pytest.mark.full
@pytest.mark.parametrize(
    ("seconds", "signals"), [("0.5", 1), ("100", 2)], ids=["too slow", "impatient"]
)
def test_a_truncated_stream_ends_with_an_error(seconds: str, signals: int) -> None:
    flags = ("--max-num-seqs", "1", "--max-model-len", "512", "--shutdown-timeout", seconds)
    with server_process(*flags) as server:
        stream = connect(server.port)
        post(stream, "/v1/completions", {**LONG, "stream": True, "max_tokens": 480, "n": 64})
        text = read_until(stream, b"data: ")
        start = time.monotonic()
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        text += read_all(stream)
        assert server.process.wait(30) == 0
        assert time.monotonic() - start < 20
        stream.close()
        last = text.decode().rpartition("data: ")[2].partition("\n\n")[0]
        assert json.loads(last)["error"]["code"] == "aborted"
        assert b"[DONE]" not in text
        with pytest.raises(OSError):
            server.get("/health")
