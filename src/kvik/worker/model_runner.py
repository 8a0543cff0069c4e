"""Runs a plan: apply the diff, build the batch, forward, sample, remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.config.memory import PROMPT_COPIED_ROWS, PROMPT_ROWS
from kvik.core.plan import DraftTimes, ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.types import TokenLogprobs
from kvik.worker.draft_checker import CheckedDrafts, DraftChecker
from kvik.worker.graphs import Graph, Network, StepOutput
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.pooling import Pooling
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import token_logprobs
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator
from kvik.worker.step_inputs import StepInputs
from kvik.worker.step_sampler import StepSampler, describe


@dataclass(slots=True)
class _PromptLogprobs:
    """Gathered chunk by chunk, handed over once the prompt is through."""

    top: int
    found: list[TokenLogprobs] = field(default_factory=list)


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
        speculator: Speculator | None = None,
    ) -> None:
        self.network = network
        self.graph = graph
        self.inputs = inputs
        self.table = table
        self.sampling = sampling
        self.sampler = StepSampler(network.ops, sampling, device)
        self.device = device
        self.clock = clock
        self.speculator = speculator
        self.checker: DraftChecker | None = None
        if speculator is not None:
            self.checker = DraftChecker(network, table, self.sampler, speculator, device)
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}  # by slot
        self._pooling = Pooling()
        self._ended = clock()  # the last step

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step.

        Raises:
            Exception: the forward as a whole failed. What concerns one request alone is reported
                in the output's `errors` instead.
        """
        started = self.clock()
        refused = self._apply(plan)
        batch, output = self._forward(plan)
        errors: dict[int, str] = {}
        if refused:
            errors = {i: refused[slot] for i, slot in enumerate(plan.slots) if slot in refused}
        prompt_logprobs = self._read_prompt_logprobs(batch, output.hidden, errors)
        embeddings = self._pooling.read(batch, output.hidden, self.table, errors)
        token_ids: list[list[int]] = [[] for _ in plan.slots]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        proposed: list[int] | None = None
        times: DraftTimes | None = None
        if len(batch.sampling_rows):
            checked = self._sample(batch, output, token_ids, logprobs, errors)
            guessing = self.speculator
            if guessing is not None and (batch.num_drafts is not None or not guessing.rest()):
                seconds = self.clock() - started
                # Fewer steps also save what the engine does between them, unless it was idle.
                seconds += min(started - self._ended, seconds)
                times = self._observe(guessing, batch, checked, seconds)
                proposed = self._propose(guessing, batch, output, checked, errors)
        self._ended = self.clock()
        return ModelRunnerOutput(
            step=plan.step,
            token_ids=token_ids,
            num_draft_tokens=proposed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embeddings=embeddings,
            errors=errors,
            seconds=self._ended - started,
            draft_times=times,
        )

    def read(self, plan: SchedulerOutput) -> Tensor:
        """Compute a step that samples nothing, for a caller that wants more of it than tokens.

        Returns:
            [tokens, hidden], normalised, for the model's `logits`; valid until the next step.
        """
        self._apply(plan)
        return self._forward(plan)[1].hidden

    def _forward(self, plan: SchedulerOutput) -> tuple[InputBatch, StepOutput]:
        tree = None if self.speculator is None else self.speculator.tree
        batch = build_input_batch(plan, self.table, self.inputs, tree)
        output = self.graph.run(batch)
        self.table.num_computed[batch.slots] += np.diff(batch.starts).astype(np.int32)
        return batch, output

    def _apply(self, plan: SchedulerOutput) -> dict[int, str]:
        """Bring the tables up to date. Returns slots whose request could not be set up, and why."""
        refused: dict[int, str] = {}
        for slot in plan.freed_slots:
            if self.speculator is not None:
                self.speculator.leave(slot)
            self.sampling.clear(slot)
            self._prompt_logprobs.pop(slot, None)
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
            source, target = torch.tensor(plan.block_copies, device=self.device).unbind(1)
            for cache in {id(layer): layer for layer in self.network.kv}.values():
                for tensor in cache.tensors:
                    self.network.ops.copy_blocks(tensor, source, target)
        return refused

    def _set_up(self, new: NewRequest) -> None:
        prompt = new.token_ids[: new.num_prompt_tokens]
        output = new.token_ids[new.num_prompt_tokens :]
        self.sampling.set(new.slot, new.params, new.seed, prompt, output, new.stop_ids)
        if new.params.prompt_logprobs is not None:
            self._prompt_logprobs[new.slot] = _PromptLogprobs(new.params.prompt_logprobs)

    def _sample(
        self,
        batch: InputBatch,
        output: StepOutput,
        token_ids: list[list[int]],
        logprobs: dict[int, list[TokenLogprobs]],
        errors: dict[int, str],
    ) -> CheckedDrafts | None:
        """Tokens for the sampling rows: one for each, and one for each draft that was right.

        Returns:
            How the drafts fared; None if there were none.
        """
        rows = batch.sampling_rows
        slots = batch.slots[rows]
        if batch.num_drafts is not None:
            assert self.checker is not None
            checked = self.checker.check(batch, output, batch.num_drafts)
            self._take_in(batch, checked, token_ids, logprobs, errors)
            return checked
        found = self.sampler.sample(output, slots, self.table.num_tokens[slots])
        self.table.append_tokens(slots, found.token_ids)
        for i, failure in self.sampling.append(slots, found.token_ids).items():
            errors[int(rows[i])] = describe(failure)
        for row, token in zip(rows.tolist(), found.token_ids[:, None].tolist(), strict=True):
            token_ids[row] = token
        for i, entry in found.logprobs.items():
            logprobs[int(rows[i])] = [entry]
        for i, why in found.bad_rows.items():
            errors[int(rows[i])] = why
        return None

    def _take_in(
        self,
        batch: InputBatch,
        checked: CheckedDrafts,
        token_ids: list[list[int]],
        logprobs: dict[int, list[TokenLogprobs]],
        errors: dict[int, str],
    ) -> None:
        """What a step with drafts brought its requests."""
        rows, found = batch.sampling_rows, checked.found
        slots, tokens = batch.slots[rows], found.token_ids[checked.rows]
        owners = np.repeat(rows, checked.lengths)
        appended = self.sampling.append(np.repeat(slots, checked.lengths), tokens)
        for i, failure in appended.items():
            errors[int(owners[i])] = describe(failure)
        for row, first in zip(rows.tolist(), checked.first.tolist(), strict=True):
            if first in found.bad_rows:
                errors[row] = found.bad_rows[first]
        for row, token, i in zip(
            owners.tolist(), tokens.tolist(), checked.rows.tolist(), strict=True
        ):
            token_ids[row].append(token)
            if i in found.logprobs:
                logprobs.setdefault(row, []).append(found.logprobs[i])

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
            wanted = torch.from_numpy(newest[chosen]).to(self.device)
            places = batch.logits_indices.index_select(0, wanted)
            return output.hidden.index_select(0, places)

        slots = batch.slots[rows]
        speculator.propose(slots, hidden)
        proposed = np.zeros(len(batch.slots), np.int64)
        proposed[rows] = speculator.num_drafts[slots]
        found: list[int] = proposed.tolist()
        return found

    def _read_prompt_logprobs(
        self, batch: InputBatch, hidden: Tensor, errors: dict[int, str]
    ) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of the prompt tokens that this step's positions predict, where asked for."""
        done: dict[int, list[TokenLogprobs]] = {}
        if not self._prompt_logprobs:
            return done
        for row, slot in enumerate(batch.slots.tolist()):
            wanted = self._prompt_logprobs.get(slot)
            if wanted is None or row in errors:
                continue
            num_prompt = int(self.table.num_prompt[slot])
            start, end = int(batch.starts[row]), int(batch.starts[row + 1])
            first = int(self.table.num_computed[slot]) - (end - start)  # position of `start`
            last = min(first + end - start, num_prompt - 1)  # this one predicts no prompt token
            try:
                targets = self.table.token_ids[slot, first + 1 : last + 1].astype(np.int64)
                ids = torch.from_numpy(targets).to(self.device)
                for i in range(0, last - first, PROMPT_ROWS):
                    rows = hidden[start + i : start + last - first][:PROMPT_ROWS]
                    wanted.found += self._score(rows, ids[i : i + PROMPT_ROWS], wanted.top)
            except Exception as error:
                errors[row] = describe(error)
                continue
            if first + end - start >= num_prompt:
                done[row] = self._prompt_logprobs.pop(slot).found
        return done

    def _score(self, hidden: Tensor, ids: Tensor, top: int) -> list[TokenLogprobs]:
        """Logprobs of given tokens. Their logits are gone when it returns.

        Args:
            hidden: [rows, hidden]. ids: [rows] int64.
        """
        logits = self.network.model.logits(hidden)  # [rows, vocab]
        parts = zip(logits.split(PROMPT_COPIED_ROWS), ids.split(PROMPT_COPIED_ROWS), strict=True)
        return [found for part in parts for found in token_logprobs(*part, top)]
