"""Trees of drafts: their shape, and the most valuable one."""

from __future__ import annotations

import itertools

import pytest

from kvik.worker.draft_tree import MAX_NODES, DraftTree

TREE = DraftTree((-1, 0, 0, 1, 1, 3), (0, 0, 1, 0, 1, 0))


def test_depths_words_and_paths():
    assert TREE.depths.tolist() == [0, 1, 1, 2, 2, 3]
    assert TREE.words.tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b101011]
    assert [TREE.path(node) for node in (0, 2, 5)] == [[0], [0, 2], [0, 1, 3, 5]]
    assert TREE.drafts == 5


def every_tree(accuracies: list[list[float]], drafts: int) -> list[float]:
    """Return the value of each set of nodes that is closed under parents."""
    nodes = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(ranks)) for ranks in accuracies[:depth]))
    ]

    def worth(path: tuple[int, ...]) -> float:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= accuracies[depth][rank]
        return product

    return [
        sum(map(worth, chosen))
        for chosen in itertools.combinations(nodes, drafts)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    ]


@pytest.mark.parametrize(
    "accuracies",
    [[[0.5, 0.2, 0.1], [0.45, 0.3]], [[0.0, 0.1, 0.3], [0.2, 0.4]]],  # also out of order
)
def test_the_best_tree_is_the_best_of_all(accuracies):
    for drafts in range(1, 6):
        tree = DraftTree.best(accuracies, drafts)
        assert tree.drafts == drafts
        assert tree.worth(accuracies) == pytest.approx(max(every_tree(accuracies, drafts)))


def test_nodes_are_in_order_of_value():
    accuracies = [[0.6, 0.2, 0.1, 0.05], [0.5, 0.2, 0.1], [0.4, 0.2], [0.3]]
    worths = [DraftTree.best(accuracies, n).worth(accuracies) for n in range(21)]
    gains = [after - before for before, after in itertools.pairwise(worths)]
    assert gains == pytest.approx(sorted(gains, reverse=True)) and gains[-1] > 0


def test_a_tree_ends_where_no_draft_pays():
    assert DraftTree.best([[0.5, 0.0], [0.5]], 10).parents == (-1, 0, 1)
    assert DraftTree.best([[0.0]], 10).drafts == 0
    assert DraftTree.best([[1.0] * 9] * 9, MAX_NODES - 1).drafts == MAX_NODES - 1
