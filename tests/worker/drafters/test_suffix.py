from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.worker.drafters import lookup
from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.lookup import SEPARATOR, SuffixAutomaton, SuffixDrafter, TenantOutputs
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
    # Three tokens were matched: six drafts. In two of three cases a 5 followed the 2.
    assert proposed(drafter, [2, 0, 1]) == [[5, 2], [4, 5, 6, 1, 2, 3], []]
    write(table, 1, [7, 8, 9, 7])
    assert proposed(drafter, [1, 0], limit=4) == [[8, 9], [4, 5, 6, 1]]


def test_drafts_end_below_the_minimum_probability() -> None:
    table = table_of([1, 2, 8, 1, 2, 9, 1, 2, 7, 5, 1, 2, 6, 4, 1, 2, 3, 0, 0, 1, 2])
    drafter = SuffixDrafter(table, shared=False)
    drafter.enter(0)
    assert proposed(drafter, [0])[0] == [8, 1, 2, 9]  # the first of five, just likely enough
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
    monkeypatch.setattr(lookup, "MAX_LEARNED_PER_STEP", 4)
    table = table_of([1, 2, 3, 4, 5, 6, 1, 2])
    drafter = SuffixDrafter(table, shared=False)
    drafter.enter(0)
    assert proposed(drafter, [0]) == [[]]
    assert proposed(drafter, [0]) == [[3, 4, 5, 6]]


def test_a_long_prompt_keeps_its_end_and_a_full_automaton_works() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    table = table_of(text)
    drafter = SuffixDrafter(table, shared=False, max_tokens=8)
    drafter.enter(0)  # 5 6 7 8
    assert proposed(drafter, [0]) == [[]]
    for token, expected in ((1, []), (2, []), (5, [6, 7]), (9, []), (5, [6, 7]), (6, [7, 8, 1, 2])):
        text.append(token)
        write(table, 0, text)
        assert proposed(drafter, [0]) == [expected]


def test_outputs_are_only_used_for_the_same_tenant() -> None:
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
    monkeypatch.setattr(lookup, "MAX_TENANTS", 2)
    outputs = TenantOutputs(max_tokens=12)
    for tenant in "abc":
        outputs.add(tenant, [1, 2, 3])
    assert [outputs.continuation(tenant, [1], 2).tokens for tenant in "abc"] == [[], [2, 3], [2, 3]]
    for first in (10, 20, 30, 40):  # the first one is dropped, the last two stay
        outputs.add("c", [first, first + 1, first + 2, first + 3])
        outputs.continuation("c", [0], 2)
    found = [outputs.continuation("c", [first], 2).tokens for first in (1, 10, 20, 30, 40)]
    assert found[0] == [] and found[-2:] == [[31, 32], [41, 42]]


# The suffix automaton, against plain searches.

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def automaton_of(*tokens: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    return automaton


def stands_in(text: list[int], run: list[int]) -> bool:
    return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))


def followers(text: list[int], run: list[int]) -> Counter[int]:
    n = len(run)
    return Counter(text[i + n] for i in range(len(text) - n) if text[i : i + n] == run)


@settings(max_examples=examples(150))
@given(texts)
def test_the_repeated_suffix_is_the_longest_one(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.append(token)
        known = text[: i + 1]
        lengths = (n for n in range(i + 1) if stands_in(known[:-1], known[len(known) - n :]))
        assert automaton.repeated[1] == max(lengths)


@settings(max_examples=examples(150))
@given(texts, texts)
def test_another_text_is_followed_by_its_longest_suffix(text: list[int], read: list[int]) -> None:
    automaton = automaton_of(*text)
    state, length = 0, 0
    for i, token in enumerate(read):
        state, length = automaton.advance(state, length, [token])
        known = read[: i + 1]
        lengths = (n for n in range(i + 2) if stands_in(text, known[len(known) - n :]))
        assert length == max(lengths)
    assert automaton.advance(0, 0, read) == (state, length)


@settings(max_examples=examples(150))
@given(texts, texts, st.floats(0.05, 1.0))
def test_continuations_are_the_most_frequent_ones(
    text: list[int], read: list[int], least: float
) -> None:
    automaton = automaton_of(*text)
    state, length = automaton.advance(0, 0, read)
    found = automaton.continuation(state, 6, least)
    run = read[len(read) - length :]
    likely, score = 1.0, 0.0
    expected: list[int] = []
    for token in found.tokens:
        counts = followers(text, run)
        while not counts:  # at the end of the text, the longest suffix with a continuation
            run = run[1:]
            counts = followers(text, run)
        assert counts[token] == max(counts.values())
        likely *= counts[token] / counts.total()
        assert likely >= least - 1e-9
        score += likely
        run = [*run, token]
        expected.append(token)
    assert found.score == pytest.approx(score)
    if len(expected) < 6 and length:
        counts = followers(text, run)
        while run and not counts:
            run = run[1:]
            counts = followers(text, run)
        assert not run or likely * max(counts.values()) / counts.total() < least + 1e-9


def test_texts_end_at_their_separators() -> None:
    automaton = automaton_of(1, 2, 3, SEPARATOR, 4, 1, 2, SEPARATOR, 7)
    state, length = automaton.advance(0, 0, [4, 1])
    assert length == 2 and automaton.continuation(state, 5, 0.1).tokens == [2]


def test_unseen_tokens_have_no_continuation() -> None:
    automaton = automaton_of(1, 2, 3)
    assert automaton.advance(0, 0, [1, 9]) == (0, 0)
    assert automaton.continuation(0, 5, 0.1).tokens == []
    assert SuffixAutomaton().repeated == (0, 0)


def test_a_text_of_one_token_stays_cheap_and_right() -> None:
    automaton = automaton_of(*[7] * 500)
    state, length = automaton.repeated
    assert length == 499 and automaton.continuation(state, 8, 0.9).tokens == [7] * 8
