"""Wait in an event loop for what other tasks, threads or processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition is true.

    Raises:
        TimeoutError: it is not true in time.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
