"""An event loop whose clock jumps to the next timer, so that sleeping takes no time and is
exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for nothing"
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[object, object, object]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
