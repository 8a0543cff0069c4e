"""Unused KV blocks are returned to a system that is short of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers import invariants

from kvik.config.units import MIB
from kvik.core.config import TierSizes
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop, LoopObserver
from kvik.engine.memory_watch import LOW, MemoryReading, MemoryWatch

ENOUGH = 100 * LOW


def watch_of(*readings: MemoryReading, limit: int = ENOUGH) -> MemoryWatch:
    given: Iterator[MemoryReading] = iter(readings)
    return MemoryWatch(limit, lambda: next(given))


@pytest.mark.parametrize(
    ("readings", "shares"),
    [
        ([(5.0, ENOUGH), (5.0, ENOUGH)], [0.0, 0.0]),
        ([(5.0, ENOUGH), (5.3, ENOUGH), (5.31, ENOUGH)], [0.0, 0.5, 0.0]),  # waits from the start
        ([(5.0, LOW - 1), (5.0, LOW)], [1.0, 0.0]),
        ([(5.0, ENOUGH), (5.9, LOW - 1)], [0.0, 1.0]),
    ],
)
def test_blocks_returned_by_readings_of_the_system(
    readings: list[tuple[float, int]], shares: list[float]
) -> None:
    watch = watch_of(*(MemoryReading(*reading) for reading in readings))
    assert [watch.share_to_give_back(10.0 + i)[0] for i in range(len(readings))] == shares


def test_a_small_limit_makes_little_memory_enough() -> None:
    watch = watch_of(MemoryReading(0.0, 10 * MIB), MemoryReading(0.0, 2 * MIB), limit=100 * MIB)
    assert [watch.share_to_give_back(now)[0] for now in (0.0, 1.0)] == [0.0, 1.0]


def test_the_system_is_read_once_a_second() -> None:
    watch = watch_of(MemoryReading(0.0, 0), MemoryReading(0.0, 0))
    found = [watch.share_to_give_back(now)[0] for now in (0.0, 0.5, 0.9, 1.0, 1.5)]
    assert found == [1.0, 0.0, 0.0, 1.0, 0.0]


class Given(LoopObserver):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def gave_back(self, count: int, now: float) -> None:
        self.counts.append(count)


class Pressed:
    """An engine without a model on a system with `left` bytes of memory."""

    def __init__(self, rig: Callable[..., Any], depth: int = 1, **cache: object) -> None:
        made = rig(depth)
        self.left, self.blocks, self.observer = ENOUGH, list[int](), Given()
        made.executor.give_back = self.give_back
        watch = MemoryWatch(ENOUGH, lambda: MemoryReading(0.0, self.left))
        self.clock, self.executor, config = made.clock, made.executor, made.core.config
        self.core = EngineCore(replace(config, cache=replace(config.cache, **cache)))
        self.loop = EngineLoop(self.core, made.executor, made.clock, [self.observer], watch)

    def give_back(self, blocks: Sequence[int]) -> int:
        running = self.core.scheduler.running
        assert not set(blocks) & {block for request in running for block in request.block_ids[0]}
        self.blocks += blocks
        return 4096 * len(blocks)

    def serve(self, name: str) -> int:
        """Run a request, and return how many tokens of its prompt were cached."""
        self.loop.add(EngineRequest(name, [1] * 21, SamplingParams(max_tokens=3)))
        cached = 0
        while self.loop.has_work:
            for delta in self.loop.step():
                cached = delta.report.num_cached_tokens if delta.report else cached
            invariants.check(self.core.scheduler)
        return cached


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_returns_its_cache(rig: Callable[..., Any], depth: int) -> None:
    pressed = Pressed(rig, depth)
    assert pressed.serve("a") == 0
    assert pressed.serve("b") > 0
    assert pressed.loop.look_at_memory() == 1.0
    pressed.left = 0
    pressed.clock.now += 1.0
    unused = pressed.core.scheduler.kv.pool.num_unused
    pressed.loop.look_at_memory()
    assert len(set(pressed.blocks)) == len(pressed.blocks) == unused
    assert pressed.observer.counts == [unused]
    stats = pressed.loop.stats()
    assert (stats.cached_blocks, stats.given_back_blocks) == (0, unused)
    assert pressed.loop.look_at_memory() is None  # nothing is left to return
    pressed.left = ENOUGH
    assert pressed.serve("c") == 0
    assert pressed.serve("d") > 0


def test_blocks_of_requests_stay(rig: Callable[..., Any]) -> None:
    pressed = Pressed(rig)
    pressed.serve("before")
    pressed.left = 0
    for name in "ab":
        pressed.loop.add(EngineRequest(name, [2] * 21, SamplingParams(max_tokens=30)))
    finished = 0
    while pressed.loop.has_work:
        pressed.clock.now += 1.0
        finished += sum(delta.finish_reason is not None for delta in pressed.loop.step())
        invariants.check(pressed.core.scheduler)
    assert finished == 2 and pressed.blocks


def test_blocks_to_be_stored_stay(rig: Callable[..., Any]) -> None:
    """A request that is handed over has left its blocks, and the next plan stores them."""
    tiers = TierSizes((64,), memory=16)
    pressed = Pressed(rig, tiers=tiers)
    pressed.loop.add(EngineRequest("a", [2] * 21, SamplingParams(max_tokens=30)))
    for _ in range(3):
        pressed.loop.step()
    pressed.left = 0
    pressed.clock.now += 1.0
    pressed.loop.hand_over("a")
    pressed.loop.step()
    stored = {store.block for plan in pressed.executor.plans[-1:] for store in plan.stores}
    assert stored and not stored & set(pressed.blocks)
    pressed.clock.now += 1.0
    pressed.loop.look_at_memory()
    assert stored <= set(pressed.blocks)
