"""Runs plans: apply the diff, build the batch, forward, sample; then read, and remember.

A step is begun, and finished when its tokens are wanted. Between the two later steps may be begun:
their host work is done while the device computes. Such a step counts on a token whose id only the
device knows yet, and takes it from there. Where rules must hear of it first (words of several
tokens that are banned), the steps before are finished when the forward of the next one has begun:
the host makes up its mind meanwhile about what may be sampled from it.

Drafts are different: how many tokens of a step are right says where those of the next one stand, in
which blocks, and what they are. So a step that follows one with drafts is planned when that one is
known (`Executor.in_turn`), and a GPU waits meanwhile. What it waits for is what depends on the
tokens: reading and judging them, the plan, the drafts, the inputs and their copy. Nothing less
would do unless a drafter ran on the device and every place were computed there. All else is done
while a forward runs: deltas leave and requests come in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.kernels.upload import upload
from kvik.worker.copies import Copies
from kvik.worker.draft_checker import DraftChecker
from kvik.worker.graphs import Graph, Network, StepOutput
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.newest_tokens import NewestTokens
from kvik.worker.pooling import Pooling
from kvik.worker.prompt_logprobs import PromptLogprobs
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator
from kvik.worker.step_inputs import StepInputs
from kvik.worker.step_results import RunningStep, StepResults
from kvik.worker.step_sampler import StepSampler, describe


class ModelRunner:
    """One model and its cache on one device."""

    def __init__(
        self,
        network: Network,
        graph: Graph,
        inputs: StepInputs,
        table: RequestTable,
        sampling: SamplingTable,
        device: torch.device,
        clock: Callable[[], float],
        copies: Copies,
        speculator: Speculator | None = None,
    ) -> None:
        self.network = network
        self.graph = graph
        self.inputs = inputs
        self.table = table
        self.sampling = sampling
        self.sampler = StepSampler(network.ops, sampling, device, copies)
        self.device = device
        self.clock = clock
        self.depth = copies.depth
        self.speculator = speculator
        self.checker: DraftChecker | None = None
        if speculator is not None:
            self.checker = DraftChecker(network, table, self.sampler, speculator, device)
        self._results = StepResults(table, sampling, device, clock, speculator, self.checker)
        self._prompt_logprobs = PromptLogprobs(network, copies)
        self._pooling = Pooling(copies)
        self._newest: NewestTokens | None = None  # where a step may begin before it is known
        if copies.depth > 1 and speculator is None:
            self._newest = NewestTokens(len(table.num_tokens), device)
        self._running: deque[RunningStep] = deque()

    def begin(self, plan: SchedulerOutput) -> RunningStep:
        """Compute one step, as far as nobody has to wait for it. Steps are begun in the order of
        their plans.

        Raises:
            Exception: the forward as a whole failed. What concerns one request alone is reported
                in the output's `errors` instead.
        """
        started = self.clock()
        if self._newest is None:
            self._settle()
        self.graph.prepare()
        refused = self._apply(plan)
        batch, output = self._forward(plan)
        errors: dict[int, str] = {}
        if refused:
            errors = {i: refused[slot] for i, slot in enumerate(plan.slots) if slot in refused}
        step = RunningStep(
            plan,
            started,
            batch,
            None if self.speculator is None else output,
            errors,
            self._prompt_logprobs.launch(batch, output.hidden, self.table, errors),
            self._pooling.launch(batch, output.hidden, self.table, errors),
        )
        if self._running and self.sampling.waits(batch.slots):
            self._settle()  # the device computes meanwhile
        if len(batch.sampling_rows) and batch.num_drafts is None:
            self._launch(step, output)
        self._running.append(step)
        return step

    def finish(self, step: RunningStep) -> ModelRunnerOutput:
        """Wait for a step and take in what it brought. Steps are finished in the order in which
        they were begun; one whose caller was interrupted may be left out.

        Raises:
            Exception: the step as a whole failed.
        """
        if step in self._running:
            while self._running.popleft() is not step:
                pass
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
        return self._forward(plan)[1].hidden

    def _settle(self) -> None:
        """Finish all steps, for whom it may concern later."""
        while self._running:
            self._complete(self._running.popleft())

    def _complete(self, step: RunningStep) -> None:
        """To the step's result, which may be an exception."""
        try:
            step.result = self._results.take_in(step)
        except Exception as error:
            step.result = error

    def _forward(self, plan: SchedulerOutput) -> tuple[InputBatch, StepOutput]:
        tree = None if self.speculator is None else self.speculator.tree
        batch = build_input_batch(plan, self.table, self.inputs, tree)
        if self._running and self._newest is not None:
            rows = np.flatnonzero(self._unknown()[batch.slots] & np.array(plan.samples))
            if len(rows):
                self._newest.fill(batch.input_ids, batch.starts[1:][rows] - 1, batch.slots[rows])
        output = self.graph.run(batch)
        self.table.num_computed[batch.slots] += batch.starts[1:] - batch.starts[:-1]
        return batch, output

    def _unknown(self) -> np.ndarray:
        """[slots] bool, whose newest token only the device knows."""
        unknown = np.zeros(len(self.table.num_tokens), np.bool_)
        for step in self._running:
            if step.expected is not None:
                slots, kept = step.expected.slots, self.table.still(step.expected)
                unknown[slots if kept is None else slots[kept]] = True
        return unknown

    def _apply(self, plan: SchedulerOutput) -> dict[int, str]:
        """Bring the tables up to date. Returns slots whose request could not be set up, and why."""
        refused: dict[int, str] = {}
        for slot in plan.freed_slots:
            if self.speculator is not None:
                self.speculator.leave(slot)
            self.sampling.clear(slot)
            self._prompt_logprobs.leave(slot)
            self._pooling.leave(slot)
        for new in plan.new_requests:
            self.table.add(new)
            self._pooling.enter(new)
            try:
                self._set_up(new)
            except Exception as error:  # its parameters alone are at fault
                self.sampling.clear(new.slot)
                refused[new.slot] = describe(error)
            if self.speculator is not None:
                self.speculator.enter(new)
        for slot, group, ids in plan.new_blocks:
            self.table.add_blocks(slot, group, ids)
        if plan.block_copies:
            source, target = upload(np.array(plan.block_copies), self.device).unbind(1)
            for cache in {id(layer): layer for layer in self.network.kv}.values():
                for tensor in cache.tensors:
                    self.network.ops.copy_blocks(tensor, source, target)
        return refused

    def _set_up(self, new: NewRequest) -> None:
        prompt = new.token_ids[: new.num_prompt_tokens]
        output = new.token_ids[new.num_prompt_tokens :]
        self.sampling.set(new.slot, new.params, new.seed, prompt, output, new.stop_ids)
        self._prompt_logprobs.enter(new)

    def _launch(self, step: RunningStep, output: StepOutput) -> None:
        """Begin to sample one token for each sampling row. What depends on it is up to date when
        this returns, but for the host's knowledge of it."""
        slots = step.batch.slots[step.batch.sampling_rows]
        step.launched = self.sampler.launch(output, slots, self.table.num_tokens[slots])
        self.sampling.count(slots, step.launched.token_ids)
        if self._newest is not None:
            self._newest.note(slots, step.launched.token_ids)
        step.expected = self.table.expect(slots)
