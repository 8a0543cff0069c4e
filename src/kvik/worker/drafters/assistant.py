"""Drafts from a small model that reads the keys and values of its target (`Gemma4Assistant`).

It has no cache, so it computes nothing but drafts: requests need not be read again after a
preemption or a prefix hit. All drafts of a proposal are at the position of the newest token, whose
own key does not exist yet: they see the keys before it.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.kernels.upload import upload
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.drafters.draft_model import DraftSampling, Guessing
from kvik.worker.graphs import EngineNetwork, Graph
from kvik.worker.input_batch import InputBatch, StepTensors
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs


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
