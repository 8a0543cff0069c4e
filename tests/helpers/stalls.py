"""How long an event loop has no turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def longest_stall(work: Callable[[], object]) -> float:
    """Seconds for which an event loop had no turn while `work` was done in a thread beside it."""

    async def run() -> float:
        worst, done = 0.0, asyncio.ensure_future(asyncio.to_thread(work))
        while not done.done():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before)
        await done
        return worst

    return asyncio.run(run())


def assert_turns(work: Callable[[], object]) -> None:
    """An event loop has its turn while `work` is done beside it, after 0.1 s at the latest.

    Other processes hold up all threads alike: how much is told by work that gives way at once, and
    the best of a few tries counts.
    """
    noise = min(longest_stall(_gives_way) for _ in range(3))
    stalls = []
    for _ in range(5):
        stalls.append(longest_stall(work))
        if stalls[-1] < 0.1 + 2 * noise:
            return
    raise AssertionError(f"nobody else had a turn for {stalls} s, beside noise of {noise} s")


def _gives_way() -> None:
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
