from __future__ import annotations

import numpy as np
import torch
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.lookup import NgramDrafter, continued, latest_match
from kvik.worker.request_table import RequestTable

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def slow_match(text: list[int], shortest: int, longest: int) -> int:
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                return end
    return 0


@settings(max_examples=examples(500))
@given(texts, st.integers(1, 4), st.integers(0, 4))
def test_the_longest_match_is_found_and_of_those_the_latest(
    text: list[int], shortest: int, more: int
) -> None:
    expected = slow_match(text, shortest, shortest + more)
    assert latest_match(np.array(text, np.int32), shortest, shortest + more) == expected


@given(texts, st.data(), st.integers(1, 20))
def test_beyond_its_end_a_text_continues_with_its_drafts(
    text: list[int], data: st.DataObject, count: int
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    written = list(text)
    for i in range(count):
        written.append(written[start + i])
    assert continued(np.array(text), start, count) == written[len(text) :]


def test_each_row_is_looked_up_in_its_own_text() -> None:
    table = RequestTable(4, 32, 1, 4)
    for slot, text in {0: [1, 2, 3, 1, 2], 1: [9, 8, 7], 3: [2, 2]}.items():
        table.token_ids[slot, : len(text)] = text
        table.token_ids[slot, len(text) :] = 9  # not part of the text
        table.num_tokens[slot] = len(text)
    drafter = NgramDrafter(table, 1, 3)
    for slot in (0, 1, 3):
        drafter.enter(slot)
    slots = np.array([3, 0, 1])
    rows = DraftRows(slots, np.array([4, 2, 5]), lambda: torch.zeros(3, 1))
    drafts = drafter.propose(rows)
    assert drafts.by_row() == [[2, 2, 2, 2], [3, 1], []]
    assert drafts.tree is None and drafts.probs is None
