"""What the server gives up under pressure, so that everyone gets something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvik.core.sampling_params import SamplingParams
from kvik.engine.async_client import AsyncEngineClient


@dataclass(frozen=True, slots=True)
class Degradation:
    """Shorter answers while much waits.

    Attributes:
        max_tokens: what an answer may have then; None: as many as asked for.
        threshold: pressure from which this holds, 0 to 1.
    """

    max_tokens: int | None = None
    threshold: float = 0.75

    def apply(self, params: SamplingParams, pressure: float) -> SamplingParams:
        """The same object if nothing changes."""
        if self.max_tokens is None or pressure < self.threshold:
            return params
        cap = max(self.max_tokens, params.min_tokens)
        if params.max_tokens is not None and params.max_tokens <= cap:
            return params
        return replace(params, max_tokens=cap)


def pressure(queue_fill: float, kv_usage: float, *, waiting: bool) -> float:
    """How hard it is to serve what there is, 0 to 1. A full KV cache is no pressure as long as
    nobody waits for it."""
    return max(queue_fill, kv_usage if waiting else 0.0)


class KVUsage:
    """The share of KV blocks in use, asked for at most once a second."""

    def __init__(self, engine: AsyncEngineClient, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._asked = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._last = 0.0

    def read(self) -> float:
        """As last known; asks for the next time."""
        if self._clock() - self._asked >= 1.0 and (self._task is None or self._task.done()):
            self._asked = self._clock()
            self._task = asyncio.get_running_loop().create_task(self._ask())
        return self._last

    async def _ask(self) -> None:
        self._last = (await self._engine.stats()).kv_usage
