"""What becomes of requests whose engine is lost: sent again once, or ended, and never both."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from helpers.scripted_engine import Rig, end, request, token

from kvik.core.types import FinishReason
from kvik.engine.client import EngineState
from kvik.engine.wire import Add, End, Ready
from kvik.errors import ParamError


async def lose(rig: Rig) -> None:
    rig.source.sock.close()
    await rig.settle()
    assert rig.client.state is EngineState.RESTARTING


async def begin_another(rig: Rig) -> list:
    """What the next engine hears when it is ready."""
    rig.source.connect()
    rig.source.say(Ready())
    await rig.settle()
    return rig.source.heard()


def test_what_nothing_came_of_is_sent_to_the_next_engine(with_rig):
    async def test(rig):
        rig.client.add(request("waits", n=2))
        rig.client.add(request("begun", n=2))
        rig.client.add(request("left"))
        rig.client.end("left")
        first = rig.source.heard()[0]
        rig.source.step(token("begun", 1))
        await lose(rig)
        assert [(d.request_id, d.index, d.again) for d in rig.deltas[1:]] == [
            ("begun", 0, True),
            ("begun", 1, True),
            ("left", 0, True),
        ]
        assert rig.client.num_unfinished == 0  # the supervisor waits for nothing meanwhile
        with pytest.raises(ParamError, match="already being served"):
            rig.client.check(request("waits"))
        rig.calls.clear()
        assert await begin_another(rig) == [first]
        rig.source.step(token("waits"), end("waits"), end("waits", 1))
        await rig.settle()
        assert rig.deltas == [token("waits"), end("waits"), end("waits", 1)]

    with_rig(test)


def test_a_request_is_sent_twice_at_most(with_rig):
    async def test(rig):
        rig.client.add(request("a"))
        await lose(rig)
        assert len(await begin_another(rig)) == 1
        await lose(rig)
        (last,) = rig.deltas
        assert (last.finish_reason, last.again) == (FinishReason.ERROR, False)
        assert await begin_another(rig) == []

    with_rig(test)


@pytest.mark.parametrize("state", [EngineState.FAILED, EngineState.CLOSED])
def test_what_waits_ends_when_there_is_no_other_engine(with_rig, state):
    async def test(rig):
        rig.client.add(request("a", n=2))
        await lose(rig)
        assert rig.deltas == []
        rig.client.disconnect(state, "no more")
        assert [(d.error, d.again) for d in rig.deltas] == [("no more", True)] * 2

    with_rig(test)


def test_what_waits_can_be_ended(with_rig):
    async def test(rig):
        for name in ("a", "b"):
            rig.client.add(request(name, n=2))
        await lose(rig)
        rig.client.end("a")
        rig.client.end("b", 1)
        assert rig.deltas == []  # never within the call
        await rig.settle()
        abort = FinishReason.ABORT
        assert rig.ends == [("a", 0, abort), ("a", 1, abort), ("b", 1, abort)]
        heard = await begin_another(rig)
        assert [(type(m), m.request_id) for m in heard] == [(Add, "b"), (End, "b")]
        rig.source.step(token("b", 1), end("b", 1), end("b", 0))
        await rig.settle()
        assert rig.ends[3:] == [("b", 0, FinishReason.LENGTH)]

    with_rig(test)


def test_what_waits_is_not_kept_beyond_its_deadline(with_rig):
    async def test(rig):
        soon = time.monotonic() + 0.05
        rig.client.add(replace(request("a"), deadline=soon))
        rig.client.add(replace(request("b"), deadline=soon + 1000))
        await lose(rig)
        while not rig.deltas:
            await asyncio.sleep(0.005)
        assert time.monotonic() >= soon
        assert rig.ends == [("a", 0, FinishReason.DEADLINE)]
        assert [m.request_id for m in await begin_another(rig)] == ["b"]

    with_rig(test)
