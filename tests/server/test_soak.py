"""Thousands of realistic requests leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.server_process import POOLED, ServerProcess, server_process
from helpers.tiers import tier

pytestmark = pytest.mark.usefixtures("forked")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

AT_ONCE = 40
# Before the first look at resources; then; and to a cache that is too small for all. One file or
# thread left by a hundred requests shows.
WARM_UP, REQUESTS, PRESSED = (400, 2000, 800) if tier() == "nightly" else (200, 500, 300)
POOL = str(36 * 16 * 2 * 3072)  # 36 blocks of float32, 576 tokens
MIB = 1 << 20
# Statuses of valid requests, of invalid ones, and of those after their deadline.
FINE, WRONG, LATE = {200}, {400, 404, 405, 413, 415, 422}, {200, 429, 503, 504}

Behaviour = Callable[["Client"], Awaitable[None]]


class Client:
    """One connection of a user."""

    def __init__(self, port: int, dice: random.Random, keys: Sequence[str] = ()) -> None:
        self.port, self.dice, self.keys = port, dice, keys
        self.statuses: Counter[int] = Counter()

    async def send(
        self, path: str, body: Any, length: int | None = None, method: str = "POST"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request; `length`: its claimed length, None: the actual one."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        key = f"Authorization: Bearer {self.dice.choice(self.keys)}\r\n" if self.keys else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            "Content-Type: application/json\r\n"
            f"{key}Content-Length: {len(data) if length is None else length}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        return reader, writer

    async def ask(self, path: str, body: Any, allowed: set[int], method: str = "POST") -> bytes:
        """Return the whole answer, and check its status."""
        reader, writer = await self.send(path, body, method=method)
        try:
            answer = await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
        status = int(answer.split(b" ", 2)[1])
        self.statuses[status] += 1
        assert status in allowed, answer[:600]
        return answer

    async def leave(self, path: str, body: Any, after: float | None, events: int = 0) -> None:
        """Disconnect after some seconds, or some events."""
        reader, writer = await self.send(path, body)
        try:
            if after is not None:
                await asyncio.sleep(after)
            for _ in range(events):
                await asyncio.wait_for(reader.readuntil(b"\n\n"), 120)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort() if self.dice.random() < 0.5 else writer.close()


def prompt(dice: random.Random) -> str:
    start = "Once upon a time there was a fox who lived by the river. " * dice.randint(0, 4)
    return f"{start}Story {dice.randint(0, 30)}: the"


def body_of(dice: random.Random, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt(dice), "max_tokens": dice.randint(1, 40), **fields}
    if dice.random() < 0.3:
        body["temperature"] = 0
    if dice.random() < 0.2:
        body["n"] = dice.randint(1, 3)
    if dice.random() < 0.2:
        body["stop"] = ["the", "."]
    if dice.random() < 0.2:
        body["logprobs"] = 2
    return body


def said(dice: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(dice)}]


async def answered(client: Client) -> None:
    await client.ask("/v1/completions", body_of(client.dice), FINE)


async def streamed(client: Client) -> None:
    answer = await client.ask("/v1/completions", body_of(client.dice, stream=True), FINE)
    assert b"[DONE]" in answer


async def chatted(client: Client) -> None:
    body = {"messages": said(client.dice), "max_tokens": 12, "stream": client.dice.random() < 0.5}
    await client.ask("/v1/chat/completions", body, FINE)


async def messaged(client: Client) -> None:
    blocks = [{"type": "text", "text": prompt(client.dice) * 4}]
    if client.dice.random() < 0.5:
        blocks[0]["cache_control"] = {"type": "ephemeral"}
    body = {
        "model": "stories",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": blocks}],
        "stream": client.dice.random() < 0.5,
    }
    await client.ask("/v1/messages", body, FINE)


async def responded(client: Client) -> None:
    body = {
        "input": prompt(client.dice),
        "max_output_tokens": 9,
        "store": client.dice.random() < 0.8,
    }
    answer = json.loads((await client.ask("/v1/responses", body, FINE)).partition(b"\r\n\r\n")[2])
    more = {**body, "previous_response_id": answer["id"], "stream": client.dice.random() < 0.5}
    kept = FINE if body["store"] else WRONG
    kept = FINE | WRONG if client.keys else kept  # each request has a key of its own
    if client.dice.random() < 0.3:
        await client.leave("/v1/responses", more, None, client.dice.randint(0, 5))
    else:
        await client.ask("/v1/responses", more, kept)
    if client.dice.random() < 0.3:
        await client.ask(f"/v1/responses/{answer['id']}", {}, kept, "DELETE")


async def embedded(client: Client) -> None:
    await client.ask("/v1/embeddings", {"input": prompt(client.dice)}, FINE)


async def generated(client: Client) -> None:
    await client.ask("/v1/generate", {"prompt": prompt(client.dice), "max_tokens": 5}, FINE)


async def left_at_once(client: Client) -> None:
    await client.leave("/v1/completions", body_of(client.dice, max_tokens=200), 0.0)


async def left_soon(client: Client) -> None:
    stream = client.dice.random() < 0.5
    body = body_of(client.dice, max_tokens=200, stream=stream)
    await client.leave("/v1/completions", body, client.dice.random() * 0.05)


async def left_in_the_middle(client: Client) -> None:
    body = body_of(client.dice, max_tokens=200, stream=True, ignore_eos=True)
    await client.leave("/v1/completions", body, None, client.dice.randint(1, 9))


async def half_a_body(client: Client) -> None:
    data = json.dumps(body_of(client.dice)).encode()
    _, writer = await client.send("/v1/completions", data[:-5], len(data))
    await asyncio.sleep(client.dice.random() * 0.02)
    writer.close()


async def hurried(client: Client) -> None:
    body = body_of(client.dice, deadline_ms=client.dice.randint(1, 60), max_tokens=150)
    await client.ask("/v1/completions", body, LATE)


async def wrong(client: Client) -> None:
    bad: list[Any] = [
        b"{",
        b"[1]",
        b"\xff\xfe",
        {},
        {"prompt": ""},
        {"prompt": [[1, "x"]]},
        {"prompt": "x", "n": 10**9},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "max_tokens": -2},
        {"prompt": "x", "logit_bias": {"999999": 1}},
        {"prompt": "x", "stop": [""]},
        {"prompt": "the " * 4000},
        {"prompt": "x", "model": "../etc"},
        {"prompt": "x", "suffix": "y"},
    ]
    await client.ask("/v1/completions", client.dice.choice(bad), WRONG)


async def astray(client: Client) -> None:
    await client.ask(client.dice.choice(["/v1/nothing", "/V1/models", "//v1/models"]), {}, WRONG)


BEHAVIOURS: list[tuple[Behaviour, int]] = [
    (answered, 5),
    (streamed, 5),
    (chatted, 3),
    (messaged, 3),
    (responded, 3),
    (embedded, 1),
    (generated, 1),
    (left_at_once, 2),
    (left_soon, 4),
    (left_in_the_middle, 4),
    (half_a_body, 1),
    (hurried, 2),
    (wrong, 3),
    (astray, 1),
]


async def crowd(port: int, count: int, seed: int, keys: Sequence[str] = ()) -> Counter[int]:
    client = Client(port, random.Random(seed), keys)
    places = asyncio.Semaphore(AT_ONCE)
    kinds, weights = zip(*BEHAVIOURS, strict=True)

    async def one() -> None:
        async with places:
            (behave,) = client.dice.choices(kinds, weights)
            await behave(client)

    await asyncio.gather(*(one() for _ in range(count)))
    return client.statuses


def at_rest(server: ServerProcess) -> dict[str, float]:
    deadline = time.monotonic() + 30
    while True:
        found = server.metrics()
        busy = found["num_requests_running"] + found["num_requests_waiting"]
        if not busy and not found["open_responses"]:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@linux
@pytest.mark.full
def test_many_requests_leave_nothing_behind() -> None:
    with server_process("--max-num-seqs", "16", "--max-model-len", "512") as server:
        asyncio.run(crowd(server.port, WARM_UP, 1))
        before = at_rest(server)
        base = server.resources()
        statuses = asyncio.run(crowd(server.port, REQUESTS, 2))
        after = at_rest(server)
        assert after["kv_cache_usage_perc"] == 0.0
        assert after["queued_tokens"] == 0
        assert after["generation_tokens_total"] > before["generation_tokens_total"] + 5 * REQUESTS
        assert statuses[200] > 0.45 * REQUESTS and statuses[400] > REQUESTS / 40
        assert server.get("/health")[0] == 200
        for then, now in zip(base, server.resources(), strict=True):
            assert now.threads <= then.threads + POOLED
            assert now.files <= then.files + 2
            assert now.memory <= then.memory + 16 * MIB
        ended = server.post("/v1/completions", {"prompt": "The", "max_tokens": 3})
        assert ended[0] == 200


@linux
@pytest.mark.full
def test_a_short_pool_drafts_and_several_tenants_leave_nothing_behind(tmp_path: Path) -> None:
    """Requests of three keys preempt each other, draft, share prefixes and pin them."""
    keys = ("ada-key-000000000000", "bob-key-000000000000", "eve-key-000000000000")
    file = tmp_path / "keys"
    lines = [f"{name}: {key}" for name, key in zip(("ada", "bob", "eve"), keys, strict=True)]
    file.write_text("\n".join([*lines, "boss: root-key-0000 admin"]))
    flags = ("--kv-cache-memory", POOL, "--spec-method", "suffix", "--api-key-file", str(file))
    with server_process("--max-num-seqs", "16", "--max-model-len", "512", *flags) as server:
        server.key = "root-key-0000"
        statuses = asyncio.run(crowd(server.port, PRESSED, 3, keys))
        after = at_rest(server)
        assert after["kv_cache_usage_perc"] == 0.0 and after["queued_tokens"] == 0
        assert after["num_preemptions_total"] > 0
        assert after["spec_decode_num_draft_tokens_total"] > 0
        assert statuses[200] > 0.4 * PRESSED
        assert server.get("/health")[0] == 200
