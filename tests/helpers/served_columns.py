"""Run prompts as a server does: with tenants, pins, a socket and a flight recorder."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from helpers.served_engine import engine_in_thread

from kvik.config.config import EngineConfig
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Constraint
from kvik.core.types import EngineRequest, Handover, PageSource, Pin, RequestDelta
from kvik.engine.loop import Engine, EngineLoop, Executor
from kvik.engine.output import OutputProcessor, RequestOutput
from kvik.engine.recorder import RecordReader, open_recording
from kvik.engine.replicas import Replicas
from kvik.engine.stats import EngineStats
from kvik.launch import launch, load_loop, play, resolve_config, start

Rounds = Sequence[Sequence[EngineRequest]]
Served = tuple[list[RequestOutput], EngineStats]  # outputs of the last round, and stats after it


def make_requests(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    *,
    rounds: int,
    tenants: int,
    pinned: bool,
) -> list[list[EngineRequest]]:
    """Return all prompts for each round, under new ids; `pinned`: each prompt is pinned whole."""
    return [
        [
            EngineRequest(
                f"{number}-{i}",
                prompt,
                params,
                tenant=f"tenant {i % tenants}",
                pins=(Pin(len(prompt), 600.0),) if pinned else (),
            )
            for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
        ]
        for number in range(rounds)
    ]


def serve_here(config: EngineConfig, rounds: Rounds) -> Served:
    """Serve by stepping an engine in this thread."""
    return _by_steps(launch(config), rounds)


def serve_recorded(config: EngineConfig, rounds: Rounds, path: Path) -> Served:
    """Serve in this thread with a recording, and check that its replay does not differ."""
    resolved = resolve_config(config)
    found = _by_steps(start(resolved, record=path), rounds)
    with open_recording(path) as file:
        reader = RecordReader(file, path.name)
        played = play(resolved, reader.header.readings, reader.events(), lambda steps: None)
    assert played.difference is None
    assert played.tokens == found[1].delivered_tokens
    return found


def serve_over_the_wire(config: EngineConfig, rounds: Rounds) -> Served:
    """Serve by an engine in another thread, behind a socket."""
    engine = launch(config)
    try:
        return asyncio.run(_over_the_wire(engine, rounds))
    finally:
        engine.loop.close()


def serve_by_replicas(config: EngineConfig, rounds: Rounds) -> Served:
    """Serve by two engines in threads, with routing between them."""
    engines = [launch(config), launch(config)]
    try:
        return asyncio.run(_by_replicas(engines, rounds))
    finally:
        for engine in engines:
            engine.loop.close()


async def _by_replicas(engines: Sequence[Engine], rounds: Rounds) -> Served:
    outputs = OutputProcessor(None)
    found: dict[str, RequestOutput] = {}

    def take(deltas: list[RequestDelta]) -> None:
        processed = outputs.process(deltas)
        found.update({output.request_id: output for output in processed.finished})

    held = [_GatedExecutor(engine.loop.executor) for engine in engines]
    async with AsyncExitStack() as stack:
        served = []
        for engine, one in zip(engines, held, strict=True):
            context = engine_in_thread(engine.resolved, one, reports=True)
            served.append(await stack.enter_async_context(context))
        both = Replicas(engines[0].resolved, [one.client for one in served])
        both.start(take)
        for one in served:
            await one.ready()
        for batch in rounds:
            for one in held:
                one.sent.clear()
            for request in batch:
                outputs.add(request, None, streaming=False)
                both.add(request)
            for one in held:
                one.sent.set()
            async with asyncio.timeout(60):
                while not all(request.request_id in found for request in batch):
                    await asyncio.sleep(0.001)
        for one in served:
            await one.at_rest()
        stats = await both.stats()
        parts = await asyncio.gather(*(one.client.stats() for one in served))
        assert all(part.delivered_tokens for part in parts)  # both had requests
        await both.close()
        return [found[request.request_id] for request in rounds[-1]], stats


def serve_by_peers(config: EngineConfig, rounds: Rounds) -> Served:
    """Compute prompts in one engine, and the rest in another one that fetches their pages."""
    outputs = OutputProcessor(None)
    found: dict[str, RequestOutput] = {}
    with _lender_and_borrower(config) as loops:
        for batch in rounds:
            sources: dict[str, PageSource] = {}
            for request in batch:
                params = request.params.with_changes(max_tokens=1, min_tokens=0, n=1)
                loops[0].add(replace(request, params=params, lends=True))
            while loops[0].has_work:
                deltas = loops[0].poll()
                sources |= {d.request_id: d.kept for d in deltas if d.kept is not None}
            for request in batch:
                outputs.add(request, None, streaming=False)
                loops[1].add(replace(request, source=sources.get(request.request_id)))
            while loops[1].has_work:
                processed = outputs.process(loops[1].poll())
                found.update({output.request_id: output for output in processed.finished})
        return [found[request.request_id] for request in rounds[-1]], loops[1].stats()


def serve_moved(config: EngineConfig, rounds: Rounds) -> Served:
    """Serve each request by one engine until it has begun, then by another one that fetches its
    pages."""
    outputs = OutputProcessor(None)
    found: dict[str, RequestOutput] = {}
    handed: dict[str, list[Handover]] = {}

    begun: dict[str, set[int]] = defaultdict(set)  # siblings with a token

    def take(deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            if delta.token_ids:
                begun[delta.request_id].add(delta.index)
            if delta.handed is not None:
                handed.setdefault(delta.request_id, []).append(delta.handed)
                delta.finish_reason = None
        processed = outputs.process(deltas)
        found.update({output.request_id: output for output in processed.finished})

    with _lender_and_borrower(config) as loops:
        for batch in rounds:
            for request in batch:
                outputs.add(request, None, streaming=False)
                loops[0].add(request)
            while loops[0].has_work:
                for request in batch:
                    if len(begun[request.request_id]) == request.params.n:
                        loops[0].hand_over(request.request_id)
                take(loops[0].poll())
            for request in batch:
                if request.request_id not in found:
                    resumed = tuple(handed[request.request_id])
                    loops[1].add(replace(request, resumed=resumed))
            while loops[1].has_work:
                take(loops[1].poll())
        assert handed
        return [found[request.request_id] for request in rounds[-1]], loops[1].stats()


@contextmanager
def _lender_and_borrower(config: EngineConfig) -> Iterator[tuple[EngineLoop, EngineLoop]]:
    """Load two engines; the second fetches pages of the first.

    The second is closed first: it may still be ending leases.
    """
    token = b"of these two"
    lends = resolve_config(replace(config, role="prefill", kv_tiers="memory:64MiB"))
    borrows = resolve_config(replace(config, role="decode"))
    with (
        closing(load_loop(lends, token=token)) as lender,
        closing(load_loop(borrows, token=token)) as borrower,
    ):
        yield lender, borrower


def _by_steps(engine: Engine, rounds: Rounds) -> Served:
    loop, outputs = engine.loop, OutputProcessor(None)
    found: dict[str, RequestOutput] = {}
    try:
        for batch in rounds:
            for request in batch:
                outputs.add(request, None, streaming=False)
                loop.add(request)
            while loop.has_work:
                processed = outputs.process(loop.poll())
                found.update({output.request_id: output for output in processed.finished})
        return [found[request.request_id] for request in rounds[-1]], loop.stats()
    finally:
        loop.close()


class _GatedExecutor:
    """An executor that waits until a whole batch has been sent, so that batches do not depend on
    the speed of threads."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.depth, self.in_turn = executor.depth, executor.in_turn
        self.sent = threading.Event()

    @property
    def lost(self) -> str:
        return self._executor.lost

    def submit(self, plan: SchedulerOutput) -> object:
        assert self.sent.wait(30)
        return self._executor.submit(plan)

    def result(self, handle: object) -> ModelRunnerOutput:
        return self._executor.result(handle)

    def build_grammar(self, constraint: Constraint) -> Future[object]:
        return self._executor.build_grammar(constraint)

    def idle_step(self) -> bool:
        return self._executor.idle_step()

    def stop(self) -> None:
        self._executor.stop()


async def _over_the_wire(engine: Engine, rounds: Rounds) -> Served:
    outputs = OutputProcessor(None)
    found: dict[str, RequestOutput] = {}

    def take(deltas: list[RequestDelta]) -> None:
        processed = outputs.process(deltas)
        found.update({output.request_id: output for output in processed.finished})

    held = _GatedExecutor(engine.loop.executor)
    async with engine_in_thread(engine.resolved, held) as served:
        served.client.start(take)
        await served.ready()
        for batch in rounds:
            held.sent.clear()
            for request in batch:
                outputs.add(request, None, streaming=False)
                served.client.add(request)
            held.sent.set()
            async with asyncio.timeout(60):
                while not all(request.request_id in found for request in batch):
                    await asyncio.sleep(0.001)
        await served.at_rest()
        return [found[request.request_id] for request in rounds[-1]], await served.client.stats()
