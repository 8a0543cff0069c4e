"""The worker in this process and thread: a step is computed when it is submitted."""

from __future__ import annotations

from collections.abc import Callable

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.worker.worker import Worker


class InprocExecutor:
    depth = 1

    def __init__(self, build: Callable[[], Worker]) -> None:
        self._build = build
        self._worker: Worker | None = None

    def start(self) -> None:
        self._worker = self._build()

    def submit(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if self._worker is None:
            raise RuntimeError("the executor is not running")
        return self._worker.execute(plan)

    def result(self, handle: object) -> ModelRunnerOutput:
        assert isinstance(handle, ModelRunnerOutput)
        return handle

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
