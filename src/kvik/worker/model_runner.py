"""Runs a plan: apply the diff, build the batch, forward, sample, remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvik.config.memory import PROMPT_COPIED_ROWS, PROMPT_ROWS, SAMPLER_BYTES
from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.types import TokenLogprobs
from kvik.worker.graphs import Graph, Network, StepOutput
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Sampler, SampleResult, token_logprobs
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.step_inputs import StepInputs


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
    ) -> None:
        self.network = network
        self.graph = graph
        self.inputs = inputs
        self.table = table
        self.sampling = sampling
        self.sampler = Sampler(network.ops)
        self.device = device
        self.clock = clock
        self._prompt_logprobs: dict[int, _PromptLogprobs] = {}  # by slot

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step.

        Raises:
            Exception: the forward as a whole failed. What concerns one request alone is reported
                in the output's `errors` instead.
        """
        started = self.clock()
        refused = self._apply(plan)
        batch = build_input_batch(plan, self.table, self.inputs)
        output = self.graph.run(batch)
        self.table.num_computed[batch.slots] += np.diff(batch.starts).astype(np.int32)
        errors: dict[int, str] = {}
        if refused:
            errors = {i: refused[slot] for i, slot in enumerate(plan.slots) if slot in refused}
        prompt_logprobs = self._read_prompt_logprobs(batch, output.hidden, errors)
        token_ids: list[list[int]] = [[] for _ in plan.slots]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        if len(batch.sampling_rows):
            self._sample(batch, output, token_ids, logprobs, errors)
        return ModelRunnerOutput(
            step=plan.step,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            seconds=self.clock() - started,
        )

    def _apply(self, plan: SchedulerOutput) -> dict[int, str]:
        """Bring the tables up to date. Returns slots whose request could not be set up, and why."""
        refused: dict[int, str] = {}
        for slot in plan.freed_slots:
            self.sampling.clear(slot)
            self._prompt_logprobs.pop(slot, None)
        for new in plan.new_requests:
            self.table.add(new)
            try:
                self._set_up(new)
            except Exception as error:  # its parameters alone are at fault
                self.sampling.clear(new.slot)
                refused[new.slot] = describe(error)
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
    ) -> None:
        """One token for each sampling row, many rows at once; row by row if one breaks that."""
        rows = batch.sampling_rows
        slots = batch.slots[rows]
        positions = self.table.num_tokens[slots]  # of the token to be sampled

        def sample(part: slice) -> SampleResult:
            return self.sampler.sample(
                output.logits[part],
                self.sampling.batch(slots[part], positions[part]),
                (output.top[part], output.top_ids[part]),
            )

        parts: list[tuple[int, SampleResult]] = []
        size = self.sampling.rows_at_once(slots, SAMPLER_BYTES[self.device.type])
        for first in range(0, len(rows), size):
            try:
                parts.append((first, sample(slice(first, first + size))))
            except Exception:
                for i in range(first, min(first + size, len(rows))):
                    try:
                        parts.append((i, sample(slice(i, i + 1))))
                    except Exception as error:
                        errors[int(rows[i])] = describe(error)
        for first, result in parts:
            tokens = result.token_ids.cpu().numpy()
            part = slice(first, first + len(tokens))
            self.table.append_tokens(slots[part], tokens)
            for i, failure in self.sampling.append(slots[part], tokens).items():
                errors[int(rows[first + i])] = describe(failure)
            for row, token in zip(rows[part].tolist(), tokens[:, None].tolist(), strict=True):
                token_ids[row] = token
            for i, found in result.logprobs.items():
                logprobs[int(rows[first + i])] = [found]
            for i, why in result.bad_rows.items():
                errors[int(rows[first + i])] = why

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


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
