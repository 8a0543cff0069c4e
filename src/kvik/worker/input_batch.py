"""The device tensors of one step, gathered from the request table without a loop over requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.core.plan import SchedulerOutput
from kvik.frozen import frozen
from kvik.worker.draft_tree import DraftTree
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import StepInputs


@frozen
class StepTensors:
    """What the forward of a step reads."""

    # input_ids, positions: [tokens] int64, the rows' tokens one after another.
    input_ids: Tensor
    positions: Tensor
    layouts: tuple[StepLayout, ...]  # places of the tokens in the cache, per KV group
    # [logit rows] int64, tokens whose logits are computed: the last 1 + number of drafts of each
    # sampling row.
    logits_indices: Tensor
    # `hidden` and `onward` of the output of the stage before this one, [tokens, width] each; ():
    # there is none.
    entered: Sequence[Tensor] = ()


@frozen
class InputBatch:
    """The inputs of one step."""

    tensors: StepTensors
    slots: np.ndarray  # [rows] on the host
    starts: np.ndarray  # [rows + 1] on the host, first token of each row
    ends: np.ndarray  # [rows] on the host, computed tokens of each request after the step
    sampling_rows: np.ndarray  # rows that sample, on the host
    num_drafts: np.ndarray | None = None  # [sampling rows] on the host; None: no row has any
    # logit_tokens, logit_positions: [logit rows] int64 on the host, the tokens whose logits are
    # computed and their positions; None: no row has drafts.
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
    block_size = table.block_size
    max_blocks = -(-int(seq_lens.max()) // block_size)
    block = places // block_size
    offset = places - block * block_size
    arrays: dict[str, np.ndarray] = {
        "query_start_loc": starts.astype(np.int32),
        "seq_lens": seq_lens.astype(np.int32),
        "input_ids": input_ids,
        "positions": positions,
        "logits_indices": logits_indices,
    }
    if words is not None:
        arrays["tree"] = words
    if table.adapters is not None:
        arrays["adapters"] = table.adapters[token_slots]
    if table.states or table.first_keys:
        arrays["state_rows"] = slots.astype(np.int32)
    if table.covered is not None:
        of_begun = np.where(computed > 0, computed - table.covered[slots], 0)
        arrays["state_pending"] = of_begun.astype(np.int32)
        arrays["state_drafts"] = np.array(plan.num_draft_tokens, np.int32)
    num_groups = len(table.block_tables)
    for group in range(num_groups):
        blocks = table.blocks(group, (token_slots, block))
        arrays[f"slot_mapping {group}"] = blocks.astype(np.int64) * block_size + offset
        arrays[f"block_table {group}"] = table.blocks(group, (slots, slice(max_blocks)))
        if group in table.first_keys:
            arrays[f"first_keys {group}"] = table.first_keys[group][slots]
    return InputBatch(
        put_step(arrays, inputs, num_groups, block_size),
        slots=slots,
        starts=starts,
        ends=seq_lens,
        sampling_rows=sampling_rows,
        num_drafts=num_drafts,
        logit_tokens=logit_tokens,
        logit_positions=logit_positions,
    )


def put_step(
    arrays: Mapping[str, np.ndarray], inputs: StepInputs, num_groups: int, block_size: int
) -> StepTensors:
    """Put and send the inputs of a step, by name. What the stage before computes must have been
    put."""
    tensors = {name: inputs.put(name, array) for name, array in arrays.items()}
    inputs.send()
    starts, rows = arrays["query_start_loc"], len(arrays["seq_lens"])
    num_scheduled = tuple((starts[1:] - starts[:-1]).tolist())
    contexts = tuple(arrays["seq_lens"].tolist())
    tree_words = tuple(arrays["tree"].tolist()) if "tree" in arrays else ()
    layouts = tuple(
        StepLayout(
            query_start_loc=tensors["query_start_loc"],
            seq_lens=tensors["seq_lens"],
            # A network that drafts may have put the rows of the step before.
            block_table=tensors[f"block_table {group}"][:rows],
            slot_mapping=tensors[f"slot_mapping {group}"],
            num_scheduled=num_scheduled,
            contexts=contexts,
            block_size=block_size,
            tree=tensors.get("tree"),
            tree_words=tree_words,
            state_rows=tensors.get("state_rows"),
            state_pending=tensors.get("state_pending"),
            state_drafts=tensors.get("state_drafts"),
            first_keys=tensors.get(f"first_keys {group}"),
            firsts=(
                tuple(arrays[f"first_keys {group}"].tolist())
                if f"first_keys {group}" in arrays
                else ()
            ),
            adapters=tensors.get("adapters"),
        )
        for group in range(num_groups)
    )
    return StepTensors(
        tensors["input_ids"],
        tensors["positions"],
        layouts,
        tensors["logits_indices"],
        inputs.entered(len(arrays["input_ids"])),
    )


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
