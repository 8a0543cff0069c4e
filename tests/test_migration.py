"""`kvik route` in front of two servers of which one stops: its requests continue on the other."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

import pytest
from helpers.http_server import ask, until
from helpers.optional_native import needs_native
from helpers.server_process import ServerProcess, children, gone, server_process
from test_prefill_decode import COMMON as BUNDLED
from test_prefill_decode import moves, route

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("forked")]

COMMON = (*BUNDLED, "--served-model-name", "m")
TIER = ("--kv-tiers", "memory:64MiB")
TOKENS = 800  # enough that not all end before a test has seen them running
CHAT = {"messages": [{"role": "user", "content": "Tell of \u00e9\U0001f600 a king"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"temperature": 0}),
    "seeded": ("/v1/completions", {"temperature": 1.3, "top_p": 0.99, "seed": 5}),
    "stop": ("/v1/completions", {"temperature": 0, "stop": ["never to be met", "zzzz"]}),
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "message": ("/v1/messages", {**CHAT, "temperature": 0}),
    "native": ("/v1/generate", {"prompt": "A bear", "temperature": 0, "ignore_eos": True}),
    "scored": ("/v1/completions", {"temperature": 0, "logprobs": 2}),
    "several": ("/v1/completions", {"temperature": 1.0, "seed": 7, "n": 3}),
    # Some of these have ended when the others move.
    "ends": ("/v1/completions", {"temperature": 1.0, "seed": 8, "n": 4, "stop": ["the", "."]}),
    "scored chat": (
        "/v1/chat/completions",
        {**CHAT, "temperature": 1.0, "seed": 9, "n": 2, "logprobs": True, "top_logprobs": 1},
    ),
}


def body_of(kind: str, seed: int, *, stream: bool) -> tuple[str, dict[str, Any]]:
    path, options = KINDS[kind]
    body = {"max_tokens": TOKENS, "stream": stream, **options}
    if path != "/v1/messages":
        body["ignore_eos"] = True
    else:
        body["model"] = "m"
    if path == "/v1/completions":
        words = random.Random(seed).choices(["king", "fox", "river", "gold", "old"], k=100)
        body["prompt"] = " ".join(words)
    if stream and path in ("/v1/completions", "/v1/chat/completions"):
        body["stream_options"] = {"include_usage": True}
    return path, body


def without_ids(value: Any) -> Any:
    """Return an answer without the fields that differ between any two answers."""
    own = ("id", "created", "request_id", "cached_tokens", "latency_ms", "tokens_per_second")
    if isinstance(value, dict):
        return {name: without_ids(part) for name, part in value.items() if name not in own}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


class Client(threading.Thread):
    """Sends a request, and records the answer: an object, or the events of a stream."""

    def __init__(self, front: Any, kind: str, seed: int, *, stream: bool) -> None:
        super().__init__()
        self.front, self.stream = front, stream
        self.path, self.body = body_of(kind, seed, stream=stream)
        self.events: list[Any] = []
        self.error = ""
        self.begun = threading.Event()

    def run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.front.port, timeout=600)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", self.path, json.dumps(self.body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self.error = f"{answer.status} {answer.read()!r}"
            elif not self.stream:
                self.events.append(json.loads(answer.read()))
            else:
                rest = b""
                while part := answer.read1(1 << 16):  # raises if the answer is cut off
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        self._take(line)
        except Exception as error:
            self.error = repr(error)
        finally:
            connection.close()

    def _take(self, line: bytes) -> None:
        assert b"kvik-moved" not in line
        if line.startswith(b"data: {"):
            self.events.append(json.loads(line[6:]))
            self.error += str(self.events[-1].get("error", ""))
            if len(self.events) > 2:
                self.begun.set()

    @property
    def outputs(self) -> dict[int, Any]:
        """Return, for each choice of a stream of any API, the text, log probabilities and the
        end."""
        found: dict[int, Any] = {}
        for event in self.events:
            for one in [event, *event.get("choices", [])]:
                output = found.setdefault(
                    one.get("index", 0), {"text": "", "scores": [], "end": []}
                )
                delta = one.get("delta")
                if isinstance(delta, dict):
                    output["text"] += delta.get("content") or delta.get("text") or ""
                output["text"] += one.get("text") or ""
                scores = one.get("logprobs") or {}
                if "content" in scores:
                    output["scores"] += scores["content"]
                elif scores:
                    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                    output["scores"] += zip(*(scores[name] for name in columns), strict=True)
                output["end"] += [one["finish_reason"]] if one.get("finish_reason") else []
        return found

    @property
    def answer(self) -> Any:
        """Return the part that two answers to the same request have in common."""
        if not self.stream:
            return [without_ids(event) for event in self.events], self.error
        ids = {event["id"] for event in self.events if "id" in event}
        last = [without_ids(event.get("usage")) for event in self.events if event.get("usage")]
        return self.outputs, len(ids) <= 1, last[-1:], self.error

    def is_right(self, other: Client) -> bool:
        """Return whether the answer is that of `other`, or an error after a part of it."""
        if not self.error:
            return bool(self.answer == other.answer)
        whole = other.outputs if self.stream else {}
        return all(
            whole[index]["text"].startswith(output["text"])
            for index, output in (self.outputs.items() if self.stream else ())
            if index in whole
        )


def asked(front: Any, *, stream: bool) -> list[Client]:
    clients = [Client(front, kind, seed, stream=stream) for seed, kind in enumerate(KINDS)]
    for client in clients:
        client.start()
    return clients


def answers(clients: list[Client]) -> list[Any]:
    for client in clients:
        client.join(600)
    return [client.answer for client in clients]


def running(server: ServerProcess) -> int:
    return int(moves(server)["num_running"])


TWO = ("--threads", "2", "--tensor-parallel-size", "2")


@contextmanager
def held_up(server: ServerProcess) -> Iterator[None]:
    """Stop the steps of a server's engine."""
    pid = server.engine_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def total(server: Any, name: str) -> int:
    """Return a counter of a proxy or a server."""
    text = ask(server, "GET", "/metrics").body.decode()
    (found,) = re.findall(rf"^{name} (\d+)(?:\.0)?$", text, re.MULTILINE)
    return int(found)


def ended(server: ServerProcess) -> dict[str, int]:
    """Return how many requests have ended, by reason."""
    text = server.get("/metrics")[1].decode()
    found = re.findall(
        r'^kvik:request_success_total\{finished_reason="(\w+)".*\} (\S+)$', text, re.MULTILINE
    )
    return {reason: int(float(count)) for reason, count in found if float(count)}


@pytest.mark.parametrize(
    ("tier", "stream", "sizes"),
    [
        (TIER, True, ((), ())),
        pytest.param(TIER, False, ((), ()), marks=pytest.mark.nightly),
        ((), True, ((), ())),
        pytest.param(TIER, True, (TWO, ()), marks=[needs_native, pytest.mark.nightly]),
        pytest.param(TIER, False, ((), TWO), marks=[needs_native, pytest.mark.nightly]),
    ],
)
def test_requests_of_a_stopping_server_continue_on_another(
    tier: tuple[str, ...],
    stream: bool,
    sizes: tuple[tuple[str, ...], tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVIK_KV_TOKEN", "a-secret-of-this-test")
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(server_process(*COMMON, *tier, *size)) for size in sizes
        )
        right = answers(asked(second, stream=stream))
        assert not [a for a in right if a[-1]]
        before, done = moves(second), ended(second)
        front = stack.enter_context(route(first, second))
        clients = asked(front, stream=stream)
        until(lambda: running(first))
        if stream:
            assert all(client.begun.wait(600) for client in clients)
        with held_up(first):  # so that not all have ended when it starts to drain
            counts = ended(first)
            first.process.send_signal(signal.SIGTERM)
        while first.process.poll() is None:
            with suppress(OSError, HTTPException):
                counts = ended(first)
        assert first.process.wait(600) == 0
        assert answers(clients) == right
        moved = total(front, "kvik_route_moves_total")
        assert 0 < moved <= len(KINDS)
        # Each has ended once, on either server.
        assert counts.get("moved", 0) <= moved and not counts.keys() - {"stop", "length", "moved"}
        new = Counter(ended(second)) - Counter(done)
        assert new.keys() <= {"stop", "length"} and moved <= new.total() <= len(KINDS)
        if tier:
            loaded = (each["moves"]["totals"]["loaded_tokens"] for each in (before, moves(second)))
            assert next(loaded) < next(loaded)


@pytest.mark.parametrize(
    ("victim", "seconds", "stream"),
    [
        ("gives", 0.0, True),
        pytest.param("gives", 0.03, False, marks=pytest.mark.nightly),
        ("takes", 0.0, False),
        pytest.param("takes", 0.03, True, marks=pytest.mark.nightly),
    ],
)
def test_requests_end_once_if_a_server_is_killed_while_they_move(
    victim: str, seconds: float, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIK_KV_TOKEN", "a-secret-of-this-test")
    shm = set(os.listdir("/dev/shm"))
    with ExitStack() as stack:
        gives, takes = (
            stack.enter_context(
                server_process(*COMMON, *TIER, exit_code=-signal.SIGKILL if victim == which else 0)
            )
            for which in ("gives", "takes")
        )
        killed, other = (gives, takes) if victim == "gives" else (takes, gives)
        right = asked(takes, stream=stream)
        answers(right)
        front = stack.enter_context(route(gives, takes))
        clients = asked(front, stream=stream)
        until(lambda: running(gives))
        if stream:
            assert all(client.begun.wait(600) for client in clients)
        pids = [killed.process.pid, *children(killed.process.pid)]
        with held_up(gives):
            gives.process.send_signal(signal.SIGTERM)
        until(lambda: total(front, "kvik_route_moves_total"))
        time.sleep(seconds)
        killed.process.kill()
        answers(clients)
        wrong = [c.path for c, r in zip(clients, right, strict=True) if not c.is_right(r)]
        assert not wrong
        if victim == "takes":  # requests given back run to their end
            assert gives.process.wait(600) == 0
        else:
            assert {c.error for c in asked(front, stream=stream) if not c.join()} == {""}
            until(lambda: not moves(other)["num_running"] and not moves(other)["kv_usage"])
            assert moves(other)["num_waiting"] == 0 and moves(other)["moves"]["leases"] == 0
        state = ask(front, "GET", "/replicas").json["replicas"]
        assert not any(one["unfinished"] for one in state)
        until(lambda: all(map(gone, pids)))
    assert set(os.listdir("/dev/shm")) <= shm
