"""What came of a step: waits for its tokens, takes them in, and has drafts made for the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.core.plan import DraftTimes, ModelRunnerOutput, SchedulerOutput
from kvik.core.types import TokenLogprobs
from kvik.kernels.upload import upload
from kvik.worker.draft_checker import CheckedDrafts, DraftChecker
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.pooling import PooledChunk, read_pooled
from kvik.worker.prompt_logprobs import ScoredChunk, read_prompt_logprobs
from kvik.worker.request_table import Expected, RequestTable
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator
from kvik.worker.step_sampler import LaunchedTokens, describe


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step between `begin` and `finish` of the `ModelRunner`.

    Attributes:
        output: of its forward, where drafts are judged or made; valid until the next step begins.
        errors: by row, of those found so far.
        scored, pooled: of the prompts that it reads, where wanted.
        launched, expected: its tokens, if it samples any and has no drafts.
        result: what came of it, once it is known.
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
