"""Drafts from a small model (Leviathan et al. 2023, 2211.17192).

Its K and V have their own memory but use the block ids of the target, so both share block tables,
prefix hits and preemption, and the scheduler manages one cache.

Like a request in the scheduler, a slot computes its known tokens in chunks under a budget, and
drafts once all are computed. The draft model computes nothing unless drafts are asked for.

The states of layers without K and V cover only known tokens: drafts continue from a copy. Such a
model computes accepted drafts again, and the whole prompt of each request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.frozen import frozen
from kvik.kernels.ops import Draws
from kvik.kernels.upload import upload
from kvik.nn.kv_formats import NO_STATES, States
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.drafters.filled_blocks import FilledBlocks
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.input_batch import InputBatch, StepTensors
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Guess, Sampler
from kvik.worker.sampling_batch import NOTHING, RandomRows, SamplingBatch, Supposed
from kvik.worker.sampling_table import DRAFT, SAMPLE, SamplingTable
from kvik.worker.step_inputs import StepInputs

# The draft model of an engine: forwards over the tokens and blocks of its target's requests.


class DraftNetwork:
    """A draft model with its inputs and its view of the request table."""

    ahead = 0  # how many places the token that is read is ahead of its place in the cache

    def __init__(
        self,
        graph: Graph,
        inputs: StepInputs,
        vocabulary: Vocabulary,
        table: RequestTable,
        max_tokens: int,
        max_context: int,
        states: States = NO_STATES,
    ) -> None:
        """
        Args:
            table: with the same block table for each KV group (`RequestTable.view`).
            states: of all slots, then the copies of all slots for their drafts.
        """
        self.graph = graph
        self.inputs = inputs
        self.table = table  # the target's tokens, with `num_computed` of the draft model
        self.max_tokens = max_tokens  # most tokens of one forward
        self.max_context = max_context  # most positions of the model
        self.has_states = bool(states.layers)  # some layers keep a state
        self._states = states
        groups = range(len(table.block_tables))
        # mappings, block_tables: names of the inputs of each KV group.
        self.mappings = [f"slot_mapping {group}" for group in groups]
        self.block_tables = [f"block_table {group}" for group in groups]
        self._vocabulary = vocabulary
        self._same_tokens = vocabulary.is_same

    def logits(self, output: StepOutput) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return logits of the target's tokens, and their `Ops.largest` if it is known."""
        if self._same_tokens:
            return output.logits, (output.top, output.top_ids)
        return self._vocabulary.widened(output.logits), None

    def fork(self, slots: np.ndarray) -> np.ndarray:
        """Copy the states of some slots for their drafts; return the rows of the copies."""
        rows = slots + len(self.table.num_tokens)
        self._states.copy(list(zip(slots.tolist(), rows.tolist(), strict=True)))
        return rows

    def run(self, batch: InputBatch, tokens: Tensor | None = None) -> StepOutput:
        """Run a forward over the target's tokens.

        Args:
            tokens: [tokens] int64 on the device, in place of the batch's.
        """
        self.inputs.send()
        if tokens is not None:
            batch.tensors.input_ids.copy_(tokens)
        self._vocabulary.narrow_(batch.tensors.input_ids)
        return self.graph.run(batch)


class Forwards:
    """The forwards of one proposal: one over the missing tokens of each slot, then one per draft.

    Positions, slots of the cache and lengths of all forwards are computed at once. Slots that get
    more drafts come first, so each forward has the first rows of the one before.
    """

    def __init__(
        self,
        network: DraftNetwork,
        slots: np.ndarray,
        computed: np.ndarray,
        chunks: np.ndarray,
        drafts: np.ndarray,
    ) -> None:
        """
        Args:
            slots: [rows] int64.
            computed: [rows] int64, tokens of each row that the model has computed.
            chunks: [rows] int64, tokens of each row that the first forward computes; at least 1.
            drafts: [rows] int64, descending, drafts to make for each row. Every slot has places
                for its drafts except the last one, which is not computed.
        """
        self._network = network
        self._slots = self._state_rows = slots
        table, count, size = network.table, len(slots), network.table.block_size
        starts = np.zeros(count + 1, np.int64)
        np.add.accumulate(chunks, out=starts[1:])
        total, ends = int(starts[-1]), computed + chunks
        self._starts, self._chunks, self._ends = starts, chunks, ends.astype(np.int32)

        # By i, the number of rows that get more than i drafts.
        counts = drafts.tolist()
        depth = counts[0]
        alike = counts[-1] == depth  # usually
        self._rows = (
            [count] * depth if alike else np.searchsorted(-drafts, -np.arange(depth)).tolist()
        )
        tokens = total + sum(self._rows[1:])
        places, owners = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        if total == count:
            places[:total], owners[:total] = computed, slots
        else:
            owners[:total] = slots.repeat(chunks)
            np.add((computed - starts[:-1]).repeat(chunks), np.arange(total), out=places[:total])
        tokens_at = places[:total] + network.ahead
        self._tokens = table.token_ids[owners[:total], tokens_at].astype(np.int64)
        if alike and depth:
            np.add(ends, np.arange(depth - 1)[:, None], out=places[total:].reshape(-1, count))
            owners[total:].reshape(-1, count)[...] = slots
        else:
            end = total
            for i, rows in enumerate(self._rows[1:]):
                begin, end = end, end + rows
                places[begin:end], owners[begin:end] = ends[:rows] + i, slots[:rows]
        index, offsets = np.divmod(places, size)
        block_table = table.block_tables[0]  # of every group
        self.blocks: np.ndarray = block_table[owners, index]  # ids of all blocks that they write to
        self._places = places
        self._mapping = self.blocks.astype(np.int64) * size + offsets
        self._lengths = (places + 1).astype(np.int32)
        self._reach: list[int] = (ends + np.maximum(drafts - 1, 0)).tolist()  # most keys of each
        table_rows = block_table[slots, : -(-max(self._reach) // size)]
        put = network.inputs.put
        self._tables = [put(name, table_rows) for name in network.block_tables]
        self._used = 0  # places used so far
        self._forwards = 0  # forwards run so far

    def first(self, tokens: Tokens | None = None) -> StepOutput:
        """Compute the missing tokens of each slot.

        Args:
            tokens: [tokens], in place of the table's.

        Returns:
            Output with a row of logits for each row that gets drafts; valid until the next forward.
        """
        network, drafting = self._network, self._rows[0] if self._rows else 0
        computed = network.table.num_computed
        self._share_out(self._chunks, self._starts, drafting)
        if network.has_states:
            computed[self._slots] = 0  # if the forward fails, the states are of no use
        output = self._run(self._tokens if tokens is None else tokens, self._ends)
        computed[self._slots] = self._ends
        if network.has_states:
            self._state_rows = network.fork(self._slots[:drafting])
            self._sizes = 0, 0  # the next forward has other inputs
        return output

    def follow(self, tokens: Tokens) -> StepOutput:
        """Compute the step after the last one.

        Args:
            tokens: [rows], the drafts made last.

        Returns:
            As in `first`, with a row for each row that gets another draft.
        """
        rows = self._rows[self._forwards]
        if self._sizes != (rows, rows):
            self._share_out(np.ones(rows, np.int64), np.arange(rows + 1), rows)
        return self._run(tokens[:rows], self._lengths[self._used : self._used + rows])

    def _share_out(self, chunks: np.ndarray, starts: np.ndarray, sampling: int) -> None:
        """Assign the tokens of the next forwards to rows.

        Args:
            chunks: [rows], tokens of each. starts: [rows + 1]. sampling: how many sample.
        """
        put, rows = self._network.inputs.put, len(chunks)
        self._sizes = int(starts[-1]), rows  # tokens and rows
        self._starts, self._sampling_rows = starts, np.arange(sampling)
        self._scheduled = tuple(chunks.tolist())
        self._put_starts = put("query_start_loc", starts.astype(np.int32))
        self._indices = put("logits_indices", starts[1 : sampling + 1] - 1)
        self._batch: InputBatch | None = None
        if rows < len(self._slots):
            self._slots = self._slots[:rows]
            self._tables = [table[:rows] for table in self._tables]
        self._put_rows: Tensor | None = None
        if self._network.has_states:
            self._put_rows = put("state_rows", self._state_rows[:rows].astype(np.int32))

    def _run(self, tokens: Tokens, lengths: np.ndarray) -> StepOutput:
        """Run the next forward.

        Args:
            tokens: [tokens]. lengths: [rows] int32, keys of each row.
        """
        network, put = self._network, self._network.inputs.put
        begin, self._used = self._used, self._used + len(tokens)
        self._forwards += 1
        device_tokens: Tensor | None = None
        if not isinstance(tokens, np.ndarray):
            device_tokens, tokens = tokens, np.zeros(len(tokens), np.int64)
        ids = put("input_ids", tokens)
        positions = put("positions", self._places[begin : self._used])
        put_lengths, mapping = put("seq_lens", lengths), self._mapping[begin : self._used]
        mappings = [put(name, mapping) for name in network.mappings]
        if self._batch is None or not network.inputs.fixed:
            # With fixed inputs, later forwards reuse these tensors, whose memory `put` updates.
            contexts = self._reach[: len(lengths)] if network.inputs.fixed else lengths.tolist()
            layouts = [
                StepLayout(
                    query_start_loc=self._put_starts,
                    seq_lens=put_lengths,
                    block_table=block_table,
                    slot_mapping=slot_mapping,
                    num_scheduled=self._scheduled,
                    contexts=tuple(contexts),
                    block_size=network.table.block_size,
                    state_rows=self._put_rows,
                )
                for slot_mapping, block_table in zip(mappings, self._tables, strict=True)
            ]
            self._batch = InputBatch(
                StepTensors(ids, positions, tuple(layouts), self._indices),
                slots=self._slots,
                starts=self._starts,
                ends=self._ends,
                sampling_rows=self._sampling_rows,
            )
        return network.run(self._batch, device_tokens)


# The drafts of a draft model, from its logits.

_PLAIN = SamplingBatch()
NONE = -1  # no token
Tokens = np.ndarray | Tensor  # int64 on the host; or on a GPU, so that the host need not wait


@frozen
class DraftSampling:
    """What draws drafts."""

    sampler: Sampler
    table: SamplingTable  # of the target
    memory: int  # bytes that sampling may take in addition to logits and probabilities


class Guessing:
    """Draws the drafts of each row, one position after the other.

    A request with a seed draws its drafts with the same random numbers as its tokens: where the two
    models agree, so do the tokens.

    On a GPU a draft goes from one forward to the next without a copy to the host, unless rules on
    the host need it.
    """

    def __init__(
        self,
        sampling: DraftSampling,
        rows: DraftRows,
        chosen: np.ndarray,
        lengths: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """
        Args:
            chosen: indices of the rows that get drafts, those that get more first. Rows of other
                methods and attributes are in this order.
            lengths, counts: [all rows], tokens and drafts of each.
        """
        self._sampler, self._sampling = sampling.sampler, sampling.table
        self._chosen = chosen
        self._slots = slots = rows.slots[chosen]
        self._all_counts, self._counts = counts, counts[chosen]
        self._drafts = np.empty((len(slots), int(self._counts[0])), np.int64)
        self._drafts.fill(NONE)
        self._device_drafts: Tensor | None = None  # `_found` on the GPU, which then replaces it
        # [sum of drafts, vocab], as `Drafts.probs`; None if no row needs them.
        self.probs: Tensor | None = None
        self._plain = self._sampling.plain(slots)
        if self._plain:
            return
        self._positions = lengths[chosen]
        self._first = (counts.cumsum() - counts)[chosen]  # row of `probs`
        certain = self._sampling.must_match(slots)
        self._keeps = not certain.all()
        self._streams = np.where(certain, SAMPLE, DRAFT)
        self._at_once = self._sampling.rows_at_once(slots, sampling.memory, shares=True)
        self._reads_output = self._sampling.reads_output(slots)
        self._alike = _PLAIN  # parameters of the first `_planned` rows
        self._planned = 0
        self._uniforms: list[Tensor] = []  # random numbers of the remaining depths, next one last

    def draft(self, depth: int, logits: Tensor, largest: tuple[Tensor, Tensor] | None) -> Tokens:
        """Draw the next draft of each row.

        Args:
            depth: number of drafts that the rows have already.
            logits: [rows, vocab], of the first rows. largest: their `Ops.largest`, if known.

        Returns:
            [rows], one more draft of each; read them before the next forward.
        """
        guess, rows = self._sampler.guess, len(logits)
        if not depth and logits.device.type != "cpu":
            self._device_drafts = upload(self._drafts, logits.device)
        if self._plain:
            largest_ids = largest[1] if largest is not None else guess(logits, _PLAIN).token_ids
            if self._device_drafts is not None:
                self._device_drafts[:rows, depth] = largest_ids
                return largest_ids
            tokens: np.ndarray = largest_ids.numpy()
            self._drafts[:rows, depth] = tokens
            return tokens
        if rows <= self._at_once and not self._reads_output:
            self._take(depth, 0, guess(logits, self._same_again(depth, rows), largest))
        else:
            for begin in range(0, rows, self._at_once):
                part = slice(begin, min(begin + self._at_once, rows))
                some = None if largest is None else (largest[0][part], largest[1][part])
                self._take(depth, begin, guess(logits[part], self._batch(depth, part), some))
        if self._device_drafts is not None:
            return self._device_drafts[:rows, depth]
        return self._drafts[:rows, depth].copy()

    def to_host(self) -> np.ndarray:
        """Return the drafts, waiting for a GPU: [rows, depths] int64, NONE where one has fewer."""
        return self._drafts if self._device_drafts is None else self._device_drafts.cpu().numpy()

    def by_row(self) -> np.ndarray:
        """Return the same for all rows, in their order: [all rows, depths] int64."""
        drafts = np.full((len(self._all_counts), self._drafts.shape[1]), NONE, np.int64)
        drafts[self._chosen] = self.to_host()
        return drafts

    def proposal(self, by_row: np.ndarray) -> Drafts:
        """Return the drafts of all rows, given what `by_row` returns."""
        return Drafts(self._all_counts, by_row[by_row != NONE], probs=self.probs)

    def _take(self, depth: int, begin: int, guess: Guess) -> None:
        """Store the drafts of the rows from `begin` on, and their probabilities."""
        part, depths = slice(begin, begin + len(guess.token_ids)), self._drafts.shape[1]
        if self._device_drafts is not None:
            self._device_drafts[part, depth] = guess.token_ids
        else:
            self._drafts[part, depth] = guess.token_ids.numpy()
        if guess.probs is None or not self._keeps:
            return
        if self.probs is None:
            self.probs = guess.probs.new_empty(int(self._counts.sum()), guess.probs.shape[1])
        if self._counts[-1] == depths:  # all rows get the same number
            self.probs.view(-1, depths, guess.probs.shape[1])[part, depth].copy_(guess.probs)
        else:
            at = upload(self._first[part] + depth, self.probs.device)
            self.probs.index_copy_(0, at, guess.probs)

    def _batch(self, depth: int, part: slice) -> SamplingBatch:
        """Return the parameters of rows whose rules may depend on the earlier drafts."""
        slots, supposed = self._slots[part], NOTHING
        if self._reads_output and depth:
            before = self.to_host()[part, :depth]
            supposed = Supposed(np.arange(len(slots)).repeat(depth), before.reshape(-1))
        positions = self._positions[part] + depth
        return self._sampling.batch(slots, positions, supposed, stream=self._streams[part])

    def _same_again(self, depth: int, rows: int) -> SamplingBatch:
        """Return the parameters of rows whose drafts differ only in their random numbers, which are
        computed for all drafts at once."""
        if rows != self._planned:
            self._planned, part = rows, slice(rows)
            self._alike = self._batch(depth, part)
            random = self._alike.random
            if random is not None:
                depths = np.arange(depth, self._drafts.shape[1])[:, None]
                positions, streams = self._positions[part] + depths, self._streams[part]
                numbers = self._sampling.uniforms(self._slots[part], positions, streams)
                if random.rows is not None:
                    numbers = numbers.index_select(1, random.rows)
                self._uniforms = list(numbers.unbind(0))[::-1]
        random = self._alike.random
        if random is None:
            return self._alike
        draws = Draws(random.draws.temperature, self._uniforms.pop(), random.draws.truncation)
        return SamplingBatch(random=RandomRows(random.rows, draws))


class Vocabulary:
    """A map between the tokens of a draft model and those of its target."""

    def __init__(
        self,
        target_size: int,
        draft_size: int,
        meanings: Sequence[int] | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            target_size, draft_size: numbers of logits of the two models, which may exceed their
                numbers of tokens.
            meanings: the target's id of each of the draft model's tokens, -1 if there is none;
                None: both have the same ids.
        """
        self._target_size = target_size
        self._draft_ids: Tensor | None = None
        self._target_ids: Tensor | None = None
        self._as_draft: Tensor | None = None
        if meanings is None and target_size == draft_size:
            return
        meant = torch.tensor(range(draft_size) if meanings is None else meanings[:draft_size])
        shared = ((meant >= 0) & (meant < target_size)).nonzero()[:, 0]
        self._draft_ids, self._target_ids = shared.to(device), meant[shared].to(device)
        as_draft = torch.zeros(target_size, dtype=torch.int64)  # tokens it lacks become token 0
        as_draft[meant[shared]] = shared
        self._as_draft = as_draft.to(device)

    @property
    def is_same(self) -> bool:
        """Whether both models have the same tokens."""
        return self._as_draft is None

    def widened(self, logits: Tensor) -> Tensor:
        """Return logits of the target's tokens, -inf where the draft model lacks the token.

        Args:
            logits: [rows, draft vocab].

        Returns:
            [rows, target vocab].
        """
        if self._draft_ids is None or self._target_ids is None:
            return logits
        wide = logits.new_full((len(logits), self._target_size), -torch.inf)
        wide[:, self._target_ids] = logits[:, self._draft_ids]
        return wide

    def narrow_(self, token_ids: Tensor) -> None:
        """Replace the target's tokens by the draft model's, in place.

        Args:
            token_ids: [tokens] int64.
        """
        if self._as_draft is not None:
            token_ids.copy_(self._as_draft[token_ids])


class DraftModel(Drafter):
    """A `Drafter` that makes chains of drafts with a separate model and KV cache."""

    def __init__(
        self, network: DraftNetwork, sampling: DraftSampling, pool_size: int, max_drafts: int
    ) -> None:
        """
        Args:
            pool_size: blocks of the target's pool.
            max_drafts: per request.
        """
        self.network = network
        self._sampling = sampling
        self._table = network.table
        self._filled = FilledBlocks(network.table, pool_size)
        # Drafts of each slot whose K and V are computed after those of the known tokens.
        self._ahead = np.full((len(network.table.num_tokens), max_drafts + 1), NONE, np.int64)
        self._depths = np.arange(max_drafts + 1)

    def enter(self, slot: int) -> None:
        self._filled.enter(slot)
        self._table.num_computed[slot] = 0
        self._ahead[slot] = NONE

    def leave(self, slot: int) -> None:
        self._filled.note(np.array([slot]))

    def propose(self, rows: DraftRows) -> Drafts:
        network, slots = self.network, rows.slots
        network.graph.prepare()
        lengths = self._table.num_tokens[slots].astype(np.int64)
        computed = self._settle(slots, lengths)
        # The last draft is not computed, so it may be beyond the context of the model.
        limits = np.minimum(rows.limits, network.max_context + 1 - lengths)
        missing, chunks = self._missing(slots, lengths, computed, limits > 0)
        counts = limits * ((chunks == missing) & (chunks > 0))
        going = (-counts).argsort(kind="stable")  # rows with most drafts first
        if np.count_nonzero(chunks) < len(slots):
            going = going[chunks[going] > 0]
        if not len(going):
            return Drafts.of([()] * len(slots))
        drafted = counts[going]
        forwards = Forwards(network, slots[going], computed[going], chunks[going], drafted)
        self._filled.overwrite(forwards.blocks)
        output = forwards.first()
        depth_limit = int(drafted[0])
        if not depth_limit:
            return Drafts.of([()] * len(slots))
        chosen = going[: np.count_nonzero(drafted)]
        guessing = Guessing(self._sampling, rows, chosen, lengths, counts)
        tokens = guessing.draft(0, *network.logits(output))
        for depth in range(1, depth_limit):
            output = forwards.follow(tokens)
            tokens = guessing.draft(depth, *network.logits(output))
        drafts = guessing.by_row()
        self._ahead[slots, :depth_limit] = drafts
        self._ahead[slots, counts - 1] = NONE  # the last one has no K and V
        return guessing.proposal(drafts)

    def _settle(self, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Count accepted drafts whose K and V exist as computed.

        Args:
            slots, lengths: [rows], tokens of each.

        Returns:
            [rows] int64, how many of them are computed.
        """
        table, ahead = self._table, self._ahead.take(slots, axis=0)
        first = table.num_computed[slots].astype(np.int64)
        if self.network.has_states:
            return first
        # Indices into the flattened table; places beyond the end of a row do not count below.
        places = (first + slots * table.token_ids.shape[1])[:, None] + self._depths
        right = (table.token_ids.take(places, mode="clip") != ahead).argmax(axis=1)
        # The newest token is always computed, as its logits are needed.
        computed = np.minimum(first + right, lengths - 1)
        table.num_computed[slots] = computed.astype(np.int32)
        self._ahead[slots] = NONE
        return computed

    def _missing(
        self, slots: np.ndarray, lengths: np.ndarray, computed: np.ndarray, drafting: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the tokens to compute, after counting blocks that other requests filled.

        Args:
            lengths, computed: [rows], tokens of each; blocks found filled are added to `computed`.
            drafting: [rows] bool, which rows get drafts.

        Returns:
            [rows] numbers of tokens not computed, and how many of them the next forward may
            compute.
        """
        table, budget = self._table, self.network.max_tokens
        missing = (lengths - computed) * drafting
        if self.network.has_states or max(missing.tolist()) <= table.block_size:  # usually
            return missing, _within(missing, budget)
        behind = np.flatnonzero(missing > table.block_size)
        self._filled.find(slots[behind])
        computed[behind] = table.num_computed[slots[behind]]
        missing[behind] = lengths[behind] - computed[behind]
        chunks = missing.copy()
        chunks[self._repeated(slots, behind)] = 0
        return missing, _within(chunks, budget)

    def _repeated(self, slots: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Return which of the rows `behind` would compute a block that another of them computes.

        Such requests share a prompt; all but one wait until the block is filled."""
        table, some = self._table, slots[behind]
        computed = table.num_computed[some]
        blocks = table.block_tables[0][some, computed // table.block_size]
        furthest = np.argsort(-computed, kind="stable")
        _, first = np.unique(blocks[furthest], return_index=True)
        return np.delete(behind, furthest[first])


def _within(chunks: np.ndarray, budget: int) -> np.ndarray:
    """Cut chunks so that their sum is within the budget; short ones are kept first."""
    if sum(chunks.tolist()) <= budget:
        return chunks
    order = np.argsort(chunks, kind="stable")
    sums = np.minimum(np.cumsum(chunks[order]), budget)
    cut = np.empty_like(chunks)
    cut[order] = np.diff(sums, prepend=0)
    return cut
