"""Run prompts as a server does: with tenants, pins, a socket and a flight recorder."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.served_engine import engine_in_thread

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.core.plan import SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, Handover, PageSource, Pin, RequestDelta
from kvik.engine.client import EngineClient
from kvik.engine.loop import Engine, EngineLoop, Executor
from kvik.engine.output import OutputProcessor, RequestOutput
from kvik.engine.recorder import RecordReader, open_recording
from kvik.engine.remote import EngineState
from kvik.engine.replay import Replayed
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
    played = played_again(resolved, path)
    assert played.difference is None
    assert played.tokens == found[1].delivered_tokens
    return found


def played_again(resolved: ResolvedConfig, path: Path) -> Replayed:
    """Replay a recording."""
    with open_recording(path) as file:
        reader = RecordReader(file, path.name)
        return play(resolved, reader.header.readings, reader.events(), lambda steps: None)


def serve_in_threads(config: EngineConfig, rounds: Rounds, engines: int = 1) -> Served:
    """Serve by engines in other threads, behind sockets; with routing between several."""
    loaded = [launch(config) for _ in range(engines)]
    try:
        return asyncio.run(_in_threads(loaded, rounds))
    finally:
        for engine in loaded:
            engine.loop.close()


async def _in_threads(engines: Sequence[Engine], rounds: Rounds) -> Served:
    found, several = Collected(), len(engines) > 1
    held = [_GatedExecutor(engine.loop.executor) for engine in engines]
    async with AsyncExitStack() as stack:
        served = []
        for engine, one in zip(engines, held, strict=True):
            context = engine_in_thread(engine.resolved, one, reports=several)
            served.append(await stack.enter_async_context(context))
        front = EngineClient(engines[0].resolved, [one.source for one in served])
        front.start(found.take)
        while any(link.state is not EngineState.READY for link in front.links):
            await asyncio.sleep(0.001)
        for batch in rounds:
            for one in held:
                one.sent.clear()
            for request in batch:
                found.expect(request)
                front.add(request)
            for one in held:
                one.sent.set()
            async with asyncio.timeout(60):
                while not found.has(batch):
                    await asyncio.sleep(0.001)
        for one in served:
            await one.at_rest()
        stats = await front.stats()
        parts = await asyncio.gather(*(link.stats() for link in front.links))
        assert all(part.delivered_tokens for part in parts)  # each had requests
        await front.close()
        return found.of(rounds[-1]), stats


def serve_by_peers(config: EngineConfig, rounds: Rounds) -> Served:
    """Compute prompts in one engine, and the rest in another one that fetches their pages."""
    found = Collected()
    with _lender_and_borrower(config) as loops:
        for batch in rounds:
            sources: dict[str, PageSource] = {}
            for request in batch:
                params = request.params.with_changes(max_tokens=1, min_tokens=0, n=1)
                loops[0].add(replace(request, params=params, lends=True))
            while loops[0].has_work:
                deltas = loops[0].poll()
                sources |= {
                    d.request_id: d.page_source for d in deltas if d.page_source is not None
                }
            for request in batch:
                found.expect(request)
                loops[1].add(replace(request, source=sources.get(request.request_id)))
            while loops[1].has_work:
                found.take(loops[1].poll())
        return found.of(rounds[-1]), loops[1].stats()


def serve_moved(config: EngineConfig, rounds: Rounds) -> Served:
    """Serve each request by one engine until it has begun, then by another one that fetches its
    pages."""
    found = Collected()
    handed: dict[str, list[Handover]] = {}
    begun: dict[str, set[int]] = defaultdict(set)  # siblings with a token

    def take(deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            if delta.token_ids:
                begun[delta.request_id].add(delta.index)
            if delta.handed is not None:
                handed.setdefault(delta.request_id, []).append(delta.handed)
                delta.finish_reason = None
        found.take(deltas)

    with _lender_and_borrower(config) as loops:
        for batch in rounds:
            for request in batch:
                found.expect(request)
                loops[0].add(request)
            while loops[0].has_work:
                for request in batch:
                    if len(begun[request.request_id]) == request.params.n:
                        loops[0].hand_over(request.request_id)
                take(loops[0].poll())
            for request in batch:
                if not found.has([request]):
                    resumed = tuple(handed[request.request_id])
                    loops[1].add(replace(request, resumed=resumed))
            while loops[1].has_work:
                take(loops[1].poll())
        assert handed
        return found.of(rounds[-1]), loops[1].stats()


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
    found = Collected()
    with closing(engine.loop) as loop:
        for batch in rounds:
            for request in batch:
                found.expect(request)
                loop.add(request)
            while loop.has_work:
                found.take(loop.poll())
        return found.of(rounds[-1]), loop.stats()


class Collected:
    """Collects the outputs of requests."""

    def __init__(self) -> None:
        self._processor = OutputProcessor(None)
        self._found: dict[str, RequestOutput] = {}

    def expect(self, request: EngineRequest) -> None:
        self._processor.add(request, None, streaming=False)

    def take(self, deltas: list[RequestDelta]) -> None:
        finished = self._processor.process(deltas).finished
        self._found.update({output.request_id: output for output in finished})

    def has(self, batch: Sequence[EngineRequest]) -> bool:
        """Return whether all of these requests have ended."""
        return all(request.request_id in self._found for request in batch)

    def of(self, batch: Sequence[EngineRequest]) -> list[RequestOutput]:
        return [self._found[request.request_id] for request in batch]


class _GatedExecutor:
    """An executor that waits until a whole batch has been sent, so that batches do not depend on
    the speed of threads."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.sent = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: SchedulerOutput) -> object:
        assert self.sent.wait(30)
        return self._executor.submit(plan)
