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
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.core.plan import DraftTimes, ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.types import TokenLogprobs
from kvik.kernels.upload import upload
from kvik.worker.graphs import EngineNetwork, Graph, StepOutput
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.prompt_logprobs import (
    PooledChunk,
    Pooling,
    PromptLogprobs,
    ScoredChunk,
    read_pooled,
    read_prompt_logprobs,
)
from kvik.worker.request_table import Expected, RequestTable
from kvik.worker.sampler import LaunchedTokens, StepSampler, describe
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import CheckedDrafts, DraftChecker, Speculator
from kvik.worker.step_inputs import Copies, StepInputs

# The newest token of each running request, on the device: known there before the host knows it.


class NewestTokens:
    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # [slots]

    def note(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """slots: [rows]. token_ids: [rows] int64, what each sampled."""
        self._ids.index_copy_(0, upload(slots, self._ids.device), token_ids)

    def fill(self, input_ids: Tensor, places: np.ndarray, slots: np.ndarray) -> None:
        """Put the newest tokens of some slots where they are computed.

        Args:
            input_ids: [tokens] int64, changed in place. places, slots: [rows].
        """
        device = self._ids.device
        newest = self._ids.index_select(0, upload(slots, device))
        input_ids.index_copy_(0, upload(places, device), newest)


# What came of a step: waits for its tokens, takes them in, and has drafts made for the next.


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step between `begin` and `finish` of the `ModelRunner`.

    Attributes:
        output: of its forward, where drafts are judged or made; valid until the next step begins.
        errors: by row, of those found so far.
        scored, pooled: of the prompts that it reads, where wanted.
        launched, expected: its tokens, if it samples any and has no drafts.
        result: the step's output, once it is known.
    """

    plan: SchedulerOutput
    started: float
    batch: InputBatch
    output: StepOutput | None
    errors: dict[int, str]
    scored: list[ScoredChunk]
    pooled: list[PooledChunk]
    launched: LaunchedTokens | None = None
    expected: Expected | None = None
    result: ModelRunnerOutput | Exception | None = None
    token_ids: list[list[int]] = field(default_factory=list)  # by row
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class StepResults:
    def __init__(
        self,
        table: RequestTable,
        sampling: SamplingTable,
        device: torch.device,
        clock: Callable[[], float],
        speculator: Speculator | None,
        checker: DraftChecker | None,
    ) -> None:
        """
        Args:
            speculator, checker: both or none.
        """
        self.table = table
        self.sampling = sampling
        self.device = device
        self.clock = clock
        self.speculator = speculator
        self.checker = checker
        self._ended = clock()  # the last step

    def take_in(self, step: RunningStep) -> ModelRunnerOutput:
        """Wait for the step's tokens, and remember them."""
        batch, errors = step.batch, step.errors
        prompt_logprobs = read_prompt_logprobs(step.scored, errors)
        embeddings = read_pooled(step.pooled, errors)
        step.token_ids = [[] for _ in step.plan.slots]
        proposed: list[int] | None = None
        times: DraftTimes | None = None
        turn, tree = 0.0, None
        if len(batch.sampling_rows):
            checked = self._check(step) if step.launched is None else None
            if step.launched is not None and step.expected is not None:
                self._receive(step, step.launched, step.expected)
            guessing = self.speculator
            if guessing is not None:
                turn, tree = self.clock() - step.started, guessing.tree
                # Fewer steps also save what the engine does between them, unless it was idle.
                turn += min(step.started - self._ended, turn)
                rows = len(batch.sampling_rows)
                if checked is None and guessing.idle:
                    due = guessing.passed(rows, turn, pure=bool(batch.starts[-1] == rows))
                else:
                    due, times = True, self._observe(guessing, batch, checked, turn)
                if due:
                    assert step.output is not None
                    proposed = self._propose(guessing, batch, step.output, checked, errors)
        self._ended = self.clock()
        return ModelRunnerOutput(
            step=step.plan.step,
            token_ids=step.token_ids,
            num_draft_tokens=proposed,
            logprobs=step.logprobs,
            prompt_logprobs=prompt_logprobs,
            embeddings=embeddings,
            errors=errors,
            seconds=self._ended - step.started,
            turn_seconds=turn,
            draft_times=times,
            draft_places=None if tree is None else tree.reach,
        )

    def _receive(self, step: RunningStep, launched: LaunchedTokens, expected: Expected) -> None:
        """The tokens of a step without drafts have arrived."""
        rows, found = step.batch.sampling_rows, launched.read()
        self.table.learn(expected, found.token_ids)
        for i, failure in self._tell(expected, found.token_ids).items():
            step.errors[int(rows[i])] = describe(failure)
        for row, token in zip(rows.tolist(), found.token_ids[:, None].tolist(), strict=True):
            step.token_ids[row] = token
        for i, entry in found.logprobs.items():
            step.logprobs[int(rows[i])] = [entry]
        for i, why in found.bad_rows.items():
            step.errors[int(rows[i])] = why

    def _tell(self, expected: Expected, tokens: np.ndarray) -> dict[int, Exception]:
        """The rules of the requests that sampled, unless they have left."""
        kept = self.table.still(expected)
        if kept is None:
            return self.sampling.tell(expected.slots, tokens)
        rows = np.flatnonzero(kept)
        failed = self.sampling.tell(expected.slots[rows], tokens[rows])
        return {int(rows[i]): failure for i, failure in failed.items()}

    def _check(self, step: RunningStep) -> CheckedDrafts:
        """The tokens of a step with drafts: one for each sampling row, and one for each draft that
        was right."""
        batch, token_ids, logprobs = step.batch, step.token_ids, step.logprobs
        assert self.checker is not None
        assert step.output is not None and batch.num_drafts is not None
        checked = self.checker.check(batch, step.output, batch.num_drafts)
        rows, found = batch.sampling_rows, checked.found
        slots, tokens = batch.slots[rows], found.token_ids[checked.rows]
        appended = self.sampling.append(slots.repeat(checked.lengths), tokens)
        owners = rows.repeat(checked.lengths) if appended or found.logprobs else rows
        for i, failure in appended.items():
            step.errors[int(owners[i])] = describe(failure)
        if found.bad_rows:
            for row, first in zip(rows.tolist(), checked.first.tolist(), strict=True):
                if first in found.bad_rows:
                    step.errors[row] = found.bad_rows[first]
        told, begin = tokens.tolist(), 0
        for row, count in zip(rows.tolist(), checked.lengths.tolist(), strict=True):
            token_ids[row] = told[begin : begin + count]
            begin += count
        if found.logprobs:
            for row, i in zip(owners.tolist(), checked.rows.tolist(), strict=True):
                if i in found.logprobs:
                    logprobs.setdefault(row, []).append(found.logprobs[i])
        return checked

    @staticmethod
    def _observe(
        speculator: Speculator, batch: InputBatch, checked: CheckedDrafts | None, seconds: float
    ) -> DraftTimes:
        """How the drafts of the step fared, and what it took until its tokens were there."""
        slots, num_tokens = batch.slots[batch.sampling_rows], int(batch.starts[-1])
        if checked is None or batch.num_drafts is None:
            none = np.zeros(len(slots), np.int64)
            return speculator.observe(slots, none, none, seconds, pure=num_tokens == len(slots))
        drafts, tree = batch.num_drafts, speculator.tree
        return speculator.observe(
            slots,
            drafts,
            checked.lengths - 1,
            seconds,
            pure=len(slots) == len(batch.slots) and num_tokens == len(slots) + int(drafts.sum()),
            paths=None if tree is None else checked.paths(tree.drafts),
        )

    def _propose(
        self,
        speculator: Speculator,
        batch: InputBatch,
        output: StepOutput,
        checked: CheckedDrafts | None,
        errors: dict[int, str],
    ) -> list[int]:
        """How many drafts each row of the step gets for its next one."""
        rows = batch.sampling_rows
        newest = np.arange(len(rows)) if checked is None else checked.newest
        if errors:
            going_on = np.array([row not in errors for row in rows.tolist()], np.bool_)
            rows, newest = rows[going_on], newest[going_on]

        def hidden(chosen: np.ndarray) -> Tensor:
            wanted = upload(newest[chosen], self.device)
            places = batch.logits_indices.index_select(0, wanted)
            return output.hidden.index_select(0, places)

        slots = batch.slots[rows]
        speculator.propose(slots, hidden)
        proposed = np.zeros(len(batch.slots), np.int64)
        proposed[rows] = speculator.num_drafts[slots]
        found: list[int] = proposed.tolist()
        return found


class ModelRunner:
    """One model and its cache on one device."""

    def __init__(
        self,
        network: EngineNetwork,
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
        """Compute one step as far as the host need not wait for it. Steps are begun in the order of
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
