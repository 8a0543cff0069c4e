"""The forward passes of a proposal against a plain loop, and the mapping of vocabularies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvik.worker.drafters.draft_model import DraftNetwork, Forwards, Vocabulary
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.request_table import RequestTable
from kvik.worker.step_inputs import DeviceInputs, FixedInputs, FreshInputs, StepInputs, StepSizes

CPU = torch.device("cpu")
SLOTS, LENGTH, BLOCK, GROUPS, VOCAB = 9, 60, 4, 2, 90
SIZES = StepSizes(300, SLOTS, SLOTS + 1)
INPUTS = {
    "fresh": lambda: FreshInputs(CPU),
    "fixed": lambda: FixedInputs(SIZES, GROUPS, LENGTH // BLOCK),
    "device": lambda: DeviceInputs(SIZES, GROUPS, LENGTH // BLOCK, CPU),
}


class Noted:
    """Records the inputs of each row of each forward."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[object, ...]]] = []

    def prepare(self) -> None:
        pass

    def run(self, batch: InputBatch) -> StepOutput:
        rows, ids, places = [], batch.tensors.input_ids.tolist(), batch.tensors.positions.tolist()
        wanted = batch.tensors.logits_indices.tolist()
        for i, slot in enumerate(batch.slots.tolist()):
            begin, end = batch.starts[i : i + 2].tolist()
            kept = []
            for layout in batch.tensors.layouts:
                assert layout.query_start_loc[i : i + 2].tolist() == [begin, end]
                assert layout.num_scheduled[i] == end - begin
                assert layout.seq_lens[i] == places[end - 1] + 1 <= layout.contexts[i] <= LENGTH
                blocks = layout.block_table[i].tolist()[: places[end - 1] // BLOCK + 1]
                kept.append((blocks, layout.slot_mapping[begin:end].tolist()))
            samples = end - 1 in wanted
            assert samples == (i in batch.sampling_rows)
            rows.append((slot, ids[begin:end], places[begin:end], kept, samples))
        assert len(ids) == len(places) == batch.starts[-1]
        assert wanted == sorted(wanted) and sum(row[-1] for row in rows) == len(wanted)
        self.steps.append(rows)
        nothing = torch.empty(0)
        return StepOutput(nothing, nothing, nothing, nothing)

    def idle_step(self) -> bool:
        return False


def plain(
    table: RequestTable, slot: int, tokens: list[int], first: int, samples: bool
) -> tuple[object, ...]:
    """Compute one row token by token."""
    places = list(range(first, first + len(tokens)))
    blocks = table.block_tables[0][slot].tolist()
    kept = [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
    groups = [(blocks[: places[-1] // BLOCK + 1], kept)] * GROUPS
    return slot, tokens, places, groups, samples


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("kind", INPUTS)
def test_forwards_are_laid_out_like_those_of_a_plain_loop(kind: str, even: bool) -> None:
    rng = np.random.default_rng(int(even))
    table = RequestTable(SLOTS, LENGTH, GROUPS, BLOCK)
    table.block_tables = [table.block_tables[0]] * GROUPS
    inputs: StepInputs = INPUTS[kind]()
    graph = Noted()
    network = DraftNetwork(graph, inputs, Vocabulary(VOCAB, VOCAB, None, CPU), table, 300, LENGTH)
    for _ in range(25):
        table.token_ids[:] = rng.integers(0, VOCAB, (SLOTS, LENGTH))
        blocks = rng.permutation(1000)[: SLOTS * (LENGTH // BLOCK)] + 1
        table.block_tables[0][:] = blocks.reshape(SLOTS, -1)
        rows = int(rng.integers(1, SLOTS + 1))
        slots = rng.permutation(SLOTS)[:rows]
        chunks = rng.integers(1, rng.integers(2, 30), rows)
        computed = rng.integers(0, LENGTH + 1 - chunks)
        ends = computed + chunks
        room = LENGTH + 1 - ends  # the last draft is not computed
        drafts = np.minimum(room, rng.integers(0, 7, rows))
        if even:
            drafts[:] = min(int(rng.integers(0, 7)), room.min())
        order = np.argsort(-drafts, kind="stable")
        slots, computed, chunks, drafts = (x[order] for x in (slots, computed, chunks, drafts))

        found = rng.integers(0, VOCAB, (rows, 7))
        expected = [
            [
                plain(table, slot, table.token_ids[slot, a : a + n].tolist(), a, most > 0)
                for slot, a, n, most in np.stack((slots, computed, chunks, drafts), axis=1).tolist()
            ]
        ]
        for depth in range(1, int(drafts[0])):
            expected.append(
                [
                    plain(
                        table,
                        slot,
                        [int(found[i, depth - 1])],
                        int(computed[i] + chunks[i]) + depth - 1,
                        True,
                    )
                    for i, slot in enumerate(slots.tolist())
                    if drafts[i] > depth
                ]
            )
        graph.steps.clear()
        table.num_computed[:] = 0
        forwards = Forwards(network, slots, computed, chunks, drafts)
        forwards.first()
        assert (table.num_computed[slots] == computed + chunks).all()
        for depth in range(1, int(drafts[0])):
            going = int((drafts > depth - 1).sum())
            tokens = found[:going, depth - 1].copy()
            # Tokens drafted on a device never were on the host, which sends all others.
            forwards.follow(torch.from_numpy(tokens) if kind == "device" else tokens)
        assert graph.steps == expected
        written = {
            int(table.block_tables[0][slot, place // BLOCK])
            for step in expected
            for slot, _, places, _, _ in step
            for place in places
        }
        assert set(forwards.blocks.tolist()) == written


# Mapping of a draft model's logits and tokens to the target's vocabulary.


def test_equal_vocabularies_pass_through() -> None:
    same = Vocabulary(5, 5, None, CPU)
    logits, tokens = torch.randn(2, 5), torch.tensor([1, 4])
    assert same.is_same and same.widened(logits) is logits
    same.narrow_(tokens)
    assert tokens.tolist() == [1, 4]


def test_padding_is_cut_and_unknown_tokens_are_never_drafted() -> None:
    larger, smaller = Vocabulary(4, 6, None, CPU), Vocabulary(6, 4, None, CPU)
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5]])
    assert not larger.is_same and not smaller.is_same
    assert larger.widened(logits).tolist() == [[0, 1, 2, 3]]
    assert smaller.widened(logits[:, :4]).tolist() == [[0, 1, 2, 3, -torch.inf, -torch.inf]]


def test_other_ids_are_mapped_both_ways() -> None:
    mapped = Vocabulary(4, 3, (3, -1, 0), CPU)  # of a draft model with three tokens
    assert mapped.widened(torch.tensor([[7.0, 8, 9]])).tolist() == [[9, -torch.inf, -torch.inf, 7]]
    tokens = torch.tensor([0, 3, 1])  # it lacks the last
    mapped.narrow_(tokens)
    assert tokens.tolist() == [2, 0, 0]
