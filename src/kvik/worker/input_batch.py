"""The device tensors of one step, gathered from the request table without a loop over requests."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from kvik.attention.base import StepLayout
from kvik.core.plan import SchedulerOutput
from kvik.frozen import frozen
from kvik.worker.draft_tree import DraftTree
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs


@frozen
class InputBatch:
    """The inputs of one step.

    Attributes:
        input_ids, positions: [tokens] int64, the rows' tokens one after another.
        layouts: places of the tokens in the cache, per KV group.
        slots: [rows] on the host.
        starts: [rows + 1] on the host, first token of each row.
        ends: [rows] on the host, computed tokens of each request after the step.
        sampling_rows: rows that sample, on the host.
        logits_indices: [logit rows] int64, tokens whose logits are computed: the last
            1 + number of drafts of each sampling row.
        num_drafts: [sampling rows] on the host; None: no row has any.
        logit_tokens, logit_positions: [logit rows] int64 on the host, those tokens and their
            positions; None: no row has drafts.
    """

    input_ids: Tensor
    positions: Tensor
    layouts: tuple[StepLayout, ...]
    slots: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    sampling_rows: np.ndarray
    logits_indices: Tensor
    num_drafts: np.ndarray | None = None
    logit_tokens: np.ndarray | None = None
    logit_positions: np.ndarray | None = None


def build_input_batch(plan: SchedulerOutput, table: RequestTable, inputs: StepInputs) -> InputBatch:
    """Gather the step's inputs. The plan's diff must have been applied to the table, in which a
    row's drafts follow its tokens."""
    slots = np.array(plan.slots, np.int64)
    scheduled = np.array(plan.num_scheduled_tokens, np.int64)
    computed = table.num_computed[slots].astype(np.int64)
    seq_lens = computed + scheduled
    total = plan.num_tokens
    if total == len(slots):  # only decodes
        starts = np.arange(total + 1)
        token_slots, places = slots, computed
    else:
        starts = np.zeros(len(slots) + 1, np.int64)
        scheduled.cumsum(out=starts[1:])
        token_slots = slots.repeat(scheduled)
        places = (computed - starts[:-1]).repeat(scheduled) + np.arange(total)
    input_ids = table.token_ids[token_slots, places].astype(np.int64)
    sampling_rows = np.array(plan.samples, np.bool_).nonzero()[0]
    logits_indices = starts[1:][sampling_rows] - 1
    positions, words, num_drafts = places, None, None
    if table.type_stride:
        positions = places + table.type_stride * (places >= table.second_text[token_slots])
    logit_tokens = logit_positions = None
    if total > len(slots) and any(plan.num_draft_tokens):
        drafts = np.array(plan.num_draft_tokens, np.int64)
        num_drafts = drafts[sampling_rows]
        logits_indices = _with_drafts(logits_indices, num_drafts)
        if table.draft_tree is not None:
            positions, words = _tree_positions(table.draft_tree, places, starts, drafts)
        logit_tokens, logit_positions = input_ids[logits_indices], positions[logits_indices]

    def kv_positions(group: int) -> np.ndarray:
        blocks = table.blocks(group, (token_slots, block))
        return blocks.astype(np.int64) * block_size + offset

    block_size = table.block_size
    max_blocks = -(-int(seq_lens.max()) // block_size)
    block = places // block_size
    offset = places - block * block_size
    query_start_loc = inputs.put("query_start_loc", starts.astype(np.int32))
    seq_lens_tensor = inputs.put("seq_lens", seq_lens.astype(np.int32))
    num_scheduled, contexts = tuple(plan.num_scheduled_tokens), tuple(seq_lens.tolist())
    tree_tensor = None if words is None else inputs.put("tree", words)
    tree_words = () if words is None else tuple(words.tolist())
    adapters = None
    if table.adapters is not None:
        adapters = inputs.put("adapters", table.adapters[token_slots])
    state_rows = pending = state_drafts = None
    if table.states or table.first_keys is not None:
        state_rows = inputs.put("state_rows", slots.astype(np.int32))
    if table.covered is not None:
        of_begun = np.where(computed > 0, computed - table.covered[slots], 0)
        pending = inputs.put("state_pending", of_begun.astype(np.int32))
        state_drafts = inputs.put("state_drafts", np.array(plan.num_draft_tokens, np.int32))
    layouts = tuple(
        StepLayout(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens_tensor,
            block_table=inputs.put(
                f"block_table {group}", table.blocks(group, (slots, slice(max_blocks)))
            ),
            slot_mapping=inputs.put(f"slot_mapping {group}", kv_positions(group)),
            num_scheduled=num_scheduled,
            contexts=contexts,
            block_size=block_size,
            tree=tree_tensor,
            tree_words=tree_words,
            state_rows=state_rows,
            state_pending=pending,
            state_drafts=state_drafts,
            first_keys=(
                None
                if table.first_keys is None
                else inputs.put(f"first_keys {group}", table.first_keys[group, slots])
            ),
            firsts=(
                () if table.first_keys is None else tuple(table.first_keys[group, slots].tolist())
            ),
            adapters=adapters,
        )
        for group in range(len(table.block_tables))
    )
    batch = InputBatch(
        input_ids=inputs.put("input_ids", input_ids),
        positions=inputs.put("positions", positions),
        layouts=layouts,
        slots=slots,
        starts=starts,
        ends=seq_lens,
        sampling_rows=sampling_rows,
        logits_indices=inputs.put("logits_indices", logits_indices),
        num_drafts=num_drafts,
        logit_tokens=logit_tokens,
        logit_positions=logit_positions,
    )
    inputs.send()
    return batch


def _tree_positions(
    tree: DraftTree, places: np.ndarray, starts: np.ndarray, drafts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of the step's tokens, and the tree words of rows with drafts (else 0).

    Args:
        places: [tokens], index of each token in its request.
        starts: [rows + 1]. drafts: [rows].
    """
    scheduled = np.diff(starts)
    within = np.arange(len(places)) - np.repeat(starts[:-1], scheduled)
    drafted = np.repeat(drafts > 0, scheduled)
    nodes = within[drafted]
    positions, words = places.copy(), np.zeros_like(places)
    positions[drafted] += tree.depths[nodes] - nodes
    words[drafted] = tree.words[nodes]
    return positions, words


def _with_drafts(last: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
    """Return the indices of the last 1 + number of drafts tokens of each row.

    Args:
        last: [rows], index of the last token of each.
    """
    counts = 1 + num_drafts
    ends = counts.cumsum()
    return (last + 1 - ends).repeat(counts) + np.arange(ends[-1])
