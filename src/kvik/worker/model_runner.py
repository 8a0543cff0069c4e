"""Runs plans: apply the diff, build the batch, forward, sample; then read, and remember.

A step is begun, and finished when its tokens are wanted. Between the two later steps may be begun:
their host work is done while the device computes. Such a step counts on a token whose id only the
device knows yet, and takes it from there. Where rules on the host depend on it (banned words
of several tokens), the earlier steps are finished once the forward of the next one has begun, and
the host works the rules out while the device computes.

Drafts are different: how many of them are right decides where the tokens of the next step stand, in
which blocks, and what they are. So a step that follows one with drafts is planned when that one is
known (`Executor.in_turn`), and a GPU waits for what depends on the tokens: reading and judging
them, the plan, the drafts, the inputs and their copy. This would need a drafter that runs on the
device, and places computed there. All else overlaps with a forward: deltas leave and requests
arrive.

In a pipeline a step that is begun is only laid out and handed to the earlier stages; its forward
here, and all that follows, comes when it is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.errors import describe
from kvik.worker.graphs import EngineNetwork, Graph
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.participant import Participant, RunningStep
from kvik.worker.pipeline import Pipeline
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs


class ModelRunner:
    """One model and its cache on one device."""

    def __init__(
        self,
        network: EngineNetwork,
        graph: Graph,
        inputs: StepInputs,
        table: RequestTable,
        participants: Sequence[Participant[Any]],
        device: torch.device,
        clock: Callable[[], float],
        *,
        depth: int,
        pipeline: Pipeline | None = None,
    ) -> None:
        """
        Args:
            participants: what takes part in each step, in this order.
            depth: how many steps may be begun before the first of them is finished.
            pipeline: of which this is the last stage; it is the graph, too. None: there are no
                other stages.
        """
        self.network = network
        self.graph = graph
        self.inputs = inputs
        self.table = table
        self.participants = participants
        self.device = device
        self.clock = clock
        self.depth = depth
        self.pipeline = pipeline
        self._keeps_output = any(each.reads_output for each in participants)
        self._in_turn = pipeline is None and (depth == 1 or self._keeps_output)
        self._running: deque[RunningStep] = deque()

    def begin(self, plan: SchedulerOutput) -> RunningStep:
        """Compute one step as far as the host need not wait for it. Steps are begun in the order of
        their plans.

        Raises:
            Exception: the forward as a whole failed. What concerns one request alone is reported
                in the output's `errors` instead.
        """
        started = self.clock()
        if self._in_turn or self._replaces(plan):
            self._settle()
        self.graph.prepare()
        refused = self._apply(plan)
        batch = self._lay_out(plan)
        errors: dict[int, str] = {}
        if refused:
            errors = {i: refused[slot] for i, slot in enumerate(plan.slots) if slot in refused}
        step = RunningStep(plan, started, batch, None, errors)
        if self.pipeline is None:
            self._launch(step)
        self._running.append(step)
        return step

    def _replaces(self, plan: SchedulerOutput) -> bool:
        """Return whether a request leaves of which a step in the pipeline has a row: what follows
        the forward of that step would find another one in its slot."""
        if self.pipeline is None or not self._running:
            return False
        gone = {*plan.freed_slots, *(new.slot for new in plan.new_requests)}
        return any(not gone.isdisjoint(step.plan.slots) for step in self._running)

    def _launch(self, step: RunningStep) -> None:
        """Run the forward of a step, and begin what follows it."""
        self._copy(step.plan)
        step.output = self.graph.run(step.batch)
        for participant in self.participants:
            if self._running and self.pipeline is None and participant.waits(step):
                self._settle()  # the device computes meanwhile
            step.launched.append(participant.launch(step))
        if not self._keeps_output:
            step.output = None

    def finish(self, step: RunningStep) -> ModelRunnerOutput:
        """Wait for a step and take in what it brought. Steps are finished in the order in which
        they were begun; one whose caller was interrupted may be left out.

        Raises:
            Exception: the step as a whole failed.
        """
        if step in self._running:
            while (oldest := self._running.popleft()) is not step:
                if self.pipeline is not None:
                    self._complete(oldest)
            self._complete(step)
        if step.result is None:
            step.result = RuntimeError("the step was interrupted")
        if isinstance(step.result, Exception):
            raise step.result
        return step.result

    def read(self, plan: SchedulerOutput) -> Tensor:
        """Compute a step that samples nothing, for a caller that wants more of it than tokens.

        Returns:
            [tokens, hidden], normalised, for the model's `logits`; valid until the next step.
        """
        self._apply(plan)
        batch = self._lay_out(plan)
        self._copy(plan)
        return self.graph.run(batch).hidden

    def _settle(self) -> None:
        """Complete all steps; their callers take the results later."""
        while self._running:
            self._complete(self._running.popleft())

    def _complete(self, step: RunningStep) -> None:
        """Read all that was launched. The step's result may be an exception."""
        try:
            if self.pipeline is not None:
                self._launch(step)
            for participant, launched in zip(self.participants, step.launched, strict=True):
                participant.read(step, launched)
            step.complete(self.clock())
        except Exception as error:
            step.result = error

    def _lay_out(self, plan: SchedulerOutput) -> InputBatch:
        """Lay out the inputs of a step, and hand them to the earlier stages of a pipeline."""
        batch = build_input_batch(plan, self.table, self.inputs)
        if self._running:
            for participant in self.participants:
                participant.prepare(batch, self._running)
        if self.pipeline is not None:
            self.pipeline.begin(plan)
        self.table.num_computed[batch.slots] = batch.ends
        return batch

    def _copy(self, plan: SchedulerOutput) -> None:
        self.network.copy_states(plan.state_copies)
        if plan.block_copies:
            self.network.copy_blocks(plan.block_copies)

    def _apply(self, plan: SchedulerOutput) -> dict[int, str]:
        """Bring the tables up to date, and drop what budgets drop. Returns slots whose request
        could not be set up, or not go on, and why."""
        refused: dict[int, str] = {}
        for slot in plan.freed_slots:
            for participant in self.participants:
                participant.leave(slot)
        for new in plan.new_requests:
            self.table.add(new)
            for participant in self.participants:
                try:
                    participant.enter(new)
                except Exception as error:  # its parameters alone are at fault
                    participant.leave(new.slot)
                    refused.setdefault(new.slot, describe(error))
        for slot, group, ids in plan.new_blocks:
            self.table.add_blocks(slot, group, ids)
        for cut in plan.budget_cuts:
            source, target = self.table.cut(cut)
            try:
                self.network.cut(cut, source, target)
            except Exception as error:  # what the request has kept is garbage, and no other one's
                refused.setdefault(cut.slot, describe(error))
        return refused
