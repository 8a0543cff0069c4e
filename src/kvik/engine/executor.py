"""The interface between the trunks: how plans reach what computes them."""

from __future__ import annotations

from typing import Protocol

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs plans in the order of submission. The simulator implements it without a model.

    Attributes:
        depth: steps worth having in flight: 1 where compute happens in `submit`.
        in_turn: a step can be planned only with the result of the one before it, as where drafts
            follow from its tokens. A step in flight still overlaps with the delivery of deltas.
    """

    depth: int
    in_turn: bool

    def submit(self, plan: SchedulerOutput) -> object:
        """Begin a step. Returns a handle for `result`."""
        ...

    def result(self, handle: object) -> ModelRunnerOutput:
        """Wait for a step; results are asked for in the order of submission.

        Raises:
            Exception: the step as a whole failed; the executor can take the next one.
        """
        ...

    def rest(self) -> bool:
        """Use a moment without work to make later steps faster.

        Returns:
            Whether there is more of this to do.
        """
        ...

    def stop(self) -> None:
        """Free everything. Safe to call twice."""
        ...
