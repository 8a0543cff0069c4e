"""The device tensors of one step, gathered from the request table without a loop over requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvik.attention.base import StepLayout
from kvik.core.plan import SchedulerOutput
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Attributes:
    input_ids, positions: [tokens] int64, the rows' tokens one after another.
    layouts: where the tokens belong, per KV group.
    slots: [rows] on the host.
    starts: [rows + 1] on the host, first token of each row.
    sampling_rows: rows that sample, on the host.
    logits_indices: [sampling rows] int64, the last token of each.
    """

    input_ids: Tensor
    positions: Tensor
    layouts: tuple[StepLayout, ...]
    slots: np.ndarray
    starts: np.ndarray
    sampling_rows: np.ndarray
    logits_indices: Tensor


def build_input_batch(plan: SchedulerOutput, table: RequestTable, inputs: StepInputs) -> InputBatch:
    """Gather the step's inputs. The plan's diff must have been applied to the table."""
    slots = np.array(plan.slots, np.int64)
    scheduled = np.array(plan.num_scheduled_tokens, np.int64)
    computed = table.num_computed[slots].astype(np.int64)
    seq_lens = computed + scheduled
    starts = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(scheduled, out=starts[1:])
    total = int(starts[-1])
    if total == len(slots):  # only decodes
        token_slots, positions = slots, computed
    else:
        token_slots = np.repeat(slots, scheduled)
        positions = np.repeat(computed - starts[:-1], scheduled) + np.arange(total)
    input_ids = table.token_ids[token_slots, positions].astype(np.int64)
    sampling_rows = np.flatnonzero(np.array(plan.samples, np.bool_))

    def kv_positions(block_table: np.ndarray) -> np.ndarray:
        return block_table[token_slots, block].astype(np.int64) * block_size + offset

    block_size = table.block_size
    max_blocks = -(-int(seq_lens.max()) // block_size)
    block, offset = np.divmod(positions, block_size)
    query_start_loc = inputs.put("query_start_loc", starts.astype(np.int32))
    seq_lens_tensor = inputs.put("seq_lens", seq_lens.astype(np.int32))
    num_scheduled, contexts = tuple(plan.num_scheduled_tokens), tuple(seq_lens.tolist())
    layouts = tuple(
        StepLayout(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens_tensor,
            block_table=inputs.put(f"block_table {group}", block_table[slots, :max_blocks]),
            slot_mapping=inputs.put(f"slot_mapping {group}", kv_positions(block_table)),
            num_scheduled=num_scheduled,
            contexts=contexts,
            block_size=block_size,
        )
        for group, block_table in enumerate(table.block_tables)
    )
    return InputBatch(
        input_ids=inputs.put("input_ids", input_ids),
        positions=inputs.put("positions", positions),
        layouts=layouts,
        slots=slots,
        starts=starts,
        sampling_rows=sampling_rows,
        logits_indices=inputs.put("logits_indices", starts[1:][sampling_rows] - 1),
    )
