"""`AsyncLLM`: many tasks over one engine, and what happens when they or the engine fail."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from helpers.faults import raising
from helpers.served_engine import FakeExecutor, gated_executor
from helpers.waiting import eventually

from kvik import LLM, AsyncLLM, ConfigError, ParamError, SamplingParams, async_llm
from kvik.async_llm import AdmissionQueue
from kvik.config.config import ResolvedConfig
from kvik.core.config import SchedulerConfig
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop
from kvik.errors import CapacityError, UnavailableError
from kvik.text.infill import Markers

pytestmark = pytest.mark.usefixtures("forked")
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 128,
    "num_blocks": 256,
}
GAP = {"prompt": "Once upon", "suffix": " who lived in a house."}
PROMPTS = ["Once upon a time", "The king said", [1, 400, 5], "A fox and a crow"]
PLACES = ["thread", pytest.param("process", marks=pytest.mark.full)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def engine_of(place: str = "thread", **options: Any) -> AsyncLLM:
    return AsyncLLM("", engine=place, **{**OPTIONS, **options})


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[AsyncLLM, FakeExecutor]]:
    """Return a function that makes an engine in a thread, with steps computed by a
    `FakeExecutor`."""

    def make(executor: FakeExecutor | None = None, **options: Any) -> tuple[AsyncLLM, FakeExecutor]:
        executor = executor or FakeExecutor()

        def load(resolved: ResolvedConfig) -> EngineLoop:
            return EngineLoop(EngineCore(resolved), executor, time.monotonic)

        monkeypatch.setattr(async_llm, "load_loop", load)
        return engine_of(**options), executor

    return make


async def at_rest(engine: AsyncLLM) -> None:
    """Wait until no request is left."""
    await eventually(lambda: not (engine._requests or engine.client.num_unfinished))
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert engine._admission._queue.num_waiting == 0


async def text_of(stream: async_llm.AsyncStream) -> str:
    return "".join([delta.text async for delta in stream])


# Output


@pytest.mark.parametrize("place", PLACES)
async def test_tasks_get_what_llm_gives(place, monkeypatch):
    markers = Markers("<|system|>", "<|user|>", "<|assistant|>")
    monkeypatch.setattr("kvik.text.infill.FAMILIES", (markers,))
    with LLM("", **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, GREEDY)
        answer = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)[0]
        vector = llm.embed("A fox")[0].embedding
        (filled,) = llm.generate(GAP, GREEDY)
    async with engine_of(place) as engine:
        outputs = await asyncio.gather(*(engine.generate(p, GREEDY).result() for p in PROMPTS))
        shown = await asyncio.gather(*(text_of(engine.generate(p, GREEDY)) for p in PROMPTS))
        for output, text, one in zip(outputs, shown, expected, strict=True):
            assert output.prompt == one.prompt
            assert output.outputs[0].token_ids == one.outputs[0].token_ids
            assert output.text == text == one.text
        said = await engine.chat([{"role": "user", "content": "Hi"}], GREEDY).result()
        assert (said.text, said.prompt) == (answer.text, answer.prompt)
        assert (await engine.embed("A fox")).embedding == pytest.approx(vector)
        assert (await engine.generate(GAP, GREEDY).result()).text == filled.text
        await at_rest(engine)
        await engine.sleep()
        outputs = await asyncio.gather(*(engine.generate(p, GREEDY).result() for p in PROMPTS))
        assert [output.text for output in outputs] == [one.text for one in expected]
        await at_rest(engine)


async def test_a_stream_has_its_deltas_and_then_its_output():
    async with engine_of() as engine:
        stream = engine.generate("Once", SamplingParams(max_tokens=20, n=2, seed=1), "mine")
        texts = {0: "", 1: ""}
        async for delta in stream:
            assert delta.request_id == "mine"
            texts[delta.index] += delta.text
        assert [one.text for one in stream.output.outputs] == [texts[0], texts[1]]
        assert await stream.result() is stream.output
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_slow_reader_gets_one_delta_for_all_it_missed(faked):
    engine, executor = faked(gated_executor(after=2))
    async with engine:
        stream = engine.generate("Once", LONG)
        first = await anext(stream)
        executor.gate.set()
        await eventually(lambda: not engine._requests)
        rest = [delta async for delta in stream]
        assert len(rest) == 1
        assert len(first.token_ids) + len(rest[0].token_ids) == 100
        assert stream.output.text == first.text + rest[0].text


async def test_requests_may_come_before_the_engine_is_loaded():
    engine = engine_of()
    try:
        assert (await engine.generate("Once", GREEDY).result()).num_output_tokens == 8
    finally:
        await engine.close()


# Requests ended by the caller


@pytest.mark.parametrize("how", ["abort", "cancel", "close", "forget", "timeout", "error"])
async def test_a_request_without_a_reader_ends_at_once(how, faked):
    engine, _ = faked(FakeExecutor(seconds=0.05))
    async with engine:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate("Once", LONG, "one"):
                begun.set()
                if how == "forget":
                    break
                if how == "error":
                    raise ZeroDivisionError

        task = asyncio.create_task(read())
        if how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await task
        else:
            await begun.wait()
        if how == "abort":
            assert await engine.abort("one")
        elif how == "cancel":
            task.cancel()
        elif how == "close":
            async with engine.generate("Once", LONG) as stream:
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            task.cancel()
        with suppress(asyncio.CancelledError, ZeroDivisionError):
            await task
        del task
        gc.collect()
        await at_rest(engine)
        assert (await engine.stats()).steps < 90  # of 100 steps
        assert not await engine.abort("one")


async def test_an_aborted_stream_says_so(faked):
    engine, _ = faked(FakeExecutor(seconds=0.05))
    async with engine:
        stream = engine.generate("Once", LONG, "one")
        await anext(stream)
        assert await engine.abort("one")
        assert [delta.finish_reason async for delta in stream][-1] == "abort"
        assert stream.output.outputs[0].finish_reason == "abort"


async def test_requests_that_wait_for_the_queue_can_be_aborted_cancelled_and_closed(faked):
    engine, executor = faked(gated_executor(), max_num_seqs=1, max_queued_requests=1)
    async with engine:
        streams = [engine.generate("A", GREEDY, str(i)) for i in range(6)]
        results = [asyncio.create_task(stream.result()) for stream in streams]
        await eventually(lambda: len(engine._admission._waiting) >= 5)
        assert await engine.abort("3")
        results[2].cancel()
        assert (await results[3]).outputs[0].finish_reason == "abort"
        await streams[4].aclose()
        executor.gate.set()
        # Its id is free at once, before its own task runs again.
        assert (await engine.generate([1, 2], GREEDY, "4").result()).num_output_tokens == 8
        with pytest.raises(RuntimeError, match="closed before"):
            await results[4]
        ended = await asyncio.gather(*results, return_exceptions=True)
        assert isinstance(ended[2], asyncio.CancelledError)
        for i in (0, 1, 5):
            assert ended[i].num_output_tokens == 8
        await at_rest(engine)


# Admission to the queue


async def test_more_requests_than_the_queue_takes_wait_and_none_is_refused():
    async with engine_of(max_num_seqs=4, max_queued_requests=8) as engine:
        outputs = await asyncio.gather(
            *(engine.generate(f"Story {i}", GREEDY).result() for i in range(100))
        )
        assert [output.num_output_tokens for output in outputs] == [8] * 100
        await at_rest(engine)


async def test_the_most_urgent_request_is_let_in_first():
    queue = AdmissionQueue(SchedulerConfig(1, 1, 1, max_queued_requests=1), time.monotonic)
    order: list[str] = []

    async def enter(name: str, priority: int) -> None:
        request = EngineRequest(name, [1, 2], SamplingParams(), priority=priority)
        reservation = await queue.admit(request)
        order.append(name)
        await asyncio.sleep(0)
        reservation.release()
        queue.update()

    wishes = [("first", 5), ("later", 5), ("least", 9), ("urgent", -1), ("last of 5", 5)]
    await asyncio.gather(*(enter(*wish) for wish in wishes))
    assert order == ["first", "urgent", "later", "last of 5", "least"]


async def test_priorities_reach_the_scheduler():
    async with engine_of(policy="priority") as engine:
        output = await engine.generate("Once", GREEDY, priority=-3).result()
        assert output.num_output_tokens == 8
    async with engine_of() as engine:
        with pytest.raises(ParamError, match="priority"):
            engine.generate("Once", GREEDY, priority=1)


# Invalid requests


@pytest.mark.parametrize(
    ("begin", "field"),
    [
        (lambda engine: engine.generate(""), "prompt"),
        (lambda engine: engine.generate([]), "prompt"),
        (lambda engine: engine.generate([10**6]), "prompt"),
        (lambda engine: engine.generate("word " * 500), "prompt"),
        (lambda engine: engine.generate(["two", "prompts"]), "prompt"),
        (lambda engine: engine.generate("A", {"max_tokens": 3}), "params"),
        (lambda engine: engine.generate("A", LONG, 7), "request_id"),
        (lambda engine: engine.generate("A", LONG, sampling_params=LONG), "sampling_params"),
        (lambda engine: engine.generate("A", SamplingParams(n=100)), "n"),
        (lambda engine: engine.chat("Hi"), "messages"),
    ],
)
async def test_invalid_requests_are_refused_by_field(begin, field):
    async with engine_of(max_queued_requests=50) as engine:
        with pytest.raises((ParamError, CapacityError)) as caught:
            await begin(engine).result()
        assert caught.value.field == field
        await at_rest(engine)


async def test_a_request_id_in_use_is_refused_and_the_other_request_goes_on(faked):
    engine, executor = faked(gated_executor(after=2))
    async with engine:
        stream = engine.generate("Once", LONG, "same")
        await anext(stream)
        with pytest.raises(ParamError, match="request_id"):
            await engine.generate("Once", LONG, "same").result()
        executor.gate.set()
        assert (await stream.result()).num_output_tokens == 100


def test_bad_options_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="engine"):
        AsyncLLM("", engine="cloud")
    with pytest.raises(ConfigError, match="max_model_len"):
        AsyncLLM("", max_model_length=5)


def test_it_belongs_to_one_event_loop():
    engine = engine_of()

    async def use() -> None:
        await engine.generate("Once", GREEDY).result()

    asyncio.run(use())
    for other in (use(), engine.stats(), engine.reset_prefix_cache(), engine.abort("x")):
        with pytest.raises(RuntimeError, match="event loop"):
            asyncio.run(other)
    asyncio.run(engine.close())  # as its loop has ended


def test_an_engine_closed_before_it_began_cannot_begin():
    engine = engine_of()
    asyncio.run(engine.close())
    with pytest.raises(UnavailableError, match="closed"):
        asyncio.run(engine.start())


@pytest.mark.full
async def test_several_tasks_may_close_it():
    engine = engine_of("process")
    await engine.start()
    await asyncio.gather(engine.close(), engine.close())
    assert engine.client.links[0].source.pid is None


async def test_its_loading_is_interrupted_once(monkeypatch):
    interrupted, ended = [], threading.Event()

    def load(resolved: ResolvedConfig) -> EngineLoop:
        ended.wait(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(async_llm, "load_loop", load)
    monkeypatch.setattr("kvik.engine.sources.interrupt", interrupted.append)
    monkeypatch.setattr("kvik.engine.sources.LAST_STEP_SECONDS", 0.0)
    engine = engine_of()
    engine.begin()
    await engine.close()
    await engine.close()  # while it still cleans up
    ended.set()
    assert len(interrupted) == 1


UNCLOSED = """
import asyncio, atexit, threading
from kvik import AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM(engine="thread", threads=1)
    stream = engine.generate("Once", SamplingParams(max_tokens=1900, ignore_eos=True))
    await anext(stream)
    return stream

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
left = asyncio.run(main())
"""


@pytest.mark.full
def test_a_program_that_does_not_close_it_ends_its_thread(fresh):
    # Python aborts if a thread that it left comes back from native code.
    command = [sys.executable, "-c", UNCLOSED]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "['MainThread']\n")


# Engine faults


async def test_a_request_that_fails_raises_and_the_others_go_on(faked):
    engine, executor = faked(gated_executor())
    async with engine:
        results = [asyncio.create_task(engine.generate("A", GREEDY).result()) for _ in range(3)]
        await eventually(lambda: executor.plans)
        executor.errors = {0: "a kernel failed"}
        executor.gate.set()
        ended = await asyncio.gather(*results, return_exceptions=True)
        failed = [one for one in ended if isinstance(one, RuntimeError)]
        assert len(failed) == 1 and "a kernel failed" in str(failed[0])
        await at_rest(engine)
        assert (await engine.generate("A", GREEDY).result()).num_output_tokens == 8


async def test_a_stream_raises_behind_the_text_that_came(faked):
    engine, executor = faked(gated_executor(after=2))
    async with engine:
        stream = engine.generate("A", LONG)
        await anext(stream)
        executor.raises = ValueError("the device is lost")
        executor.gate.set()
        with pytest.raises(RuntimeError, match="the device is lost"):
            async for _ in stream:
                pass
        assert stream.output.outputs[0].finish_reason == "error"
        await at_rest(engine)


async def test_an_engine_that_fails_as_a_whole_fails_all_requests_and_the_next(faked):
    engine, executor = faked(gated_executor(), max_num_seqs=2, max_queued_requests=2)
    async with engine:
        results = [asyncio.create_task(engine.generate("A", GREEDY).result()) for _ in range(9)]
        await eventually(lambda: executor.plans)
        executor.submit = raising(SystemExit("no engine any more"))
        executor.gate.set()
        ended = await asyncio.gather(*results, return_exceptions=True)
        assert all(isinstance(one, (RuntimeError, UnavailableError)) for one in ended)
        with pytest.raises(UnavailableError, match="no engine any more"):
            await engine.generate("A", GREEDY).result()


async def test_an_engine_that_cannot_be_loaded_says_why(monkeypatch):
    monkeypatch.setattr(async_llm, "load_loop", raising(CapacityError("memory", "too little")))
    engine = engine_of()
    with pytest.raises(UnavailableError, match="memory: too little"):
        async with engine:
            pass


async def test_closing_ends_what_runs_and_what_waits(faked):
    engine, executor = faked(FakeExecutor(seconds=0.05), max_num_seqs=1, max_queued_requests=1)
    async with engine:
        results = [asyncio.create_task(engine.generate("A", LONG).result()) for _ in range(4)]
        await eventually(lambda: executor.plans)
    ended = await asyncio.gather(*results, return_exceptions=True)
    assert all(isinstance(one, (RuntimeError, UnavailableError)) for one in ended)
    assert executor.stopped == 1
    with pytest.raises(UnavailableError, match="closed"):
        await engine.generate("A", GREEDY).result()


@pytest.mark.full
async def test_a_killed_process_is_started_again_and_takes_what_had_not_begun():
    sizes = {"max_num_seqs": 1, "max_model_len": 1024}
    async with engine_of("process", **sizes) as engine:
        pid = engine.client.links[0].source.pid
        stream = engine.generate("Once", LONG.with_changes(max_tokens=1000, n=50))
        await anext(stream)
        waiting = asyncio.create_task(engine.generate("The king", GREEDY).result())
        await eventually(lambda: engine.client.num_unfinished >= 2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError):
            await stream.result()
        assert (await waiting).num_output_tokens == 8
        assert engine.client.links[0].source.pid != pid
        await at_rest(engine)
