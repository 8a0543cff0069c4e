"""Many generations at once: whose turn it is, and how fast they are thought to go."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from helpers.generating import generating, wish
from helpers.served_engine import FakeExecutor

from kvik.core.types import FinishReason, RequestDelta
from kvik.errors import OverloadError
from kvik.server import generation as module
from kvik.server.generation import RequestLimits


def run(test):
    asyncio.run(asyncio.wait_for(test, 60))


def test_what_comes_at_once_is_not_too_much_for_a_reader_who_reads(monkeypatch):
    """Many siblings have a token in the same step; so have all after the event loop was held up."""

    async def test():
        async with generating(FakeExecutor(seconds=0.005)) as serving:
            generation = await serving.generations.start(
                wish("A", n=8, max_tokens=20), "", streaming=True
            )
            async for _ in generation:
                pass
            assert [len(one.token_ids) for one in generation.result.outputs] == [20] * 8
            await serving.at_rest()

    monkeypatch.setattr(module, "MAX_PENDING_TOKENS", 4)
    run(test())


def test_others_have_their_turn_while_many_prompts_are_sent():
    async def test():
        async with generating(max_requests=64, max_tokens=1 << 20) as serving:
            turns = 0

            async def other():
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.get_running_loop().create_task(other())
            all_of_them = await serving.generations.start_all(
                [wish([1] * 200)] * 32, "", streaming=False
            )
            assert turns >= 32
            task.cancel()
            for generation in all_of_them:
                generation.abort()
            await serving.at_rest()

    run(test())


@pytest.mark.parametrize("turns", [0, 3, 10, 40])
def test_who_is_cancelled_while_many_are_sent_leaves_nothing(turns):
    async def test():
        async with generating(max_requests=64) as serving:
            wishes = [wish([1] * 20, max_tokens=200)] * 16
            task = asyncio.get_running_loop().create_task(
                serving.generations.start_all(wishes, "", streaming=True)
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                for generation in await task:
                    generation.abort()
            await serving.at_rest()

    run(test())


def test_what_only_reads_its_prompt_has_a_pace_too():
    """Embeddings have no tokens, and an echo may have none: they take their turn all the same."""

    async def test():
        gate = FakeExecutor()
        gate.gate.clear()
        async with generating(gate) as serving:
            start = serving.generations.start
            for _ in range(3):
                read = await start(wish("A"), "", streaming=False)
                await asyncio.sleep(0.02)
                delta = RequestDelta(read.request_id, 0, [], finish_reason=FinishReason.LENGTH)
                serving.generations.take([delta])
                await read.output()
            await start(wish("A"), "", streaming=False)
            with pytest.raises(OverloadError) as caught:
                await start(wish("A", deadline_ms=1), "", streaming=False)
            assert caught.value.field == "deadline_ms"
            serving.generations.abort_all("the test is over")
            gate.gate.set()

    run(test())


def test_who_says_no_deadline_is_not_told_of_one():
    """The server's own limit ends what runs, and keeps nobody out."""

    async def test():
        gate = FakeExecutor()
        async with generating(gate, limits=RequestLimits(request_timeout=0.5)) as serving:
            start = serving.generations.start
            await (await start(wish("A"), "", streaming=False)).output()
            gate.gate.clear()
            await start(wish("A"), "", streaming=False)
            serving.admission._start_rate._seconds = 1e6  # as slow as can be
            await start(wish("A"), "", streaming=False)
            with pytest.raises(OverloadError, match="deadline_ms"):
                await start(wish("A", deadline_ms=1000), "", streaming=False)
            serving.generations.abort_all("the test is over")
            gate.gate.set()
            await serving.at_rest()

    run(test())
