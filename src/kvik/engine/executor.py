"""The seam between the trunks: how plans reach whoever computes them."""

from __future__ import annotations

from typing import Protocol

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs plans in the order of submission. The simulator implements it without a model."""

    depth: int  # steps worth having in flight: 1 where compute happens in `submit`

    def start(self) -> None:
        """Load the model and allocate the cache."""
        ...

    def submit(self, plan: SchedulerOutput) -> object:
        """Begin a step. Returns a handle for `result`."""
        ...

    def result(self, handle: object) -> ModelRunnerOutput:
        """Wait for a step; results are asked for in the order of submission.

        Raises:
            Exception: the step as a whole failed; the executor can take the next one.
        """
        ...

    def stop(self) -> None:
        """Free everything. Safe to call twice."""
        ...
