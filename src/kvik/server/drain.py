"""What is being answered now, and whether the server still takes requests."""

from __future__ import annotations

import asyncio


class Drain:
    """Counts answers under way, so that the end of a server can wait for them."""

    def __init__(self) -> None:
        self.started = False  # no new work: the server is being stopped
        self.num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        """Take requests again."""
        self.started = False

    def enter(self) -> None:
        self.num_open += 1
        self._empty.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._empty.set()

    async def wait(self, seconds: float) -> bool:
        """Until nothing is under way; False: some still is after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
