"""Runs plans: apply the diff, build the batch, run the forward, sample; later read the results.

A step is begun, and finished when its tokens are needed. In between, later steps may be begun:
their host work is done while the device computes. Such a step uses a token whose id is known only
on the device, and takes it from there. If rules on the host depend on it (banned words of several
tokens), the earlier steps are finished once the forward of the next one has begun, and the host
evaluates the rules while the device computes.

Drafts are different: the number accepted determines positions, blocks and tokens of the next step.
So a step after one with drafts is planned when the result of that one is known
(`Executor.in_turn`). Meanwhile a GPU waits for the host to read and check the tokens, plan, draft,
and prepare and copy the inputs. Avoiding this would need a drafter that runs on the device, and
positions computed there. All other work overlaps with a forward: sending deltas, receiving
requests.

In a pipeline, beginning a step only prepares its inputs and hands them to the earlier stages; its
forward here, and what follows, runs when the step is finished.

What takes part in steps in addition to the forward are participants, in the order of their list:
prompt outputs, output tokens, drafts. A feature that needs state per request, or that reads or
changes what a step produces, is implemented as another participant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.errors import describe
from kvik.worker.graphs import EngineNetwork, Graph, StepOutput
from kvik.worker.group import CutKeys
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.pipeline import Pipeline
from kvik.worker.rejection import CheckedDrafts
from kvik.worker.request_table import Expected, RequestTable
from kvik.worker.step_inputs import StepInputs


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


class ModelRunner:
    """One model and its cache on one device."""

    def __init__(
        self,
        network: EngineNetwork,
        graph: Graph,
        inputs: StepInputs,
        table: RequestTable,
        participants: Sequence[Participant[Any]],
        clock: Callable[[], float],
        *,
        depth: int,
        pipeline: Pipeline | None = None,
    ) -> None:
        """
        Args:
            participants: participants of each step, in this order.
            depth: how many steps may be begun before the first of them is finished.
            pipeline: the pipeline of which this is the last stage, also passed as the graph; None:
                there are no other stages.
        """
        self.network = network
        self.graph = graph
        self.inputs = inputs
        self.table = table
        self.participants = participants
        self.clock = clock
        self.pipeline = pipeline
        self._keeps_output = any(participant.reads_output for participant in participants)
        self._in_turn = pipeline is None and (depth == 1 or self._keeps_output)
        self._running: deque[RunningStep] = deque()

    def begin(self, plan: SchedulerOutput) -> RunningStep:
        """Compute one step as far as possible without waiting for the device. Steps are begun in
        the order of their plans.

        Raises:
            Exception: the forward as a whole failed. Errors of single requests are reported in the
                output's `errors` instead.
        """
        started = self.clock()
        if self._in_turn or self._replaces(plan):
            self._settle()
        self.graph.prepare()
        refused, cuts = self._apply(plan)
        batch = self._lay_out(plan, cuts)
        step = RunningStep(plan, started, batch, ModelRunnerOutput(plan.step, []), cuts=cuts)
        step.refuse(refused)
        if self.pipeline is None:
            self._launch(step)
        self._running.append(step)
        return step

    def _replaces(self, plan: SchedulerOutput) -> bool:
        """Return whether a request with a row in a running step of the pipeline leaves its slot:
        after the forward of that step another request would be in the slot."""
        if self.pipeline is None or not self._running:
            return False
        gone = {*plan.freed_slots, *(new.slot for new in plan.new_requests)}
        return any(not gone.isdisjoint(step.plan.slots) for step in self._running)

    def _launch(self, step: RunningStep) -> None:
        """Run the forward of a step, and launch the participants."""
        step.refuse(self._move(step.plan, step.cuts))
        step.output = self.graph.run(step.batch)
        for participant in self.participants:
            if self._running and self.pipeline is None and participant.waits(step):
                self._settle()  # the device computes meanwhile
            step.launched.append(participant.launch(step))
        if not self._keeps_output:
            step.output = None

    def finish(self, step: RunningStep) -> ModelRunnerOutput:
        """Wait for a step and return its result. Steps are finished in the order in which they were
        begun; one whose caller was interrupted may be skipped.

        Raises:
            Exception: the step as a whole failed.
        """
        if step in self._running:
            while (oldest := self._running.popleft()) is not step:
                if self.pipeline is not None:
                    self._complete(oldest)
            self._complete(step)
        if step.failure is not None:
            raise step.failure
        if not step.done:
            raise RuntimeError("the step was interrupted")
        return step.result

    def read(self, plan: SchedulerOutput) -> Tensor:
        """Compute a step that samples nothing, for a caller that needs hidden states.

        Returns:
            [tokens, hidden], normalised, for the model's `logits`; valid until the next step.
        """
        _, cuts = self._apply(plan)
        batch = self._lay_out(plan, cuts)
        self._move(plan, cuts)
        return self.graph.run(batch).hidden

    def _settle(self) -> None:
        """Complete all steps; their callers fetch the results later."""
        while self._running:
            self._complete(self._running.popleft())

    def _complete(self, step: RunningStep) -> None:
        """Read all that was launched."""
        try:
            if self.pipeline is not None:
                self._launch(step)
            for participant, launched in zip(self.participants, step.launched, strict=True):
                participant.read(step, launched)
            step.result.seconds = self.clock() - step.started
            step.done = True
        except Exception as error:
            step.failure = error

    def _lay_out(self, plan: SchedulerOutput, cuts: Sequence[CutKeys]) -> InputBatch:
        """Prepare the inputs of a step, and hand them to the earlier stages of a pipeline."""
        batch = build_input_batch(plan, self.table, self.inputs)
        if self._running:
            for participant in self.participants:
                participant.prepare(batch, self._running)
        if self.pipeline is not None:
            self.pipeline.begin(plan, cuts)
        self.table.compute(batch.slots, batch.ends, plan.num_draft_tokens)
        return batch

    def _apply(self, plan: SchedulerOutput) -> tuple[dict[int, str], list[CutKeys]]:
        """Update the tables. Returns slots whose request could not be set up, and why; and the
        budget cuts."""
        refused: dict[int, str] = {}
        self.table.copy_states(plan.state_copies)
        for slot in plan.freed_slots:
            for participant in self.participants:
                participant.leave(slot)
        for new in plan.new_requests:
            self.table.add(new)
            for participant in self.participants:
                try:
                    participant.enter(new)
                except Exception as error:  # caused by its parameters
                    participant.leave(new.slot)
                    refused.setdefault(new.slot, describe(error))
        for slot, group, ids in plan.new_blocks:
            self.table.add_blocks(slot, group, ids)
        return refused, [self.table.cut(cut) for cut in plan.budget_cuts]

    def _move(self, plan: SchedulerOutput, cuts: Sequence[CutKeys]) -> dict[int, str]:
        """Cut and copy what the caches have, before the forward of a step. Returns slots whose
        request cannot continue, and why."""
        refused: dict[int, str] = {}
        for cut in cuts:
            try:
                self.network.cut(cut)
            except Exception as error:  # the kept tokens are garbage, but only this request's
                refused.setdefault(cut.slot, describe(error))
        self.network.copy(plan.block_copies, plan.state_copies)
        return refused
