"""Which path through a tree of drafts is accepted, against a walk down the tree."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.drafters import with_newest

from kvik.worker.draft_tree import DraftTree
from kvik.worker.rejection import CheckedDrafts, Trees

TREE = DraftTree((-1, 0, 0, 1, 1, 2, 4, 6), (0, 0, 1, 0, 1, 0, 0, 0))


def walk(drafts: list[int], tokens: list[int], bad: list[bool]) -> list[int]:
    """Nodes whose tokens are output."""
    path = [0]
    while True:
        node = path[-1]
        children = [c for c in range(1, len(drafts) + 1) if TREE.parents[c] == node]
        right = [c for c in children if drafts[c - 1] == tokens[node] and not bad[node]]
        if not right:
            break
        path.append(right[0])
    if bad[path[-1]] and len(path) > 1:
        path.pop()
    return path


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_those_of_a_walk(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.randint(0, TREE.drafts) for _ in range(5)]
    drafts = [[rng.randrange(3) for _ in range(count)] for count in counts]
    tokens = [[rng.randrange(3) for _ in range(count + 1)] for count in counts]
    bad = [[rng.random() < 0.1 for _ in range(count + 1)] for count in counts]
    trees = Trees.of(
        TREE, np.array(counts), with_newest(counts, [d for row in drafts for d in row])
    )
    rows, lengths = trees.output(np.concatenate(tokens), np.concatenate(bad))
    paths = [walk(*case) for case in zip(drafts, tokens, bad, strict=True)]
    assert lengths.tolist() == [len(path) for path in paths]
    starts = trees.starts[:-1].tolist()
    assert rows.tolist() == [s + n for s, path in zip(starts, paths, strict=True) for n in path]


def test_a_row_supposes_the_drafts_on_its_path() -> None:
    drafts = [10, 11, 12, 13, 14, 15, 16]
    trees = Trees.of(TREE, np.array([0, 7, 2]), with_newest([0, 7, 2], [*drafts, 20, 21]))
    assert trees.starts.tolist() == [0, 1, 9, 12]
    assert trees.depths().tolist() == [0, 0, 1, 1, 2, 2, 2, 3, 4, 0, 1, 1]
    assert trees.supposed().by_row() == {
        2: [10],
        3: [11],
        4: [10, 12],
        5: [10, 13],
        6: [11, 14],
        7: [10, 13, 15],
        8: [10, 13, 15, 16],
        10: [20],
        11: [21],
    }


def test_paths_are_the_drafts_whose_rows_are_output() -> None:
    # Three requests with 4, 0 and 3 drafts; of the first, nodes 2 and 4 were right.
    first, rows = np.array([0, 5, 6]), np.array([0, 2, 4, 5, 6, 7])
    checked = CheckedDrafts(first, rows, np.array([3, 1, 2]))
    assert checked.newest.tolist() == [4, 5, 7]
    assert checked.paths(4).astype(int).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
