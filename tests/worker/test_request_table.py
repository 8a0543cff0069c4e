"""Slots of the request table: entered, extended and reused."""

from __future__ import annotations

import numpy as np

from kvik.core.plan import NewRequest
from kvik.core.sampling_params import SamplingParams
from kvik.worker.request_table import RequestTable


def request(slot: int, tokens: list[int], blocks: list[list[int]]) -> NewRequest:
    return NewRequest(slot, tokens, len(tokens), 0, blocks, SamplingParams(), frozenset(), 0)


def test_new_blocks_follow_the_existing_ones() -> None:
    table = RequestTable(4, 32, 2, 8)
    table.add(request(2, [5, 6, 7], [[9], [4]]))
    table.add_blocks(2, 1, [3, 8])
    table.add_blocks(2, 0, [1])
    assert table.block_tables[0][2, :2].tolist() == [9, 1]
    assert table.block_tables[1][2, :3].tolist() == [4, 3, 8]
    assert table.num_blocks[:, 2].tolist() == [2, 3]


def test_a_slot_is_reset_for_each_request() -> None:
    table = RequestTable(4, 32, 1, 8)
    table.add(request(1, [1] * 20, [[5, 6, 7]]))
    table.add(request(1, [2, 3], [[9]]))
    table.add_blocks(1, 0, [4])
    assert table.block_tables[0][1, :2].tolist() == [9, 4]
    assert table.num_tokens[1] == 2


def test_the_context_can_be_filled_to_the_end() -> None:
    table = RequestTable(1, 5, 1, 4)
    table.add(request(0, [1, 2, 3, 4], [[1, 2]]))
    table.learn(table.expect(np.array([0])), np.array([5]))
    assert table.token_ids[0].tolist() == [1, 2, 3, 4, 5]


def test_expected_tokens_are_counted_before_they_are_read() -> None:
    table = RequestTable(4, 32, 1, 8)
    for slot in (0, 1, 2):
        table.add(request(slot, [slot], [[1 + slot]]))
    first = table.expect(np.array([0, 1]))
    second = table.expect(np.array([1, 2]))
    assert table.num_tokens[:3].tolist() == [2, 3, 2]
    assert table.still(first) is None
    table.add(request(1, [5, 6, 7], [[9]]))  # in the slot of a request that left
    assert table.still(first).tolist() == [True, False]
    assert table.still(second).tolist() == [False, True]
    third = table.expect(np.array([1]))
    table.learn(first, np.array([10, 11]))
    table.learn(second, np.array([12, 13]))
    table.learn(third, np.array([8]))
    assert table.token_ids[0, :2].tolist() == [0, 10]
    assert table.token_ids[1, :4].tolist() == [5, 6, 7, 8]
    assert table.token_ids[2, :2].tolist() == [2, 13]


def test_runs_are_appended_and_drafts_follow_them() -> None:
    table = RequestTable(4, 32, 1, 8)
    table.add(request(0, [1, 2], [[1]]))
    table.add(request(3, [7], [[2]]))
    slots = np.array([3, 0])
    table.put_drafts(slots, np.array([2, 0]), np.array([20, 21]))
    assert table.num_tokens.tolist() == [2, 0, 0, 1]
    assert table.token_ids[3, :3].tolist() == [7, 20, 21]
    table.append_runs(slots, np.array([2, 1]), np.array([20, 8, 9]))
    assert table.token_ids[3, :3].tolist() == [7, 20, 8]
    assert table.token_ids[0, :3].tolist() == [1, 2, 9]
    assert table.num_tokens.tolist() == [3, 0, 0, 3]
