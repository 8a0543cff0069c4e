"""The output tokens of a step: sampled, or from checked drafts; then written to all tables.

Sampling is launched after the forward, and read later, when the next step may already run. Many
rows are sampled at once; if that fails, they are sampled one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvik.config.step_memory import SAMPLER_BYTES
from kvik.core.plan import NewRequest
from kvik.core.types import TokenLogprobs
from kvik.errors import describe
from kvik.frozen import frozen
from kvik.kernels.ops import Ops
from kvik.kernels.upload import upload
from kvik.worker.graphs import EngineNetwork, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.model_runner import Participant, RunningStep
from kvik.worker.rejection import Chains, CheckedDrafts, Trees
from kvik.worker.request_table import Expected, RequestTable
from kvik.worker.sampler import Sampled, Sampler, Tokens
from kvik.worker.sampling_batch import NOTHING, Guesses, Offers, Supposed
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator
from kvik.worker.step_inputs import Arrival, Copies


@frozen
class LaunchedTokens:
    """Tokens that the device has or will have."""

    token_ids: Tensor  # [rows] int64 on the device; meaningless in bad rows, but a valid id
    bad_rows: dict[int, str]  # rows whose sampling could not be launched, and why
    parts: list[tuple[int, Sampled]]  # (first row, result) of rows that were sampled together
    arrival: Arrival  # of the tokens, and of the parts' tensors

    def read(self) -> Tokens:
        """Wait for the tokens and return them."""
        token_ids, *arrays = self.arrival()
        if not arrays and not self.bad_rows and not any(part.bad_rows for _, part in self.parts):
            return Tokens(token_ids)  # the usual case; greedy steps are short, so it must be fast
        bad_rows, used = dict(self.bad_rows), 0
        logprobs: dict[int, TokenLogprobs] = {}
        for first, part in self.parts:
            part_arrays = arrays[used : used + len(part.tensors)]
            used += len(part_arrays)
            part_tokens = part.read(token_ids[first : first + len(part.token_ids)], part_arrays)
            logprobs |= {first + i: entry for i, entry in part_tokens.logprobs.items()}
            bad_rows |= {first + i: reason for i, reason in part_tokens.bad_rows.items()}
        return Tokens(token_ids, bad_rows, logprobs)


class StepSampler:
    """Samples the rows of logits of a step, with the parameters of their requests."""

    def __init__(
        self, ops: Ops, sampling: SamplingTable, device: torch.device, copies: Copies
    ) -> None:
        self.sampling = sampling
        self._copies = copies
        self._sampler = Sampler(ops, checks_at_once=copies.depth == 1)
        self._most_bytes = SAMPLER_BYTES[device.type]

    def launch(
        self,
        output: StepOutput,
        slots: np.ndarray,
        positions: np.ndarray,
        supposed: Supposed = NOTHING,
        judged: Guesses | Offers | None = None,
    ) -> LaunchedTokens:
        """Begin to sample one token for each row.

        Args:
            output: of the step, with the same number of rows of logits.
            slots, positions: [rows], slot and position of each row's token.
            supposed: drafts that rows assume to be output before their token.
            judged: drafts with the rows that check them: sampled ones (`Guesses`), or ones that may
                be accepted though another token was drawn (`Offers`).
        """

        rows = len(slots)

        def sample(first: int, last: int) -> Sampled:
            if first == 0 and last == rows:  # the usual case
                batch = self.sampling.batch(slots, positions, supposed, judged)
                return self._sampler.sample(output.logits, batch, (output.top, output.top_ids))
            part = slice(first, last)
            batch = self.sampling.batch(
                slots[part],
                positions[part],
                supposed.part(first, last),
                None if judged is None else judged.part(first, last),
            )
            largest = (output.top[part], output.top_ids[part])
            return self._sampler.sample(output.logits[part], batch, largest)

        size = self.sampling.rows_at_once(slots, self._most_bytes, shares=judged is not None)
        parts: list[tuple[int, Sampled]] = []
        bad_rows: dict[int, str] = {}
        for first in range(0, rows, size):
            last = min(first + size, rows)
            try:
                parts.append((first, sample(first, last)))
            except Exception:
                for i in range(first, last):
                    try:
                        parts.append((i, sample(i, i + 1)))
                    except Exception as error:
                        bad_rows[i] = describe(error)
        if len(parts) == 1 and not bad_rows:
            token_ids = parts[0][1].token_ids
        else:
            token_ids = torch.zeros(rows, dtype=torch.int64, device=output.logits.device)
            for first, part in parts:
                token_ids[first : first + len(part.token_ids)] = part.token_ids
        tensors = [token_ids]
        for _, part in parts:
            tensors += part.tensors
        return LaunchedTokens(token_ids, bad_rows, parts, self._copies.start(tensors))


class NewestTokens:
    """The newest token of each running request on the device, where it is known earlier than on the
    host."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # [slots]

    def put(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """Store sampled tokens. slots: [rows]. token_ids: [rows] int64."""
        self._ids.index_copy_(0, upload(slots, self._ids.device), token_ids)

    def fill(self, input_ids: Tensor, places: np.ndarray, slots: np.ndarray) -> None:
        """Write the newest tokens of some slots into the inputs of a step.

        Args:
            input_ids: [tokens] int64, changed in place. places, slots: [rows].
        """
        device = self._ids.device
        newest = self._ids.index_select(0, upload(slots, device))
        input_ids.index_copy_(0, upload(places, device), newest)


class OutputTokens(Participant[LaunchedTokens]):
    """Samples one token for each sampling row of a step, or checks the drafts of its rows.

    Steps with drafts are sampled when they are read: no later step may begin before it is known
    which drafts were accepted.
    """

    def __init__(
        self,
        network: EngineNetwork,
        table: RequestTable,
        sampling: SamplingTable,
        device: torch.device,
        copies: Copies,
        speculator: Speculator | None,
    ) -> None:
        """
        Args:
            copies: copies tokens to the host. If it lets steps overlap and there are no drafts, a
                step takes tokens that are known only on the device from there.
            speculator: knows how the drafts were made.
        """
        self.network = network
        self.table = table
        self.sampling = sampling
        self.sampler = StepSampler(network.ops, sampling, device, copies)
        self.speculator = speculator
        self.newest: NewestTokens | None = None
        if copies.depth > 1 and speculator is None:
            self.newest = NewestTokens(len(table.num_tokens), device)

    def enter(self, new: NewRequest) -> None:
        prompt, output = new.token_ids, new.token_ids[new.num_prompt_tokens :]
        if output:  # else the prompt, which may be long, is not copied
            prompt = prompt[: new.num_prompt_tokens]
        self.sampling.set(new.slot, new.params, new.seed, prompt, output, new.stop_ids)

    def leave(self, slot: int) -> None:
        self.sampling.clear(slot)

    def prepare(self, batch: InputBatch, running: Sequence[RunningStep]) -> None:
        if self.newest is None:
            return
        unknown = np.zeros(len(self.table.num_tokens), np.bool_)  # [slots]
        for step in running:
            if step.expected is not None:
                slots, present = step.expected.slots, self.table.still(step.expected)
                unknown[slots if present is None else slots[present]] = True
        rows = batch.sampling_rows[unknown[batch.slots[batch.sampling_rows]]]
        if len(rows):
            self.newest.fill(batch.tensors.input_ids, batch.starts[1:][rows] - 1, batch.slots[rows])

    def waits(self, step: RunningStep) -> bool:
        return self.sampling.waits(step.batch.slots)

    def launch(self, step: RunningStep) -> LaunchedTokens | None:
        """Begin to sample. When this returns, all state that depends on the tokens is updated,
        except on the host."""
        batch, output = step.batch, step.output
        if output is None or not len(batch.sampling_rows) or batch.num_drafts is not None:
            return None
        slots = batch.slots[batch.sampling_rows]
        # Complete before this step: the token that ended the text was read after the step was
        # planned, or while the request was preempted.
        for i in self.sampling.ended(slots):
            step.result.ended.add(int(batch.sampling_rows[i]))
        launched = self.sampler.launch(output, slots, self.table.num_tokens[slots])
        self.sampling.append_to_counts(slots, launched.token_ids)
        if self.newest is not None:
            self.newest.put(slots, launched.token_ids)
        step.expected = self.table.expect(slots)
        return launched

    def read(self, step: RunningStep, launched: LaunchedTokens | None) -> None:
        step.result.token_ids = [[] for _ in step.plan.slots]
        if launched is not None and step.expected is not None:
            self._receive(step, launched, step.expected)
        elif step.batch.num_drafts is not None:
            step.checked = self._check(step, step.batch.num_drafts)

    # -- a step without drafts -------------------------------------------------------------------

    def _receive(self, step: RunningStep, launched: LaunchedTokens, expected: Expected) -> None:
        rows, result, tokens = step.batch.sampling_rows, step.result, launched.read()
        self.table.learn(expected, tokens.token_ids)
        for i, failure in self._append_to_rules(expected, tokens.token_ids).items():
            result.errors[int(rows[i])] = describe(failure)
        for row, token in zip(rows.tolist(), tokens.token_ids[:, None].tolist(), strict=True):
            result.token_ids[row] = [] if row in result.ended else token
        ended = self.sampling.ended(expected.slots)
        present = self.table.still(expected) if ended else None
        result.ended.update(int(rows[i]) for i in ended if present is None or present[i])
        for i, entry in tokens.logprobs.items():
            result.logprobs[int(rows[i])] = [entry]
        for i, reason in tokens.bad_rows.items():
            result.errors[int(rows[i])] = reason

    def _append_to_rules(self, expected: Expected, tokens: np.ndarray) -> dict[int, Exception]:
        """Append the tokens to the rules of the requests that sampled, unless they have left."""
        present = self.table.still(expected)
        if present is None:
            return self.sampling.append_to_rules(expected.slots, tokens)
        rows = np.flatnonzero(present)
        failed = self.sampling.append_to_rules(expected.slots[rows], tokens[rows])
        return {int(rows[i]): failure for i, failure in failed.items()}

    # -- a step with drafts ----------------------------------------------------------------------

    def _check(self, step: RunningStep, counts: np.ndarray) -> CheckedDrafts:
        """Check the drafts of a step. It outputs one token for each sampling row, and one for each
        accepted draft.

        Args:
            counts: [sampling rows], drafts of each.
        """
        sampled, checked = self._judge(step, counts)
        rows, result = step.batch.sampling_rows, step.result
        slots, tokens = step.batch.slots[rows], sampled.token_ids[checked.rows]
        appended = self.sampling.append(slots.repeat(checked.lengths), tokens)
        owners = rows.repeat(checked.lengths) if appended or sampled.logprobs else rows
        for i, failure in appended.items():
            result.errors[int(owners[i])] = describe(failure)
        if sampled.bad_rows:
            for row, first in zip(rows.tolist(), checked.first.tolist(), strict=True):
                if first in sampled.bad_rows:
                    result.errors[row] = sampled.bad_rows[first]
        output, begin = tokens.tolist(), 0
        ended = self.sampling.ended(step.batch.slots[rows])
        for i, (row, count) in enumerate(zip(rows.tolist(), checked.lengths.tolist(), strict=True)):
            result.token_ids[row] = output[begin : begin + count - ended.get(i, 0)]
            begin += count
        result.ended.update(int(rows[i]) for i in ended)
        if sampled.logprobs:
            for row, i in zip(owners.tolist(), checked.rows.tolist(), strict=True):
                if i in sampled.logprobs:
                    result.logprobs.setdefault(row, []).append(sampled.logprobs[i])
        return checked

    def _judge(self, step: RunningStep, counts: np.ndarray) -> tuple[Tokens, CheckedDrafts]:
        """Sample the step and accept drafts. Afterwards the table has the accepted tokens of each
        request, and the cache their K and V; rejected ones are no longer counted.

        Returns:
            The tokens of the rows of logits, and which of them are output.
        """
        batch, output, speculator = step.batch, step.output, self.speculator
        table, slots = self.table, batch.slots[batch.sampling_rows]
        tokens, tree = batch.logit_tokens, table.draft_tree
        assert speculator is not None and output is not None
        assert tokens is not None and batch.logit_positions is not None
        rows: Chains | Trees
        judged: Guesses | Offers | None = None
        if tree is None:
            rows = Chains.of(counts, tokens)
            judged = speculator.guesses(slots, rows)
        else:
            rows = Trees.of(tree, counts, tokens)
        typical = speculator.speculation.typical
        if typical is not None:
            judged = Offers(*rows.offers(), typical)
        judging = slots.repeat(counts + 1)  # [logit rows]
        supposed = rows.supposed() if self.sampling.reads_output(slots) else NOTHING
        sampled = self.sampler.launch(
            output, judging, batch.logit_positions + 1, supposed, judged
        ).read()
        bad = None
        if sampled.bad_rows:
            bad = np.zeros(len(judging), np.bool_)
            bad[list(sampled.bad_rows)] = True
        output_rows, lengths = rows.output(sampled.token_ids, bad)
        checked = CheckedDrafts(rows.starts[:-1], output_rows, lengths)
        if tree is not None:
            self._gather(slots, checked)
        table.num_computed[slots] -= (counts + 1 - lengths).astype(np.int32)
        table.append_runs(slots, lengths, sampled.token_ids[output_rows])
        return sampled, checked

    def _gather(self, slots: np.ndarray, checked: CheckedDrafts) -> None:
        """Move the K and V of accepted paths to their places without the rest of the tree.

        Args:
            slots: [sampling rows].
        """
        output_rows, lengths = checked.rows, checked.lengths
        owners = np.repeat(np.arange(len(slots)), lengths)
        nodes = output_rows - checked.first[owners]
        depths = np.arange(len(output_rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        moved = np.flatnonzero(nodes != depths)
        if not len(moved):
            return
        owner = slots[owners[moved]]
        root = self.table.num_tokens[owner].astype(np.int64) - 1
        for group in range(len(self.network.groups)):
            source = self.table.positions(group, owner, root + nodes[moved])
            target = self.table.positions(group, owner, root + depths[moved])
            self.network.move(group, np.stack((source, target)))
