"""Drafts from small networks that read what their target has computed.

Some heads read the hidden states of all tokens: the model's own head for multi-token prediction
(`PredictorSpec`; DeepSeek-V3, arXiv 2412.19437, section 2.2), and EAGLE-3 (Li et al. 2025, arXiv
2503.01840; `models/eagle3.py`). Such a head has one layer, whose keys and values are in the
target's blocks: as those of one more layer, or in a cache of its own that has the same blocks. The
key and value at a position are made from the model's hidden state there and the token after it.
This is done after each step, for every token of every request, since later requests may share the
block and hidden states are not kept. The drafts after the first continue from the head's own hidden
states; the next steps replace their keys and values. Those at the last position of a shared prefix
may be made from the token that followed it in another request. This costs drafts, if anything:
every draft is verified.

An assistant (`Gemma4Assistant`) reads the keys and values of its target. It has no cache, so it
computes nothing but drafts: requests need not be read again after a preemption or a prefix hit. All
drafts of a proposal are at the position of the newest token, whose own key does not exist yet: they
see the keys before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.kernels.upload import upload
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.drafters.draft_model import (
    DraftNetwork,
    DraftSampling,
    Forwards,
    Guessing,
    Vocabulary,
)
from kvik.worker.graphs import EngineNetwork, Graph, StepOutput
from kvik.worker.input_batch import InputBatch, StepTensors
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs


class CachedHeadNetwork(DraftNetwork):
    """A head with its inputs, whose forwards read hidden states, too."""

    ahead = 1

    def __init__(
        self,
        head: EngineNetwork,
        graph: Graph,
        inputs: StepInputs,
        vocabulary: Vocabulary,
        table: RequestTable,
        max_tokens: int,
        max_context: int,
    ) -> None:
        super().__init__(graph, inputs, vocabulary, table, max_tokens, max_context)
        self.head = head
        # [rows, hidden], what the next forward reads; after it, its own hidden states that give
        # logits.
        self.hidden = torch.empty(0)

    def run(self, batch: InputBatch, tokens: Tensor | None = None) -> StepOutput:
        self.inputs.send()
        if tokens is not None:
            batch.tensors.input_ids.copy_(tokens)
        self.head.read(self.hidden[: len(batch.tensors.input_ids)])
        output = self.graph.run(batch)
        self.hidden = output.hidden.index_select(0, batch.tensors.logits_indices)
        return output


class CachedHeadDrafter(Drafter):
    """Makes chains of drafts with such a head."""

    def __init__(
        self,
        network: CachedHeadNetwork,
        sampling: DraftSampling,
        largest: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        """
        Args:
            largest: see `Ops`.
        """
        self.network = network
        self._sampling = sampling
        self._largest = largest
        self._output: Tensor | None = None  # hidden states of the head for the last step
        # By slot, the row of `_output` after the newest token.
        self._rows = np.zeros(len(network.table.num_tokens), np.int64)

    def read_step(self, batch: InputBatch, output: StepOutput) -> None:
        """Compute the entries of all tokens of a step whose next token is known."""
        network, table = self.network, self.network.table
        hidden = output.drafted_from
        self._output = None
        begins = batch.ends - np.diff(batch.starts)
        ends = np.minimum(batch.ends, table.num_tokens[batch.slots] - 1)
        rows = np.flatnonzero(ends > begins)
        if not len(rows):
            return
        network.graph.prepare()
        slots, counts = batch.slots[rows], (ends - begins)[rows]
        last = counts.cumsum() - 1
        network.hidden = hidden
        if int(last[-1]) + 1 < len(hidden):
            first = batch.starts[rows] - (last + 1 - counts)
            places = first.repeat(counts) + np.arange(int(last[-1]) + 1)
            network.hidden = hidden.index_select(0, upload(places, hidden.device))
        forwards = Forwards(network, slots, begins[rows], counts, np.zeros(len(rows), np.int64))
        self._output = forwards.first().hidden
        self._rows[slots] = last

    def propose(self, rows: DraftRows) -> Drafts:
        network, slots, output = self.network, rows.slots, self._output
        if output is None:
            return Drafts.of([()] * len(slots))
        lengths = network.table.num_tokens[slots].astype(np.int64)
        chosen = (-rows.limits).argsort(kind="stable")  # rows with most drafts first
        counts = rows.limits[chosen]
        guessing = Guessing(self._sampling, rows, chosen, lengths, rows.limits)
        hidden = output.index_select(0, upload(self._rows[slots[chosen]], output.device))
        logits = network.head.logits(hidden)
        first = StepOutput(hidden, logits, *self._largest(logits))
        tokens = guessing.draft(0, *network.logits(first))
        further = chosen[: np.count_nonzero(counts > 1)]
        if len(further):
            network.hidden = hidden
            ones, drafts = np.ones(len(further), np.int64), counts[: len(further)] - 1
            forwards = Forwards(network, slots[further], lengths[further] - 1, ones, drafts)
            step = forwards.first(tokens[: len(further)])
            for depth in range(1, int(counts[0])):
                if depth > 1:
                    step = forwards.follow(tokens)
                tokens = guessing.draft(depth, *network.logits(step))
        return guessing.proposal(guessing.by_row())


class AssistantDrafter(Drafter):
    """Makes chains of drafts with an assistant."""

    def __init__(
        self,
        model: EngineNetwork,
        graph: Graph,
        inputs: StepInputs,
        table: RequestTable,
        sampling: DraftSampling,
    ) -> None:
        """
        Args:
            graph, inputs: run its forwards.
            table: of the target.
        """
        self._model = model
        self._graph = graph
        self._inputs = inputs
        self._table = table
        self._sampling = sampling

    def propose(self, rows: DraftRows) -> Drafts:
        self._graph.prepare()
        lengths = self._table.num_tokens[rows.slots].astype(np.int64)
        chosen = (-rows.limits).argsort(kind="stable")  # rows with most drafts first
        slots, counts = rows.slots[chosen], rows.limits[chosen]
        guessing = Guessing(self._sampling, rows, chosen, lengths, rows.limits)
        newest = lengths[chosen] - 1
        states = rows.hidden()
        hidden = states.index_select(0, upload(chosen, states.device))
        tokens: np.ndarray | Tensor = self._table.token_ids[slots, newest].astype(np.int64)
        batch, count = None, 0
        for depth in range(int(counts[0])):
            going = int(np.count_nonzero(counts > depth))
            if batch is None or going < count:
                batch, count = self._batch(slots[:going], newest[:going]), going
            ids = tokens[:going]
            ids = upload(ids, hidden.device) if isinstance(ids, np.ndarray) else ids
            batch.tensors.input_ids.copy_(ids)
            self._model.read(hidden[:going])
            output = self._graph.run(batch)
            tokens = guessing.draft(depth, output.logits, (output.top, output.top_ids))
            hidden = output.drafted_from
        return guessing.proposal(guessing.by_row())

    def _batch(self, slots: np.ndarray, newest: np.ndarray) -> InputBatch:
        """Return the inputs of forwards with one query of each slot, at the position of its newest
        token, for the keys before it.

        Args:
            slots, newest: [rows], and the index of the newest token of each.
        """
        table, put, count = self._table, self._inputs.put, len(slots)
        starts, ones = np.arange(count + 1), (1,) * count
        max_blocks = -(-int(newest.max()) // table.block_size)
        query_start_loc = put("query_start_loc", starts.astype(np.int32))
        seq_lens = put("seq_lens", newest.astype(np.int32))
        unstored = np.full(count, -1, np.int64)
        layouts = tuple(
            StepLayout(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=put(
                    f"block_table {group}", table.blocks(group, (slots, slice(max_blocks)))
                ),
                slot_mapping=put(f"slot_mapping {group}", unstored),
                num_scheduled=ones,
                contexts=tuple(newest.tolist()),
                block_size=table.block_size,
            )
            for group in range(len(table.block_tables))
        )
        batch = InputBatch(
            StepTensors(
                put("input_ids", np.zeros(count, np.int64)),
                put("positions", newest),
                layouts,
                put("logits_indices", starts[:-1]),
            ),
            slots=slots,
            starts=starts,
            ends=newest,
            sampling_rows=starts[:-1],
        )
        self._inputs.send()
        return batch
