"""`kvik serve` with roles behind `kvik route`, as processes, some of which are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.http_server import ask, until
from helpers.server_process import ServerProcess, server_process

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("forked")]

COMMON = ("--device", "cpu", "--threads", "1", "--max-model-len", "1024")
TOKEN = "a-secret-of-this-test"


def body(seed: int, **more: Any) -> dict[str, Any]:
    words = random.Random(seed).choices(["king", "fox", "river", "gold", "old", "house"], k=300)
    return {"prompt": " ".join(words), "max_tokens": 24, "temperature": 0, "logprobs": 3, **more}


def front_of(process: subprocess.Popen[str]) -> Any:
    line = process.stdout.readline()
    return SimpleNamespace(port=int(line.split("/v1")[0].rpartition(":")[2]))


@contextmanager
def route(*servers: ServerProcess) -> Iterator[Any]:
    command = [sys.executable, "-m", "kvik", "route", *(s.url for s in servers), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield front_of(process)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIK_KV_TOKEN", TOKEN)


def texts(front: Any, bodies: list[dict[str, Any]]) -> list[Any]:
    """Send requests at once, and return the status, text and log probabilities of each answer."""

    def one(body: dict[str, Any]) -> Any:
        answer = ask(front, "POST", "/v1/completions", body, 60.0)
        if answer.status != 200:
            return answer.status, answer.json["error"]["message"], None
        choice = answer.json["choices"][0]
        return 200, choice["text"], choice["logprobs"]["token_logprobs"]

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


def moves(server: ServerProcess) -> Any:
    """Return the statistics of a server's engine, which a slow one does not always report in
    time."""
    found: list[Any] = []

    def answered() -> bool:
        live = json.loads(server.get("/v1/engine")[1])["live"]
        found.extend([] if live is None else [live["stats"]])
        return bool(found)

    until(answered)
    return found[0]


def computed(server: ServerProcess) -> int:
    stats = moves(server)
    return int(stats["work"]["prefill_tokens"])


def test_the_decoder_computes_less_than_a_block_of_each_prompt(token: None) -> None:
    bodies = [body(i) for i in range(8)]
    with server_process(*COMMON) as alone:
        right = texts(alone, bodies)
        tokens = computed(alone)
    with ExitStack() as stack:
        prefill = stack.enter_context(server_process(*COMMON, "--role", "prefill"))
        decode = stack.enter_context(server_process(*COMMON, "--role", "decode"))
        front = stack.enter_context(route(prefill, decode))
        assert json.loads(prefill.get("/health")[1])["role"] == "prefill"
        assert texts(front, bodies) == right
        assert tokens > 8 * 300
        assert computed(decode) <= 8 * 16
        state = ask(front, "GET", "/metrics").body.decode()
        assert "kvik_route_prefills_total 8" in state
        chat = {"messages": [{"role": "user", "content": body(9)["prompt"]}], "max_tokens": 4}
        for stream in (False, True):
            answer = ask(front, "POST", "/v1/chat/completions", {**chat, "stream": stream})
            assert answer.status == 200
        assert computed(decode) <= 9 * 16 + 32
        until(lambda: texts(prefill, [body(99, max_tokens=1)])[0][0] == 200)
        until(lambda: moves(prefill)["moves"]["leases"] == 0)
        lent = moves(prefill)["moves"]["totals"]["lent_tokens"]
        assert lent >= tokens - 8 * 16


@pytest.mark.parametrize("wrong", ["token", pytest.param("model", marks=pytest.mark.nightly)])
def test_servers_of_different_models_answer_without_transfers(
    wrong: str, token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        prefill = stack.enter_context(server_process(*COMMON, "--role", "prefill"))
        flags: tuple[str, ...] = ()
        if wrong == "token":
            monkeypatch.setenv("KVIK_KV_TOKEN", "another-secret-here")
        else:
            flags = ("--kv-cache-dtype", "int8")
        decode = stack.enter_context(server_process(*COMMON, "--role", "decode", *flags))
        front = stack.enter_context(route(prefill, decode))
        assert texts(front, [body(1)])[0] == texts(decode, [body(1)])[0]
        assert computed(decode) > 300


@pytest.mark.parametrize(
    ("what", "role"),
    [
        pytest.param("server", "prefill", marks=pytest.mark.nightly),
        ("engine", "decode"),
        pytest.param("server", "decode", marks=pytest.mark.nightly),
        pytest.param("engine", "prefill", marks=pytest.mark.nightly),
    ],
)
def test_each_request_ends_once_if_a_server_is_killed(role: str, what: str, token: None) -> None:
    bodies = [body(i) for i in range(12)]
    with server_process(*COMMON) as alone:
        right = texts(alone, bodies)
    with ExitStack() as stack:
        code = {role: -signal.SIGKILL} if what == "server" else {}
        prefill, decode = (
            stack.enter_context(
                server_process(*COMMON, "--role", each, exit_code=code.get(each, 0))
            )
            for each in ("prefill", "decode")
        )
        front = stack.enter_context(route(prefill, decode))
        victim = prefill if role == "prefill" else decode
        pid = victim.process.pid if what == "server" else victim.engine_pid
        killer = threading.Timer(random.Random(role + what).uniform(0.05, 0.4), os.kill, [pid, 9])
        killer.start()
        found = texts(front, bodies)
        killer.join()
        for answer, expected in zip(found, right, strict=True):
            # An answer that had begun ends with an error; other streams are not cut short.
            assert answer == expected or answer[0] in (500, 502, 503)
        if role == "prefill":
            assert found == right
        until(lambda: texts(front, bodies[:1])[0] == right[0], 60)
