"""The draft model of an engine: forwards over the tokens and blocks of its target's requests."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvik.attention.base import StepLayout
from kvik.worker.drafters.guessing import Tokens
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs
from kvik.worker.vocabulary import Vocabulary


class DraftNetwork:
    """
    Attributes:
        graph: runs its forwards.
        inputs: of its forwards.
        table: the target's tokens; computed are those that the draft model computed.
        max_tokens: of one forward.
        max_context: positions that the model knows.
        mappings, block_tables: names of the inputs of each KV group.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: StepInputs,
        vocabulary: Vocabulary,
        table: RequestTable,
        max_tokens: int,
        max_context: int,
    ) -> None:
        """
        Args:
            table: with the same block table for each KV group (`RequestTable.view`).
        """
        self.graph = graph
        self.inputs = inputs
        self.table = table
        self.max_tokens = max_tokens
        self.max_context = max_context
        groups = range(len(table.block_tables))
        self.mappings = [f"slot_mapping {group}" for group in groups]
        self.block_tables = [f"block_table {group}" for group in groups]
        self._vocabulary = vocabulary
        self._same = vocabulary.same

    def prepare(self) -> None:
        """Before the first forward of a step; see `Graph.prepare`."""
        self.graph.prepare()

    def forwards(
        self, slots: np.ndarray, computed: np.ndarray, chunks: np.ndarray, drafts: np.ndarray
    ) -> Forwards:
        """Those of a proposal. None of them has run.

        Args:
            slots: [rows] int64.
            computed: [rows] int64, tokens of each that the model has computed.
            chunks: [rows] int64, how many more the first forward computes; at least 1.
            drafts: [rows] int64, descending, how many will be made of each. Every slot has places
                for its drafts but the last, which is not computed.
        """
        return Forwards(self, slots, computed, chunks, drafts)

    def logits(self, output: StepOutput) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """For the target's tokens, and what `Ops.largest` says of them if that is known."""
        if self._same:
            return output.logits, (output.top, output.top_ids)
        return self._vocabulary.widened(output.logits), None

    def run(self, batch: InputBatch, tokens: Tensor | None = None) -> StepOutput:
        """A forward over the target's tokens.

        Args:
            tokens: [tokens] int64 on the device, in place of the batch's.
        """
        self.inputs.send()
        if tokens is not None:
            batch.input_ids.copy_(tokens)
        self._vocabulary.narrow_(batch.input_ids)
        return self.graph.run(batch)


class Forwards:
    """First each slot catches up with its tokens, then it takes one draft after the other. What
    stays, and what goes on by one from forward to forward, is laid out once for all of them.

    Slots that get more drafts come first, so each forward has the first rows of the one before.

    Attributes:
        blocks: ids of all that they write to.
    """

    def __init__(
        self,
        network: DraftNetwork,
        slots: np.ndarray,
        computed: np.ndarray,
        chunks: np.ndarray,
        drafts: np.ndarray,
    ) -> None:
        """See `DraftNetwork.forwards`."""
        self._network = network
        self._slots = slots
        table, count, size = network.table, len(slots), network.table.block_size
        starts = np.zeros(count + 1, np.int64)
        np.add.accumulate(chunks, out=starts[1:])
        total, ends = int(starts[-1]), computed + chunks
        self._starts, self._chunks, self._ends = starts, chunks, ends.astype(np.int32)

        # How many rows get more than so many drafts, which is how many the forward before has.
        wanted = drafts.tolist()
        most = wanted[0]
        alike = wanted[-1] == most  # as nearly always
        self._rows = (
            [count] * most if alike else np.searchsorted(-drafts, -np.arange(most)).tolist()
        )
        tokens = total + sum(self._rows[1:])
        places, owners = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        if total == count:
            places[:total], owners[:total] = computed, slots
        else:
            owners[:total] = slots.repeat(chunks)
            np.add((computed - starts[:-1]).repeat(chunks), np.arange(total), out=places[:total])
        self._tokens = table.token_ids[owners[:total], places[:total]].astype(np.int64)
        if alike and most:
            np.add(ends, np.arange(most - 1)[:, None], out=places[total:].reshape(-1, count))
            owners[total:].reshape(-1, count)[...] = slots
        else:
            end = total
            for i, rows in enumerate(self._rows[1:]):
                begin, end = end, end + rows
                places[begin:end], owners[begin:end] = ends[:rows] + i, slots[:rows]
        index, offsets = np.divmod(places, size)
        block_table = table.block_tables[0]  # of every group
        self.blocks: np.ndarray = block_table[owners, index]
        self._places = places
        self._mapping = self.blocks.astype(np.int64) * size + offsets
        self._lengths = (places + 1).astype(np.int32)
        self._reach: list[int] = (ends + np.maximum(drafts - 1, 0)).tolist()  # most keys of each
        known = block_table[slots, : -(-max(self._reach) // size)]
        put = network.inputs.put
        self._tables = [put(name, known) for name in network.block_tables]
        self._used = 0  # of the places
        self._forwards = 0  # that have run

    def first(self) -> StepOutput:
        """Catch up.

        Returns:
            Valid until the next forward, with a row of logits for each row that gets drafts.
        """
        self._share_out(self._chunks, self._starts, self._rows[0] if self._rows else 0)
        output = self._run(self._tokens, self._ends)
        self._network.table.num_computed[self._slots] = self._ends
        return output

    def follow(self, tokens: Tokens) -> StepOutput:
        """The next one.

        Args:
            tokens: [rows], the drafts made last.

        Returns:
            As `first`, with a row for each row that gets another draft.
        """
        rows = self._rows[self._forwards]
        if self._sizes != (rows, rows):
            self._share_out(np.ones(rows, np.int64), np.arange(rows + 1), rows)
        return self._run(tokens[:rows], self._lengths[self._used : self._used + rows])

    def _share_out(self, chunks: np.ndarray, starts: np.ndarray, sampling: int) -> None:
        """Whose the tokens of the next forwards are.

        Args:
            chunks: [rows], tokens of each. starts: [rows + 1]. sampling: so many, the first.
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

    def _run(self, tokens: Tokens, lengths: np.ndarray) -> StepOutput:
        """
        Args:
            tokens: [tokens]. lengths: [rows] int32, keys of each row.
        """
        network, put = self._network, self._network.inputs.put
        begin, self._used = self._used, self._used + len(tokens)
        self._forwards += 1
        there: Tensor | None = None
        if not isinstance(tokens, np.ndarray):
            there, tokens = tokens, np.zeros(len(tokens), np.int64)
        ids = put("input_ids", tokens)
        positions = put("positions", self._places[begin : self._used])
        put_lengths, mapping = put("seq_lens", lengths), self._mapping[begin : self._used]
        mappings = [put(name, mapping) for name in network.mappings]
        if self._batch is None or not network.inputs.fixed:
            # Tensors that show what is put later serve the forwards to come, if there is room.
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
                )
                for slot_mapping, block_table in zip(mappings, self._tables, strict=True)
            ]
            self._batch = InputBatch(
                input_ids=ids,
                positions=positions,
                layouts=tuple(layouts),
                slots=self._slots,
                starts=self._starts,
                sampling_rows=self._sampling_rows,
                logits_indices=self._indices,
            )
        return network.run(self._batch, there)
