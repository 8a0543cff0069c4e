"""Measure how long an event loop is blocked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def longest_stall(work: Callable[[], object]) -> float:
    """Return the longest time, in seconds, that an event loop was blocked by `work` in a thread."""

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
    """Check that `work` in a thread does not block an event loop for more than 0.1 s.

    Other processes delay all threads alike. Plain bytecode, which releases the GIL regularly,
    measures how much; the best of a few attempts counts.
    """
    noise = min(longest_stall(_bytecode) for _ in range(3))
    stalls = []
    for _ in range(5):
        stalls.append(longest_stall(work))
        if stalls[-1] < 0.1 + 2 * noise:
            return
    raise AssertionError(f"the event loop was blocked for {stalls} s, with noise of {noise} s")


def _bytecode() -> None:
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
