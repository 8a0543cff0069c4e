"""The gathered inputs of a step, compared with one row at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvik.core.plan import NewRequest, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.worker.draft_tree import DraftTree
from kvik.worker.input_batch import build_input_batch
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import FixedInputs, FreshInputs, StepInputs, StepSizes

SLOTS, LENGTH = 8, 64
TREE = DraftTree((-1, 0, 0, 1, 3), (0, 0, 1, 0, 0))
CPU = torch.device("cpu")


def fill(table: RequestTable, rng: random.Random, num_groups: int) -> dict[int, NewRequest]:
    """Add requests in random slots, each computed up to a random point."""
    block_size, free = table.block_size, list(range(1, 1 + num_groups * SLOTS * LENGTH))
    rng.shuffle(free)
    requests = {}
    for slot in rng.sample(range(SLOTS), 5):
        length = rng.randint(1, LENGTH)
        blocks = -(-length // block_size)
        requests[slot] = NewRequest(
            slot=slot,
            token_ids=[rng.randrange(1000) for _ in range(length)],
            num_prompt_tokens=rng.randint(1, length),
            num_computed_tokens=rng.randrange(length),
            block_ids=[[free.pop() for _ in range(blocks)] for _ in range(num_groups)],
            params=SamplingParams(),
            stop_ids=frozenset(),
            seed=0,
        )
        table.add(requests[slot])
    return requests


@pytest.mark.parametrize("block_size", [1, 4, 16, 100])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("decode_only", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_every_row_has_its_tokens_positions_and_slots(
    block_size: int, num_groups: int, decode_only: bool, fixed: bool
) -> None:
    rng = random.Random(block_size)
    table = RequestTable(SLOTS, LENGTH, num_groups, block_size, budgeted=range(1, num_groups))
    requests = fill(table, rng, num_groups)
    slots = list(requests)
    known = {slot: len(r.token_ids) for slot, r in requests.items()}
    left = [known[slot] - requests[slot].num_computed_tokens for slot in slots]
    scheduled = [1 if decode_only else rng.randint(1, n) for n in left]
    samples = [n == most for n, most in zip(scheduled, left, strict=True)]
    plan = SchedulerOutput(0, slots, scheduled, [0] * len(slots), samples)
    inputs: StepInputs = FreshInputs(CPU)
    if fixed:
        inputs = FixedInputs(StepSizes(SLOTS * LENGTH, SLOTS, SLOTS + 1), num_groups, LENGTH)
    batch = build_input_batch(plan, table, inputs)
    step = batch.tensors
    at = 0
    for row, slot in enumerate(slots):
        request = requests[slot]
        for i in range(scheduled[row]):
            position = request.num_computed_tokens + i
            assert step.input_ids[at] == request.token_ids[position]
            assert step.positions[at] == position
            for group, layout in enumerate(step.layouts):
                block = request.block_ids[group][position // block_size]
                assert layout.slot_mapping[at] == block * block_size + position % block_size
            at += 1
        for group, layout in enumerate(step.layouts):
            ids = request.block_ids[group]
            width = layout.block_table.shape[1]
            assert layout.block_table[row].tolist()[: len(ids)] == ids[:width]
            assert layout.contexts[row] == request.num_computed_tokens + scheduled[row]
            assert layout.query_start_loc[row + 1] == at
    # As kernels are warmed up and forwards recorded: only layers with a budget have first keys.
    firsts = [layout.first_keys is not None for layout in step.layouts]
    assert firsts == [False, True][:num_groups]
    assert len(step.input_ids) == at
    assert batch.sampling_rows.tolist() == [i for i, sample in enumerate(samples) if sample]
    ends = batch.starts[1:] - 1
    assert step.logits_indices.tolist() == [ends[i] for i, sample in enumerate(samples) if sample]


@pytest.mark.parametrize("tree", [None, TREE])
@pytest.mark.parametrize("fixed", [False, True])
def test_drafts_follow_the_known_tokens(tree: DraftTree | None, fixed: bool) -> None:
    """A chunk of a prompt, a decode, and requests with four and two drafts."""
    table = RequestTable(SLOTS, LENGTH, 1, 4)
    for slot, (known, computed) in enumerate([(9, 2), (5, 4), (7, 6), (3, 2)]):
        ids = [100 * slot + i for i in range(known)]
        blocks = [[1 + 10 * slot + i for i in range(4)]]
        table.add(NewRequest(slot, ids, 1, computed, blocks, SamplingParams(), frozenset(), 0))
    counts = np.array([4, 2])
    table.put_drafts(np.array([2, 3]), counts, np.array([50, 51, 52, 53, 60, 61]))
    plan = SchedulerOutput(0, [0, 1, 2, 3], [3, 1, 5, 3], [0, 0, 4, 2], [False, True, True, True])
    inputs: StepInputs = FreshInputs(CPU)
    if fixed:
        sizes = StepSizes(SLOTS * LENGTH, SLOTS, SLOTS + 1)
        inputs = FixedInputs(replace(sizes, trees=True), 1, LENGTH)
    table.draft_tree = tree
    batch = build_input_batch(plan, table, inputs)
    step = batch.tensors
    ids = [2, 3, 4, 104, 206, 50, 51, 52, 53, 302, 60, 61]
    assert step.input_ids.tolist() == ids
    assert batch.num_drafts.tolist() == [0, 4, 2]
    assert step.logits_indices.tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert batch.logit_tokens.tolist() == step.input_ids[step.logits_indices].tolist()
    assert batch.logit_positions.tolist() == step.positions[step.logits_indices].tolist()
    (layout,) = step.layouts
    places = [2, 3, 4, 4, 6, 7, 8, 9, 10, 2, 3, 4]
    firsts = [0] * 3 + [1] + [2] * 5 + [3] * 3
    mapping = [
        (1 + 10 * slot + place // 4) * 4 + place % 4
        for slot, place in zip(firsts, places, strict=True)
    ]
    assert layout.slot_mapping.tolist() == mapping
    assert layout.contexts == (5, 5, 11, 5)
    if tree is None:
        assert step.positions.tolist() == places
        assert layout.tree is None
    else:
        assert step.positions.tolist() == [2, 3, 4, 4, 6, 7, 7, 8, 9, 2, 3, 3]
        words = [0b1, 0b11, 0b101, 0b1011, 0b11011]
        assert layout.tree.tolist() == [0] * 4 + words + words[:3]
        assert layout.tree_words == tuple([0] * 4 + words + words[:3])
