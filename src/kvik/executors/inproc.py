"""The worker in this process and thread: a step is begun when it is submitted. On a CPU that
computes it; a GPU goes on while the next one is planned."""

from __future__ import annotations

from collections.abc import Callable

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.worker.model_runner import RunningStep
from kvik.worker.worker import Worker


class InprocExecutor:
    depth, in_turn = 1, False  # until the worker says what it can do

    def __init__(self, build: Callable[[], Worker]) -> None:
        self._build = build
        self._worker: Worker | None = None

    def start(self) -> None:
        self._worker = self._build()
        self.depth, self.in_turn = self._worker.depth, self._worker.in_turn

    def submit(self, plan: SchedulerOutput) -> RunningStep:
        return self._ready().begin(plan)

    def result(self, handle: object) -> ModelRunnerOutput:
        assert isinstance(handle, RunningStep)
        return self._ready().finish(handle)

    def rest(self) -> bool:
        return self._ready().rest()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ready(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor is not running")
        return self._worker
