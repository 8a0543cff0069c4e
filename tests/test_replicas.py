"""Several engine processes with the bundled model, and one that is killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.optional_native import needs_native
from helpers.server_process import ServerProcess, children, command, server_process
from helpers.waiting import eventually

from kvik import AsyncLLM, SamplingParams
from kvik.cli.main import main
from kvik.engine.remote import EngineLink, EngineState

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("forked")]

OPTIONS = {"device": "cpu", "threads": 2, "num_blocks": 256, "max_model_len": 256}


async def texts(engine: AsyncLLM, count: int, tokens: int) -> list[str]:
    """Return the answers to prompts; a lost one is an error that names the replica."""

    async def one(number: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        text = ""
        try:
            async for delta in engine.generate(f"The {number}. fox and the old king", params):
                text += delta.text
        except RuntimeError as error:
            assert "replica " in str(error)
            return f"lost: {error}"
        return text

    return await asyncio.gather(*map(one, range(count)))


@asynccontextmanager
async def two_replicas(**options: Any) -> AsyncIterator[tuple[AsyncLLM, Sequence[EngineLink]]]:
    """Provide an engine and the links of its replicas, which are ready."""
    engine = AsyncLLM(**options, data_parallel_size=2)
    links = engine.client.links
    async with engine, asyncio.timeout(600):
        await eventually(lambda: all(link.state is EngineState.READY for link in links))
        yield engine, links


async def test_answers_do_not_depend_on_replicas_or_a_killed_one() -> None:
    async with AsyncLLM(**OPTIONS) as alone:
        right = await texts(alone, 16, 24)
    shm = set(os.listdir("/dev/shm"))
    async with two_replicas(**OPTIONS) as (engine, links):
        assert await texts(engine, 16, 24) == right
        stats = [await link.stats() for link in links]
        assert all(one.delivered_tokens for one in stats)
        assert sum(one.threads for one in stats if one.threads) == 2
        pids = [link.source.pid for link in links]
        running = asyncio.ensure_future(texts(engine, 16, 24))
        await asyncio.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        found = await running
        assert all(a == b or a.startswith("lost: ") for a, b in zip(found, right, strict=True))
        assert await texts(engine, 4, 24) == right[:4]
        await eventually(lambda: links[0].state is EngineState.READY)
        pids += [link.source.pid for link in links]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(os.listdir("/dev/shm")) <= shm


def engines_of(server: ServerProcess) -> list[int]:
    found = [pid for pid in children(server.process.pid) if "engine_process" in command(pid)]
    return sorted(found)


def mapped(pid: int, file: str) -> tuple[int, int]:
    """Return the bytes of a file mapped in a process: all (Rss), and its share (Pss)."""
    resident = part = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(file)
        elif inside and line.startswith(("Rss:", "Pss:")):
            size = int(line.split()[1]) * 1024
            resident, part = (resident + size, part) if line[0] == "R" else (resident, part + size)
    return resident, part


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_weights_of_an_engine_folder_are_in_memory_once(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    assert main(["build", "-o", str(folder), "--device", "cpu"]) == 0
    size = (folder / "weights.bin").stat().st_size
    flags = ("--data-parallel-size", "2", "--threads", "2", "--max-num-seqs", "4")
    with server_process("--model", str(folder), *flags) as server:
        wait_for_both(server)
        pids = engines_of(server)
        for i in range(8):
            body = {"prompt": f"{i} kings and a fox " * 4, "max_tokens": 8}
            assert server.post("/v1/completions", body)[0] == 200
        found = [mapped(pid, "weights.bin") for pid in pids]
        assert all(resident > 0.8 * size for resident, _ in found)
        assert sum(part for _, part in found) < 1.05 * size


def wait_for_both(server: ServerProcess) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        replicas = json.loads(server.get("/v1/engine")[1])["replicas"]
        if all(one["state"] == "ready" for one in replicas):
            return
        time.sleep(0.05)
    raise TimeoutError("not all replicas are ready")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_continues_after_losing_one_of_two_engines() -> None:
    shm = set(os.listdir("/dev/shm"))
    flags = ("--data-parallel-size", "2", "--threads", "2", "--max-model-len", "256")
    with server_process(*flags) as server:
        wait_for_both(server)
        pids = engines_of(server)
        assert len(pids) == 2
        more = {"max_tokens": 60, "ignore_eos": True}
        bodies = [{"prompt": f"The {number}. bear", **more} for number in range(12)]
        with ThreadPoolExecutor(12) as pool:
            answering = pool.map(server.post, ["/v1/completions"] * 12, bodies)
            time.sleep(0.15)
            os.kill(pids[1], signal.SIGKILL)
            assert server.get("/health")[0] == 200
        answers = list(answering)
        for status, answer in answers:
            if status == 200:
                assert answer["usage"]["completion_tokens"] == 60
            else:
                # 503: no part of the answer was sent, so that the client may retry
                assert status in (500, 503) and answer["error"]["code"] == "engine_error"
        assert sum(status == 200 for status, _ in answers) >= 4
        wait_for_both(server)
        pids += engines_of(server)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert set(os.listdir("/dev/shm")) <= shm


@pytest.mark.parametrize("dies", [False, True])
async def test_a_draining_replica_hands_over_its_requests_without_changes(dies: bool) -> None:
    """If it dies, those that it has not handed over are lost."""
    options = {**OPTIONS, "num_blocks": 512, "max_model_len": 512}
    async with AsyncLLM(**options) as alone:
        right = await texts(alone, 12, 480)
    async with two_replicas(**options, kv_tiers="memory:64MiB") as (engine, links):
        running = asyncio.ensure_future(texts(engine, 12, 480))
        while (await links[0].stats()).delivered_tokens < 240:  # each has full pages
            await asyncio.sleep(0.001)
        before = await links[1].stats()
        had = engine.client.drain_replica(0, drain=True)
        assert had > 0
        if dies:
            await asyncio.sleep(0.01)
            os.kill(links[0].source.pid, signal.SIGKILL)
        else:
            await eventually(lambda: not links[0].num_unfinished)
            assert not running.done()
        found = await running
        after = await links[1].stats()
    if dies:
        assert all(a == b or a.startswith("lost: ") for a, b in zip(found, right, strict=True))
    else:
        assert found == right
        assert after.moves.totals.loaded_tokens > 0
        prefill = after.work.prefill_tokens - before.work.prefill_tokens
        assert prefill <= 16 * had + 12 * 8  # later prompts had no pages
