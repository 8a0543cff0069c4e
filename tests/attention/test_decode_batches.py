from __future__ import annotations

import random

from kvik.attention.sdpa import MAX_KEYS, MAX_PADDING, DecodeRow, split


def rows(widths: list[int]) -> list[DecodeRow]:
    return [DecodeRow(i, i, 0, width) for i, width in enumerate(widths)]


def test_like_rows_share_a_batch_in_order() -> None:
    like = rows([100, 120, 110, 128])
    assert split(like) == [like]


def test_a_long_row_does_not_pad_many_short_ones() -> None:
    batches = split(rows([50] * 20 + [4000]))
    assert [len(batch) for batch in batches] == [1, 20]


def test_every_row_is_in_one_batch_and_limits_hold() -> None:
    rng = random.Random(0)
    for _ in range(200):
        given = rows([rng.choice([rng.randint(1, 300), rng.randint(1, 20000)]) for _ in range(40)])
        batches = split(given)
        assert sorted(row.seq for batch in batches for row in batch) == list(range(40))
        for batch in batches:
            width = max(row.padded_width for row in batch)
            assert sum(width - row.padded_width for row in batch) <= MAX_PADDING
            assert len(batch) == 1 or len(batch) * width <= MAX_KEYS


def test_nothing_to_decode() -> None:
    assert split([]) == []
