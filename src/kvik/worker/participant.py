"""What takes part in steps, in addition to the forward of the model.

`ModelRunner` brings its tables up to date, runs the forward of a step, and hands the step to its
participants in the order of their list: prompt outputs, output tokens, drafts. A feature that needs
state for each request, or that reads or shapes what a step produces, is one more participant.
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
        output: of its forward; None once nothing reads it any more.
        errors: by row, of those found so far. A row with an error takes no further part.
        launched: what each participant has begun.
        expected: its output tokens, while only the device knows them.
        checked: which of its drafts were right; None: it has none, or they are not judged yet.
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
    # What participants put in; see `ModelRunnerOutput`.
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
        """Everything is read: make the result of what the participants put in."""
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
    """What takes part in the steps of those requests that ask for it.

    Subclasses override what they need; the defaults do nothing. A fault of one row goes into
    `step.errors`; an exception from `launch` or `read` ends the whole step.

    Attributes:
        reads_output: `read` looks at the step's `output`, which is kept until then. Steps then run
            in turn.
    """

    reads_output = False

    def enter(self, new: NewRequest) -> None:
        """A request got its slot, where the table already has it.

        Raises:
            Exception: the request alone fails; its slot is left at once.
        """

    def leave(self, slot: int) -> None:
        """The request of a slot has left it. May be called twice."""

    def prepare(self, batch: InputBatch, running: Sequence[RunningStep]) -> None:
        """Put into the inputs of a step what depends on steps that are still running."""

    def waits(self, step: RunningStep) -> bool:
        """Return whether the results of all earlier steps must be known before `launch`."""
        return False

    def launch(self, step: RunningStep) -> T | None:
        """Begin what follows the forward, without waiting for the device.

        Returns:
            What `read` is handed; None: nothing was begun.
        """
        return None

    def read(self, step: RunningStep, launched: T | None) -> None:
        """Wait for what was launched and put it into the step. Steps are read in their order."""
