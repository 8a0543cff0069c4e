"""`kvik route` in front of servers of which one stops: what it runs goes on at the other one."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import pytest
from helpers.http_server import ask, until
from helpers.server_process import ServerProcess, server_process
from test_prefill_decode import moves, route

pytestmark = pytest.mark.full

COMMON = (
    "--device",
    "cpu",
    "--threads",
    "1",
    "--served-model-name",
    "m",
    "--max-model-len",
    "1024",
)
TIER = ("--kv-tiers", "memory:64MiB")
TOKENS = 500
CHAT = {"messages": [{"role": "user", "content": "Tell of \u00e9\U0001f600 a king"}]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"temperature": 0}),
    "seeded": ("/v1/completions", {"temperature": 1.3, "top_p": 0.99, "seed": 5}),
    "stop": ("/v1/completions", {"temperature": 0, "stop": ["never to be met", "zzzz"]}),
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "message": ("/v1/messages", {**CHAT, "temperature": 0}),
    "native": ("/v1/generate", {"prompt": "A bear", "temperature": 0, "ignore_eos": True}),
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
    """An answer without what no two answers have in common."""
    own = ("id", "created", "request_id", "cached_tokens", "latency_ms", "tokens_per_second")
    if isinstance(value, dict):
        return {name: without_ids(part) for name, part in value.items() if name not in own}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


class Client(threading.Thread):
    """Asks once, and notes the answer: an object, or the events of a stream."""

    def __init__(self, front: Any, kind: str, seed: int, *, stream: bool) -> None:
        super().__init__()
        self.front, self.stream = front, stream
        self.path, self.body = body_of(kind, seed, stream=stream)
        self.events: list[Any] = []
        self.error = ""
        self.begun = threading.Event()

    def run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.front.port, timeout=120)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", self.path, json.dumps(self.body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self.error = f"{answer.status} {answer.read()!r}"
            elif not self.stream:
                self.events.append(json.loads(answer.read()))
            else:
                for line in answer:
                    self._take(line)
        except Exception as error:
            self.error = repr(error)
        finally:
            connection.close()

    def _take(self, line: bytes) -> None:
        assert b"kvik-moved" not in line
        if line.startswith(b"data: {"):
            self.events.append(json.loads(line[6:]))
            if len(self.events) > 2:
                self.begun.set()

    @property
    def text(self) -> str:
        """All text of a stream, whatever the API; what is not text is left out."""
        found = []
        for event in self.events:
            for one in [event, *event.get("choices", [])]:
                delta = one.get("delta")
                if isinstance(delta, dict):
                    found.append(delta.get("content") or delta.get("text") or "")
                found.append(one.get("text") or "")
        return "".join(found)

    @property
    def answer(self) -> Any:
        """What two answers to the same request have in common."""
        if not self.stream:
            return [without_ids(event) for event in self.events], self.error
        ids = {event["id"] for event in self.events if "id" in event}
        last = [without_ids(event.get("usage")) for event in self.events if event.get("usage")]
        reasons = [c.get("finish_reason") for e in self.events for c in e.get("choices", [])]
        return self.text, len(ids) <= 1, last[-1:], [r for r in reasons if r], self.error


def asked(front: Any, *, stream: bool) -> list[Client]:
    clients = [Client(front, kind, seed, stream=stream) for seed, kind in enumerate(KINDS)]
    for client in clients:
        client.start()
    return clients


def answers(clients: list[Client]) -> list[Any]:
    for client in clients:
        client.join(120)
    return [client.answer for client in clients]


def running(server: ServerProcess) -> int:
    return int(moves(server)["num_running"])


@pytest.mark.parametrize(("tier", "stream"), [(TIER, True), (TIER, False), ((), True)])
def test_what_a_server_runs_that_stops_goes_on_at_another_one(
    tier: tuple[str, ...], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIK_KV_TOKEN", "a-secret-of-this-test")
    with ExitStack() as stack:
        first, second = (stack.enter_context(server_process(*COMMON, *tier)) for _ in range(2))
        right = answers(asked(second, stream=stream))
        assert not [a for a in right if a[-1]]
        before = moves(second)
        front = stack.enter_context(route(first, second))
        clients = asked(front, stream=stream)
        until(lambda: running(first))
        if stream:
            assert all(client.begun.wait(60) for client in clients)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0
        assert answers(clients) == right
        state = ask(front, "GET", "/metrics").body.decode()
        (moved,) = re.findall(r"^kvik_route_moves_total (\d+)$", state, re.MULTILINE)
        assert 0 < int(moved) <= len(KINDS)
        if tier:
            loaded = (each["moves"]["totals"]["loaded_tokens"] for each in (before, moves(second)))
            assert next(loaded) < next(loaded)
