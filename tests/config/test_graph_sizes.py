"""Sizes that are captured, and what memory is planned for without making them."""

from __future__ import annotations

import pytest

from kvik.config.graph_sizes import decoding_sizes, num_decoding_sizes


@pytest.mark.parametrize("most", [*range(1, 34), 64, 65, 1000])
def test_decoding_sizes_are_counted_and_the_last_is_the_largest(most: int) -> None:
    sizes = decoding_sizes(most)
    assert num_decoding_sizes(most) == len(sizes) == len(set(sizes))
    assert [size.rows for size in sizes] == sorted(size.rows for size in sizes)
    assert sizes[-1].rows == most
    assert all(size.tokens == size.samples == size.rows for size in sizes)
