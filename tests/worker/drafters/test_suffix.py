from __future__ import annotations

import numpy as np
import pytest
import torch

from kvik.worker.drafters import suffix
from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.suffix import SuffixDrafter, TenantOutputs
from kvik.worker.request_table import RequestTable


def table_of(*texts: list[int], longest: int = 64) -> RequestTable:
    """Each text is a prompt of one token and an output."""
    table = RequestTable(8, longest, 1, 4)
    for slot, text in enumerate(texts):
        write(table, slot, text)
    return table


def write(table: RequestTable, slot: int, text: list[int]) -> None:
    table.token_ids[slot, : len(text)] = text
    table.num_tokens[slot] = len(text)
    table.num_prompt[slot] = 1


def proposed(drafter: SuffixDrafter, slots: list[int], limit: int = 8) -> list[list[int]]:
    n = len(slots)
    limits = np.full(n, limit)
    rows = DraftRows(np.array(slots), limits, lambda: torch.zeros(n, 1))
    return drafter.propose(rows).by_row()


def test_rows_go_on_as_their_own_text_did() -> None:
    table = table_of([1, 2, 3, 4, 5, 6, 1, 2, 3], [7, 8, 9], [2, 5, 2, 5, 2, 6, 2])
    drafter = SuffixDrafter(table, shared=False)
    for slot in range(3):
        drafter.enter(slot)
    # Three tokens were found again: six drafts. Two of three times a 5 followed the 2.
    assert proposed(drafter, [2, 0, 1]) == [[5, 2], [4, 5, 6, 1, 2, 3], []]
    write(table, 1, [7, 8, 9, 7])
    assert proposed(drafter, [1, 0], limit=4) == [[8, 9], [4, 5, 6, 1]]


def test_drafts_end_below_the_minimum_probability() -> None:
    table = table_of([1, 2, 8, 1, 2, 9, 1, 2, 7, 5, 1, 2, 6, 4, 1, 2, 3, 0, 0, 1, 2])
    drafter = SuffixDrafter(table, shared=False)
    drafter.enter(0)
    assert proposed(drafter, [0])[0] == [8, 1, 2, 9]  # the first of five: just likely enough
    table.token_ids[0, 19:24] = [1, 2, 10, 1, 2]
    table.num_tokens[0] = 24
    assert proposed(drafter, [0])[0] == []


def test_a_slot_forgets_its_last_text() -> None:
    table = table_of([1, 2, 3, 1, 2])
    drafter = SuffixDrafter(table, shared=False)
    drafter.enter(0)
    assert proposed(drafter, [0]) == [[3, 1, 2, 3]]
    drafter.leave(0)
    write(table, 0, [4, 1, 2])
    drafter.enter(0)
    assert proposed(drafter, [0]) == [[]]


def test_a_text_is_read_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_LEARNED_PER_STEP", 4)
    table = table_of([1, 2, 3, 4, 5, 6, 1, 2])
    drafter = SuffixDrafter(table, shared=False)
    drafter.enter(0)
    assert proposed(drafter, [0]) == [[]]
    assert proposed(drafter, [0]) == [[3, 4, 5, 6]]


def test_of_a_long_prompt_the_end_is_kept_and_a_full_automaton_is_still_read() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    table = table_of(text)
    drafter = SuffixDrafter(table, shared=False, max_tokens=8)
    drafter.enter(0)  # 5 6 7 8
    assert proposed(drafter, [0]) == [[]]
    for token, expected in ((1, []), (2, []), (5, [6, 7]), (9, []), (5, [6, 7]), (6, [7, 8, 1, 2])):
        text.append(token)
        write(table, 0, text)
        assert proposed(drafter, [0]) == [expected]


def test_outputs_help_the_same_tenant_alone() -> None:
    table = table_of([9, 1, 2, 3, 4], [9, 1, 2, 7, 7], [0, 2], [1, 2])
    table.tenants[:4] = ["a", "b", "a", "b"]
    drafter = SuffixDrafter(table, shared=True)
    for slot in range(4):
        drafter.enter(slot)
    assert proposed(drafter, [2, 3]) == [[], []]
    drafter.leave(0)
    assert proposed(drafter, [2, 3]) == [[3, 4], []]
    drafter.leave(1)
    assert proposed(drafter, [2, 3]) == [[3, 4], [7, 7]]
    write(table, 2, [0, 9, 1])  # prompts are not learned
    assert proposed(drafter, [2]) == [[2, 3]]
    unshared = SuffixDrafter(table, shared=False)
    for slot in (0, 2):
        unshared.enter(slot)
    unshared.leave(0)
    assert proposed(unshared, [2]) == [[]]


def test_stored_outputs_of_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_TENANTS", 2)
    outputs = TenantOutputs(max_tokens=12)
    for tenant in "abc":
        outputs.add(tenant, [1, 2, 3])
    assert [outputs.continuation(tenant, [1], 2).tokens for tenant in "abc"] == [[], [2, 3], [2, 3]]
    for first in (10, 20, 30, 40):  # the first of them is gone, the last two are there
        outputs.add("c", [first, first + 1, first + 2, first + 3])
        outputs.continuation("c", [0], 2)
    found = [outputs.continuation("c", [first], 2).tokens for first in (1, 10, 20, 30, 40)]
    assert found[0] == [] and found[-2:] == [[31, 32], [41, 42]]
