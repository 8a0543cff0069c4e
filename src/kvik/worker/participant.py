"""Participants: what takes part in steps in addition to the forward of the model.

`ModelRunner` updates its tables, runs the forward of a step, and hands the step to its participants
in the order of their list: prompt outputs, output tokens, drafts. A feature that needs state per
request, or that reads or changes what a step produces, is implemented as another participant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvik.core.plan import DraftTimes, ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.types import TokenLogprobs
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.rejection import CheckedDrafts
from kvik.worker.request_table import Expected


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step between `ModelRunner.begin` and `ModelRunner.finish`.

    Attributes:
        output: of its forward; None once it is not needed any more.
        errors: found so far, by row. Participants skip a row with an error.
        launched: results of each participant's `launch`.
        expected: its output tokens, while only the device knows them.
        checked: which of its drafts were accepted; None: it has none, or they are not checked yet.
        result: the step's output, or why it failed as a whole; None until it is known.
    """

    plan: SchedulerOutput
    started: float
    batch: InputBatch
    output: StepOutput | None
    errors: dict[int, str]
    launched: list[object] = field(default_factory=list)
    expected: Expected | None = None
    checked: CheckedDrafts | None = None
    result: ModelRunnerOutput | Exception | None = None
    # Results of participants; see `ModelRunnerOutput`.
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    embeddings: dict[int, list[float]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    num_draft_tokens: list[int] | None = None
    draft_times: DraftTimes | None = None
    draft_places: Sequence[int] | None = None
    turn_seconds: float = 0.0

    def complete(self, ended: float) -> None:
        """Make the result from what the participants have written."""
        self.result = ModelRunnerOutput(
            step=self.plan.step,
            token_ids=self.token_ids,
            num_draft_tokens=self.num_draft_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            embeddings=self.embeddings,
            errors=self.errors,
            ended=self.ended,
            seconds=ended - self.started,
            turn_seconds=self.turn_seconds,
            draft_times=self.draft_times,
            draft_places=self.draft_places,
        )


T = TypeVar("T")  # what a participant launches


class Participant(Generic[T]):
    """Takes part in steps, for the requests that need it.

    Subclasses override what they need; the defaults do nothing. An error in one row goes into
    `step.errors`; an exception from `launch` or `read` ends the whole step.

    Attributes:
        reads_output: `read` uses the step's `output`, which is kept until then. Steps then do not
            overlap.
    """

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
