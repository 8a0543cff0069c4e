"""Participants: what takes part in steps in addition to the forward of the model.

`ModelRunner` updates its tables, runs the forward of a step, and hands the step to its participants
in the order of their list: prompt outputs, output tokens, drafts. A feature that needs state per
request, or that reads or changes what a step produces, is implemented as another participant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.worker.graphs import StepOutput
from kvik.worker.group import CutKeys
from kvik.worker.input_batch import InputBatch
from kvik.worker.rejection import CheckedDrafts
from kvik.worker.request_table import Expected


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step between `ModelRunner.begin` and `ModelRunner.finish`."""

    plan: SchedulerOutput
    started: float
    batch: InputBatch
    # What the participants have written so far. They skip rows with an error.
    result: ModelRunnerOutput
    output: StepOutput | None = None  # of its forward; None once it is not needed any more
    launched: list[object] = field(default_factory=list)  # results of each participant's `launch`
    expected: Expected | None = None  # its output tokens, while only the device knows them
    # Which of its drafts were accepted; None: it has none, or they are not checked yet.
    checked: CheckedDrafts | None = None
    done: bool = False  # the result is complete
    failure: Exception | None = None  # why it failed as a whole
    cuts: Sequence[CutKeys] = ()  # budget cuts before its forward

    def refuse(self, slots: Mapping[int, str]) -> None:
        """Note why the requests in some slots cannot continue."""
        for slot, reason in slots.items():
            if slot in self.plan.slots:
                self.result.errors.setdefault(self.plan.slots.index(slot), reason)


T = TypeVar("T")  # what a participant launches


class Participant(Generic[T]):
    """Takes part in steps, for the requests that need it.

    Subclasses override what they need; the defaults do nothing. An error in one row goes into
    `step.result.errors`; an exception from `launch` or `read` ends the whole step.
    """

    # `read` uses the step's `output`, which is kept until then. Steps then do not overlap.
    reads_output = False

    def enter(self, new: NewRequest) -> None:
        """Begin with a request that got a slot; the table already has it.

        Raises:
            Exception: only this request fails; `leave` is called at once.
        """

    def leave(self, slot: int) -> None:
        """Forget the request of a slot. May be called twice."""

    def prepare(self, batch: InputBatch, running: Sequence[RunningStep]) -> None:
        """Complete the inputs of a step that depend on steps still running."""

    def waits(self, step: RunningStep) -> bool:
        """Return whether the results of all earlier steps must be known before `launch`."""
        return False

    def launch(self, step: RunningStep) -> T | None:
        """Begin the work after the forward, without waiting for the device.

        Returns:
            The argument for `read`; None: nothing was launched.
        """
        return None

    def read(self, step: RunningStep, launched: T | None) -> None:
        """Wait for what was launched and write it into the step. Steps are read in order."""
