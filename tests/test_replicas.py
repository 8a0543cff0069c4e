"""Several engine processes with the bundled model, and one that is killed under load."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvik import AsyncLLM, SamplingParams
from kvik.engine.remote import EngineState
from kvik.engine.replicas import Replicas

pytestmark = pytest.mark.full

OPTIONS = {"device": "cpu", "threads": 2, "num_blocks": 256, "max_model_len": 256}


async def texts(engine: AsyncLLM, count: int, tokens: int) -> list[str]:
    """The answers to prompts; what was lost is an error that names the replica."""

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


async def test_answers_do_not_depend_on_the_replica_nor_on_one_that_is_killed() -> None:
    async with AsyncLLM(**OPTIONS) as alone:
        right = await texts(alone, 16, 24)
    shm = set(os.listdir("/dev/shm"))
    engine = AsyncLLM(**OPTIONS, data_parallel_size=2)
    both = engine.client
    assert isinstance(both, Replicas)
    async with engine, asyncio.timeout(120):
        while not all(client.state is EngineState.READY for client in both.clients):
            await asyncio.sleep(0.01)
        assert await texts(engine, 16, 24) == right
        stats = [await client.stats() for client in both.clients]
        assert all(one.delivered_tokens for one in stats)
        assert sum(one.threads for one in stats if one.threads) == 2
        pids = [client.source.pid for client in both.clients]
        running = asyncio.ensure_future(texts(engine, 16, 24))
        await asyncio.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)
        found = await running
        assert all(a == b or a.startswith("lost: ") for a, b in zip(found, right, strict=True))
        assert await texts(engine, 4, 24) == right[:4]
        while both.clients[0].state is not EngineState.READY:
            await asyncio.sleep(0.01)
        pids += [client.source.pid for client in both.clients]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(os.listdir("/dev/shm")) <= shm
