"""The keys that a query sees and the blocks they occupy, by definition."""

from __future__ import annotations

from helpers.windows import Seen, as_window, chunks, num_sinks, seen, sinks
from hypothesis import given
from hypothesis import strategies as st

from kvik.spec.kv import KVCacheSpec, group_layers

sizes = st.integers(1, 20)
windows = st.one_of(
    st.none(), sizes, sizes.map(chunks), st.builds(sinks, st.integers(1, 12), sizes)
)
block_sizes = st.integers(1, 9)


def spec(window: Seen) -> KVCacheSpec:
    return KVCacheSpec(1, 4, 16, as_window(window))


def blocks_seen(position: int, window: Seen, block_size: int) -> set[int]:
    """Return the blocks that the query at a position sees, including those of sinks."""
    held = num_sinks(10**6, window)
    return {key // block_size for key in [*range(held), *seen(position, window)]}


@given(windows, st.integers(0, 80), block_sizes)
def test_hidden_blocks_hold_no_visible_key(window: Seen, position: int, block_size: int) -> None:
    hidden = spec(window).visible.hidden_blocks(position, block_size)
    shown = blocks_seen(position, window, block_size)
    assert set(hidden) == set(range(position // block_size + 1)) - shown


@given(windows, st.integers(0, 60), st.integers(0, 40))
def test_pairs_are_those_of_a_mask(window: Seen, first: int, new: int) -> None:
    masks = [seen(q, window) for q in range(first, first + new)]
    assert spec(window).visible.pairs(first, first + new, 0) == sum(map(len, masks))
    if new:
        assert spec(window).visible.keys_read(first, first + new, 0) == len(set().union(*masks))


@given(windows, st.integers(1, 60), st.integers(1, 20), block_sizes)
def test_the_most_blocks_are_those_of_the_worst_step(
    window: Seen, num_tokens: int, chunk: int, block_size: int
) -> None:
    """Of all steps: the blocks that the first query sees and those that the step adds. A sliding
    window may be planned with one block more than any step needs, and sinks with their own
    block."""
    held = max(
        -(-min(num_tokens, begin + chunk) // block_size)
        - len(spec(window).visible.hidden_blocks(begin, block_size))
        for begin in range(num_tokens)
    )
    found = spec(window).visible.max_blocks(num_tokens, chunk, block_size)
    of = as_window(window)
    more = 0 if of is None or of.chunked else 2 if of.sinks else 1
    assert held <= found <= held + more


@given(windows, st.lists(st.booleans(), max_size=14), block_sizes)
def test_a_hit_is_the_longest_prefix_whose_visible_keys_are_cached(
    window: Seen, cached: list[bool], block_size: int
) -> None:
    def is_hit(length: int) -> bool:
        needed = blocks_seen(length * block_size, window, block_size)
        return all(cached[i] for i in needed if i < length)

    longest = max(length for length in range(len(cached) + 1) if is_hit(length))
    found = spec(window).visible.hit_length(cached.__getitem__, len(cached), block_size)
    assert found == longest


def test_chunks_and_windows_of_equal_size_are_separate_groups() -> None:
    specs = [spec(window) for window in (8, chunks(8), 8, chunks(8), None)]
    assert [group.layers for group in group_layers(specs)] == [(0,), (1,), (2,), (3,), (4,)]
    pairs = [spec(window) for window in (chunks(8), chunks(8), chunks(4), None, None, chunks(4))]
    assert [group.layers for group in group_layers(pairs)] == [(0, 1), (2, 5), (3, 4)]
