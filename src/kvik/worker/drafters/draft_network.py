"""The draft model of an engine: forwards over the tokens and blocks of its target's requests."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvik.attention.base import StepLayout
from kvik.core.plan import SchedulerOutput
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.input_batch import InputBatch, build_input_batch
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs
from kvik.worker.vocabulary import Vocabulary


class DraftNetwork:
    """
    Attributes:
        table: the target's tokens; computed are those that the draft model computed.
        inputs: of its forwards.
        max_tokens: of one forward.
        max_context: positions that the model knows.
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
        self.table = table
        self.max_tokens = max_tokens
        self.max_context = max_context
        self._graph = graph
        self.inputs = inputs
        self._vocabulary = vocabulary

    def prepare(self) -> None:
        """Before the first forward of a step; see `Graph.prepare`."""
        self._graph.prepare()

    def read(self, slots: np.ndarray, chunks: np.ndarray, samples: np.ndarray) -> StepOutput:
        """Compute the next tokens of some slots.

        Args:
            slots, chunks: [rows], how many of each. samples: [rows] bool, whose logits are wanted.

        Returns:
            Valid until the next forward, with a row of logits for each row that samples.
        """
        plan = SchedulerOutput(
            step=0,
            slots=slots.tolist(),
            num_scheduled_tokens=chunks.tolist(),
            num_draft_tokens=[0] * len(slots),
            samples=samples.tolist(),
        )
        output = self.run(build_input_batch(plan, self.table, self.inputs))
        self.table.num_computed[slots] += chunks.astype(np.int32)
        return output

    def chain(self, slots: np.ndarray, places: np.ndarray, depths: int) -> Chain:
        """To compute tokens that the table need not know.

        Args:
            slots, places: [rows] int64, of the first one of each. All places before have been
                computed.
            depths: how many of each at most; every slot has places for them.
        """
        return Chain(self, slots, places, depths)

    def logits(self, output: StepOutput) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """For the target's tokens, and what `Ops.largest` says of them if that is known."""
        if self._vocabulary.same:
            return output.logits, (output.top, output.top_ids)
        return self._vocabulary.widened(output.logits), None

    def run(self, batch: InputBatch) -> StepOutput:
        """A forward over the target's tokens."""
        self._vocabulary.narrow_(batch.input_ids)
        return self._graph.run(batch)


class Chain:
    """One token of each of some slots after the other. What stays, and what goes on by one from
    forward to forward, is laid out once."""

    def __init__(
        self, network: DraftNetwork, slots: np.ndarray, places: np.ndarray, depths: int
    ) -> None:
        """See `DraftNetwork.chain`."""
        self._network = network
        self._slots = slots
        table, put, rows = network.table, network.inputs.put, len(slots)
        block_table = table.block_tables[0]  # of every group
        self._places = places + np.arange(depths)[:, None]  # [depths, rows]
        blocks, offsets = np.divmod(self._places, table.block_size)
        self._mapping = block_table[slots, blocks].astype(np.int64) * table.block_size + offsets
        self._lengths = (self._places + 1).astype(np.int32)
        self._contexts = [tuple(lengths) for lengths in self._lengths.tolist()]
        self._scheduled = (1,) * rows
        self._starts = np.arange(rows + 1)
        self._put_starts = put("query_start_loc", self._starts.astype(np.int32))
        self._sampling_rows = self._starts[:-1]
        self._every = put("logits_indices", self._sampling_rows)
        known = block_table[slots, : int(blocks[-1].max()) + 1]
        self._tables = [
            (f"slot_mapping {i}", put(f"block_table {i}", known))
            for i in range(len(table.block_tables))
        ]
        self._depth = 0

    def follow(self, tokens: np.ndarray) -> StepOutput:
        """The next forward.

        Args:
            tokens: [rows] int64.

        Returns:
            As `DraftNetwork.read`, with logits for each row.
        """
        put, depth = self._network.inputs.put, self._depth
        self._depth += 1
        lengths, contexts = put("seq_lens", self._lengths[depth]), self._contexts[depth]
        layouts = tuple(
            StepLayout(
                query_start_loc=self._put_starts,
                seq_lens=lengths,
                block_table=block_table,
                slot_mapping=put(name, self._mapping[depth]),
                num_scheduled=self._scheduled,
                contexts=contexts,
                block_size=self._network.table.block_size,
            )
            for name, block_table in self._tables
        )
        batch = InputBatch(
            input_ids=put("input_ids", tokens),
            positions=put("positions", self._places[depth]),
            layouts=layouts,
            slots=self._slots,
            starts=self._starts,
            sampling_rows=self._sampling_rows,
            logits_indices=self._every,
        )
        self._network.inputs.send()
        return self._network.run(batch)
