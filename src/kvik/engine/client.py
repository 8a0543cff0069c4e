"""How a frontend talks to the engine, whether it lives in this process or in another."""

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


class EngineClient(Protocol):
    """Requests in, deltas out; the engine's clock never leaks but in reports."""

    def check(self, request: EngineRequest) -> None:
        """Raises `ParamError` or `CapacityError` when the request can never be served."""
        ...

    def add(self, request: EngineRequest) -> None:
        """`check`, and refuse when the queue is full."""
        ...

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None: ...

    def poll(self, timeout: float | None = None) -> list[RequestDelta]:
        """What has happened since the last call; waits up to `timeout` seconds for something."""
        ...

    @property
    def has_requests(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class InprocClient:
    """The engine in this process: polling runs its steps."""

    def __init__(self, loop: EngineLoop, sleep: Sleep) -> None:
        self._loop = loop
        self._sleep = sleep

    def check(self, request: EngineRequest) -> None:
        self._loop.core.check(request)

    def add(self, request: EngineRequest) -> None:
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
        idle = self._loop.idle_seconds()
        if idle:  # a policy waits for company: do not spin meanwhile
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
    client: EngineClient
    tokenizer: Tokenizer | None  # None: the model has none; prompts are token ids
    default_params: SamplingParams
    executor: Executor
