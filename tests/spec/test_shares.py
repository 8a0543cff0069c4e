"""The division of layers among the stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from kvik.spec.shares import stages_of


def sizes(stages: Sequence[range], costs: Sequence[int], first: int, last: int) -> list[int]:
    """Return the bytes of each stage."""
    found = [sum(costs[layer] for layer in stage) for stage in stages]
    found[0] += first
    found[-1] += last
    return found


@pytest.mark.parametrize(
    ("costs", "first", "last", "count", "joined", "lengths"),
    [
        ([5] * 8, 0, 0, 1, (), [8]),
        ([5] * 8, 0, 0, 2, (), [4, 4]),
        ([5] * 7, 0, 0, 7, (), [1] * 7),
        ([5] * 5, 0, 0, 2, (), [3, 2]),  # the last stage also samples
        ([5] * 9, 0, 0, 4, (), [3, 2, 2, 2]),  # not 3, 3, 2, 1, with the same largest stage
        ([5] * 8, 10, 0, 2, (), [3, 5]),
        ([5] * 8, 0, 10, 2, (), [5, 3]),
        ([5] * 8, 10, 10, 2, (), [4, 4]),
        ([5] * 4, 100, 0, 2, (), [1, 3]),  # each stage has a layer, however large the embedding is
        ([1, 1, 9, 9, 9, 9], 0, 0, 2, (), [4, 2]),
        ([5] * 8, 0, 0, 2, ((5, 2),), [6, 2]),
        ([5] * 8, 0, 0, 2, ((4, 3), (5, 3)), [3, 5]),
        ([5] * 8, 0, 0, 3, ((7, 5), (6, 4)), [2, 2, 4]),
    ],
)
def test_stages(
    costs: list[int],
    first: int,
    last: int,
    count: int,
    joined: tuple[tuple[int, int], ...],
    lengths: list[int],
) -> None:
    stages = stages_of(costs, first, last, count, joined)
    assert [len(stage) for stage in stages] == lengths
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))


def test_no_other_division_has_a_smaller_largest_stage() -> None:
    rng = random.Random(7)
    for _ in range(200):
        layers = rng.randint(1, 8)
        count = rng.randint(1, layers)
        costs = [rng.randint(1, 20) for _ in range(layers)]
        first, last = rng.randint(0, 30), rng.randint(0, 30)
        joined = []
        if layers > 1 and rng.random() < 0.5:
            source = rng.randint(0, layers - 2)
            joined.append((rng.randint(source + 1, layers - 1), source))
        kept = {cut for reader, source in joined for cut in range(source + 1, reader + 1)}
        free = [cut for cut in range(1, layers) if cut not in kept]
        ways = [(0, *cuts, layers) for cuts in combinations(free, count - 1)]
        if not ways:
            with pytest.raises(ValueError, match=f"into {len(free) + 1} at most"):
                stages_of(costs, first, last, count, joined)
            continue
        largest = min(
            max(sizes([range(*pair) for pair in pairwise(way)], costs, first, last)) for way in ways
        )
        stages = stages_of(costs, first, last, count, joined)
        assert all(stages) and len(stages) == count
        assert max(sizes(stages, costs, first, last)) == largest
        for reader, source in joined:
            assert any(reader in stage and source in stage for stage in stages)


def test_many_layers_are_divided_at_once() -> None:
    costs = [3 + layer % 2 for layer in range(128)]
    assert len(stages_of(costs, 40, 40, 64)) == 64


@pytest.mark.parametrize(
    ("costs", "count", "joined", "message"),
    [
        ([1, 1], 3, (), "2 layers cannot be divided into 3 stages"),
        ([1, 1], 0, (), "2 layers cannot be divided into 0 stages"),
        ([], 1, (), "0 layers cannot be divided into 1 stages"),
        ([1] * 4, 3, ((3, 1),), "into 3 stages, but into 2 at most: layers read"),
        ([1] * 4, 2, ((1, 1),), "layer 1 of 4 cannot read what layer 1 keeps"),
        ([1] * 4, 2, ((4, 1),), "layer 4 of 4 cannot read"),
    ],
)
def test_impossible_divisions(
    costs: list[int], count: int, joined: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stages_of(costs, 0, 0, count, joined)
