"""An engine in this process, as a frontend uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvik.config.config import ResolvedConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.engine.executor import Executor
from kvik.engine.loop import EngineLoop
from kvik.engine.stats import EngineStats
from kvik.text.tokenizer import Tokenizer


class InprocClient:
    """Takes requests and returns their deltas; polling runs the steps of the engine."""

    def __init__(self, loop: EngineLoop, sleep: Sleep) -> None:
        self._loop = loop
        self._sleep = sleep

    def check(self, request: EngineRequest) -> None:
        """Raise `ParamError` or `CapacityError` if the request can never be served."""
        self._loop.core.check(request)

    def add(self, request: EngineRequest) -> None:
        """Check and queue a request; raises `CapacityError` if the queue is full."""
        self._loop.add(request)

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        self._loop.end(request_id, index, reason, error)

    def poll(self, timeout: float | None = None) -> list[RequestDelta]:
        """Return the deltas since the last call; waits up to `timeout` seconds for some."""
        idle = self._loop.idle_seconds()
        if idle:  # the policy waits for more requests: do not spin
            self._sleep(idle if timeout is None else min(idle, timeout))
        return self._loop.step()

    @property
    def has_requests(self) -> bool:
        return self._loop.has_work

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def close(self) -> None:
        self._loop.close()


class Sleep(Protocol):
    def __call__(self, seconds: float, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and what a frontend needs to know of its model."""

    resolved: ResolvedConfig
    client: InprocClient
    tokenizer: Tokenizer | None  # None: the model has none; prompts are token ids
    default_params: SamplingParams
    executor: Executor
