"""The event loop's side of the socket, with the test as the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
import uvloop
from helpers.scripted_engine import Rig, end, token
from helpers.served_engine import engine_in_thread
from helpers.served_engine import engine_request as request
from helpers.waiting import eventually

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.engine import remote as module
from kvik.engine import wire
from kvik.engine.live import LiveView
from kvik.engine.remote import EngineState
from kvik.engine.wire import Add, End, EngineStart, Lost, Ready, Reply, Unusable, stepped
from kvik.errors import ParamError, UnavailableError

# For tests of what sockets and timers do, in which event loops differ.
BOTH_LOOPS = pytest.mark.parametrize(
    "loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@pytest.fixture
def rig() -> AbstractAsyncContextManager[Rig]:
    """Return a ready client with the test as its engine."""
    return connected()


@asynccontextmanager
async def connected() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.client.start(rig.calls.append)
    assert rig.client.state is EngineState.STARTING
    await rig.send(Ready())
    assert (rig.client.state, rig.client.reason) == (EngineState.READY, "")
    try:
        yield rig
    finally:
        await rig.client.close()
        rig.source.sock.close()


@BOTH_LOOPS
async def test_requests_and_deltas_go_through(rig, loop_factory):
    rig.client.add(request())
    (add,) = rig.source.received()
    assert wire.engine_request.decode(add.request) == request()
    await rig.step(token("a"))
    await rig.step(token("a"), end("a"), steps=2)
    assert rig.deltas == [token("a"), token("a"), end("a")]
    assert len(rig.calls) == 2
    assert rig.client.num_unfinished == 0


@BOTH_LOOPS
async def test_frames_readable_at_once_give_one_call(rig, loop_factory):
    rig.client.add(request())
    for i in range(50):
        rig.source.step(token("a"), steps=i)
    await rig.step(end("a"))
    assert len(rig.calls) == 1
    assert len(rig.deltas) == 51


async def test_each_sibling_has_exactly_one_end(rig):
    rig.client.add(request(n=2))
    rig.source.step(token("b"), end("b"), token("a", 5), end("a", 2), token("a", -1))
    rig.source.step(end("a", 1), end("a", 1))
    await rig.step(token("a", 1), token("a", 0))
    assert rig.deltas == [end("a", 1), token("a", 0)]
    rig.source.step(end("a", 0), end("a", 0))
    await rig.step(end("a", 0))
    assert len(rig.ends) == 2
    assert rig.client.num_unfinished == 0


@BOTH_LOOPS
async def test_a_lost_engine_ends_everything_at_once(rig, loop_factory):
    rig.client.add(request("a", n=2))
    rig.client.add(request("b"))
    rig.source.step(token("a"), end("a", 1), token("b"))
    await rig.lose()
    assert sorted(rig.ends) == [
        ("a", 0, FinishReason.ERROR),
        ("a", 1, FinishReason.LENGTH),
        ("b", 0, FinishReason.ERROR),
    ]
    error = rig.deltas[-1]
    assert "ended unexpectedly" in error.error
    assert error.refused is None
    assert error.report.arrival <= error.report.finished <= time.monotonic()
    assert rig.client.state is EngineState.RESTARTING
    assert rig.source.losses == [(rig.client.reason, False)]
    assert rig.client.num_unfinished == 0
    with pytest.raises(UnavailableError, match="ended unexpectedly"):
        rig.client.add(request("c"))
    rig.client.end("a")  # there is no engine to receive it


async def test_a_restarted_engine_starts_without_old_requests(rig):
    rig.client.add(request("a"))
    rig.source.step(token("a"), steps=3)
    await rig.lose()
    rig.source.connect(EngineStart(rig.client.config))
    ((body,), _) = rig.source._frames.receive(rig.source.sock)
    assert wire.to_start.decode(body) == EngineStart(rig.client.config)
    assert rig.client.state is EngineState.RESTARTING
    signs = rig.link.signs_of_life
    await rig.send(Ready())
    assert rig.client.state is EngineState.READY
    assert rig.link.signs_of_life == signs + 1
    rig.client.add(request("a"))
    await rig.step(token("a"), end("a"), steps=3)
    assert len(rig.ends) == 2


GARBAGE = [
    b"\xff\xff\xff\xff",
    (3).to_bytes(4, "little") + b"\xc1\xc1\xc1",
    wire.frame(End("a", 0, FinishReason.STOP, None)),
    wire.frame(wire.Stepped(1, False, ["a"], [], [])),
    wire.frame(wire.Stepped(1, False, ["a"], [0], ["token"])),
]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_an_engine_that_sends_invalid_frames_is_lost(rig, garbage, caplog):
    rig.client.add(request("a"))
    await rig.step(token("a"))
    rig.source.sock.sendall(garbage)
    await rig.settle()
    assert rig.ends == [("a", 0, FinishReason.ERROR)]
    assert "sent an invalid message" in rig.client.reason
    assert len(rig.source.losses) == 1


async def test_the_reason_of_a_failed_load_is_reported(rig):
    rig.source.send(Unusable("model", "has no weights"))
    await rig.lose()
    assert rig.client.state is EngineState.RESTARTING  # it could be loaded before
    assert rig.client.reason == "model: has no weights"
    assert rig.source.losses == [("model: has no weights", True)]


async def test_a_failing_sink_affects_no_request(rig, caplog):
    def sink(deltas):
        raise ValueError("sink")

    rig.client.add_sink(sink)
    rig.client.add(request("a"))
    await rig.step(token("a"))
    await rig.step(end("a"))
    assert rig.deltas == [token("a"), end("a")]
    assert rig.client.state is EngineState.READY
    assert caplog.text.count("deltas could not be delivered") == 2


async def test_the_client_refuses_requests_that_cannot_be_served(rig):
    with pytest.raises(ParamError, match="outside"):
        rig.client.check(request(prompt=[99]))
    with pytest.raises(ParamError, match="cannot be sent"):
        rig.client.add(EngineRequest("\ud800", [1], SamplingParams()))
    with pytest.raises(ParamError, match="cannot be sent"):
        rig.client.add(request("c", stop=("\ud800",)))
    rig.client.add(request("a"))
    with pytest.raises(ParamError, match="already being served"):
        rig.client.add(request("a"))
    assert len(rig.source.received()) == 1
    assert rig.client.num_unfinished == 1


async def test_an_end_is_sent_only_for_running_requests(rig):
    rig.client.add(request("a"))
    rig.source.received()
    rig.client.end("unknown")
    rig.client.end("a", 0, FinishReason.ERROR, "text \ud800")
    (heard,) = rig.source.received()
    assert heard == End("a", 0, FinishReason.ERROR, "text ?")
    assert rig.client.num_unfinished == 1  # until the engine confirms
    await rig.step(end("a"))
    rig.client.end("a")
    assert rig.source.received() == []


async def test_only_a_ready_engine_gets_requests(rig):
    for state in set(EngineState) - {EngineState.READY, EngineState.CLOSED}:
        rig.link.set_state(state, "so it is")
        with pytest.raises(UnavailableError, match="so it is"):
            rig.client.add(request())
        with pytest.raises(UnavailableError):
            await rig.client.live()
        assert (await rig.client.stats()).num_blocks == 512
        assert rig.source.received() == []


@BOTH_LOOPS
async def test_an_engine_that_does_not_read_does_not_block_the_client(
    rig, loop_factory, monkeypatch
):
    monkeypatch.setattr(module, "MAX_UNSENT", 1 << 20)

    rig.client.add(request("first"))
    added = 1
    with pytest.raises(UnavailableError, match="does not keep up"):
        while added < 100_000:
            rig.client.add(request(f"r{added}", [1] * 200))
            added += 1
    rig.client.end("r1")
    heard = []
    while len(heard) < added + 1:
        heard += rig.source.received()
        await asyncio.sleep(0)
    assert [m.request_id for m in heard] == [
        "first",
        *(f"r{i}" for i in range(1, added)),
        "r1",
    ]
    rig.client.add(request("again"))


async def test_old_stats_are_returned_if_no_new_ones_arrive(rig, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    known = (await rig.client.stats()).steps
    monkeypatch.setattr(module, "ANSWER_SECONDS", 60.0)
    asking = asyncio.create_task(rig.client.stats())
    await rig.settle()
    ask = rig.source.received()[-1]
    fresh = rig.link._stats
    body = wire.msgspec.Raw(wire.encode(module.EngineStats(*[7] * 12)))
    rig.source.send(Reply(ask.ticket, body))
    assert (await asking).steps == 7 != known
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    assert (await rig.client.stats()).steps == 7  # without an answer
    rig.source.send(Reply(999, body), Reply(ask.ticket, body))  # too late, or without a query
    await rig.settle()
    assert fresh.steps == 0
    with pytest.raises(UnavailableError, match="in time"):
        await rig.client.live()


async def test_counters_continue_after_a_restart(rig):
    async def read(**values: int) -> module.EngineStats:
        asking = asyncio.create_task(rig.client.stats())
        await rig.settle()
        body = wire.msgspec.Raw(wire.encode(replace(module.EngineStats(*[0] * 12), **values)))
        rig.source.send(Reply(rig.source.received()[-1].ticket, body))
        return await asking

    assert (await read(steps=7, num_running=3)).steps == 7
    await rig.lose()
    lost = await rig.client.stats()
    assert (lost.steps, lost.num_running, lost.num_blocks) == (7, 0, 512)
    rig.source.connect(None)
    await rig.send(Ready())
    again = await read(steps=2, num_running=1)
    assert (again.steps, again.num_running) == (9, 1)


async def test_a_query_ends_with_the_engine(rig):
    asking = asyncio.create_task(rig.client.reset_prefix_cache())
    await rig.settle()
    rig.source.sock.close()
    with pytest.raises(UnavailableError, match="ended unexpectedly"):
        await asking


@BOTH_LOOPS
async def test_closing_ends_everything_and_is_final(rig, loop_factory):
    rig.client.add(request("a"))
    asking = asyncio.create_task(rig.client.reset_prefix_cache())
    await rig.settle()
    await rig.client.close()
    assert rig.ends == [("a", 0, FinishReason.ERROR)]
    assert rig.source.closed
    with pytest.raises(UnavailableError):
        await asking
    rig.link.set_state(EngineState.READY, "")
    assert rig.client.state is EngineState.CLOSED
    assert not rig.source._frames.receive(rig.source.sock)[1]


async def test_heartbeats(rig):
    signs = rig.link.signs_of_life
    assert signs > 0

    async def grows(**step) -> bool:
        nonlocal signs
        before, _ = signs, rig.source.step(**step)
        await rig.settle()
        signs = rig.link.signs_of_life
        return signs > before

    assert await grows(steps=1)
    assert not await grows(steps=1)
    assert await grows(steps=1, waits=True)
    assert await grows(steps=2)
    assert not await grows(steps=2)


@BOTH_LOOPS
async def test_with_a_real_loop_at_the_other_end(loop_factory):
    async with engine_in_thread(max_num_seqs=4) as served:
        deltas: list[RequestDelta] = []
        served.client.start(deltas.extend)
        await served.ready()
        for i in range(40):
            served.client.add(request(f"r{i}", n=1 + i % 3, max_tokens=1 + i % 7))
            if i % 5 == 0:
                served.client.end(f"r{i}")
        await served.at_rest()
        await eventually(lambda: not served.client.num_unfinished)
        ends = [d for d in deltas if d.finish_reason is not None]
        assert len(ends) == sum(1 + i % 3 for i in range(40))
        assert len({(d.request_id, d.index) for d in ends}) == len(ends)
        stats = await served.client.stats()
        assert stats.num_running == 0
        view = await served.client.live()
        assert isinstance(view, LiveView)
        assert await served.client.reset_prefix_cache() == stats.cached_blocks


async def test_asyncio_reports_no_problems(rig, caplog):
    with caplog.at_level(logging.WARNING):
        rig.client.add(request())
        await rig.step(end("a"))
    assert not caplog.records


# Requests of a lost engine are sent again once or ended, never both.


async def begin_another(rig: Rig) -> list:
    """Return the messages that the next engine receives when it is ready."""
    rig.source.connect()
    await rig.send(Ready())
    return rig.source.received()


async def test_requests_without_output_are_sent_to_the_next_engine(rig):
    rig.client.add(request("waits", n=2))
    rig.client.add(request("begun", n=2))
    rig.client.add(request("left"))
    rig.client.end("left")
    first = rig.source.received()[0]
    rig.source.step(token("begun", 1))
    await rig.lose()
    assert [(d.request_id, d.index, d.resendable) for d in rig.deltas[1:]] == [
        ("begun", 0, True),
        ("begun", 1, True),
        ("left", 0, True),
    ]
    assert rig.link.num_unfinished == 0  # the supervisor does not wait for it
    with pytest.raises(ParamError, match="already being served"):
        rig.client.check(request("waits"))
    rig.calls.clear()
    assert await begin_another(rig) == [first]
    await rig.step(token("waits"), end("waits"), end("waits", 1))
    assert rig.deltas == [token("waits"), end("waits"), end("waits", 1)]


async def test_an_engine_reports_a_lost_rank_after_its_last_tokens(rig):
    for name in ("begun", "running", "waits"):
        rig.client.add(request(name))
    await rig.send(stepped(1, False, [token("begun")]), Lost("GroupLost: rank 1", ["waits"]))
    begun, lost = rig.deltas
    assert begun == token("begun")
    assert (lost.request_id, lost.error, lost.resendable) == ("begun", "GroupLost: rank 1", True)
    assert rig.client.state is EngineState.RESTARTING
    assert rig.source.losses == [("GroupLost: rank 1", False)]
    for _ in range(3):  # requests that no engine has begun do not count
        rig.source.sock.close()
        heard = await begin_another(rig)
        assert {message.request_id for message in heard} >= {"waits"}
        await rig.send(Lost("GroupLost: rank 2", ["waits"]))
    lost = rig.deltas[-1]
    assert (lost.request_id, lost.error, lost.resendable) == ("running", "GroupLost: rank 2", False)
    assert len(rig.ends) == 2


async def test_a_request_is_sent_twice_at_most(rig):
    rig.client.add(request("a"))
    await rig.lose()
    assert len(await begin_another(rig)) == 1
    await rig.lose()
    (last,) = rig.deltas
    assert (last.finish_reason, last.resendable) == (FinishReason.ERROR, False)
    assert await begin_another(rig) == []


@pytest.mark.parametrize("state", [EngineState.FAILED, EngineState.CLOSED])
async def test_waiting_requests_end_if_no_engine_follows(rig, state):
    rig.client.add(request("a", n=2))
    await rig.lose()
    assert rig.deltas == []
    rig.link.disconnect(state, "no more")
    assert [(d.error, d.resendable) for d in rig.deltas] == [("no more", True)] * 2


async def test_waiting_requests_can_be_ended(rig):
    for name in ("a", "b"):
        rig.client.add(request(name, n=2))
    await rig.lose()
    rig.client.end("a")
    rig.client.end("b", 1)
    assert rig.deltas == []  # never inside the call
    await rig.settle()
    abort = FinishReason.ABORT
    assert rig.ends == [("a", 0, abort), ("a", 1, abort), ("b", 1, abort)]
    heard = await begin_another(rig)
    assert [(type(m), m.request_id) for m in heard] == [(Add, "b"), (End, "b")]
    await rig.step(token("b", 1), end("b", 1), end("b", 0))
    assert rig.ends[3:] == [("b", 0, FinishReason.LENGTH)]


@BOTH_LOOPS
async def test_waiting_requests_end_at_their_deadline(rig, loop_factory):
    soon = time.monotonic() + 0.05
    rig.client.add(replace(request("a"), deadline=soon))
    rig.client.add(replace(request("b"), deadline=soon + 1000))
    await rig.lose()
    await eventually(lambda: rig.deltas)
    assert time.monotonic() >= soon - 0.002  # uvloop rounds timers to milliseconds
    assert rig.ends == [("a", 0, FinishReason.DEADLINE)]
    assert [m.request_id for m in await begin_another(rig)] == ["b"]
