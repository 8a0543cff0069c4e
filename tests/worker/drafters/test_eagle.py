"""The tokens at the nodes of a tree that is grown level by level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.captured import Again
from torch import Tensor

from kvik.worker.captures import GraphMemory
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.heads import EagleDrafter
from kvik.worker.graphs import CapturedRows, RowFunction, RowGraph
from kvik.worker.request_table import RequestTable

VOCAB = 50
CHAIN = DraftTree((-1, 0, 1, 2, 3), (0,) * 5)
TREES = [
    CHAIN,
    DraftTree((-1, 0, 0, 1, 2, 2, 4), (0, 0, 1, 0, 0, 1, 0)),
    DraftTree((-1, 0, 0, 0, 3, 4, 4, 3), (0, 0, 1, 2, 0, 0, 1, 1)),
    DraftTree.best([[0.5, 0.3, 0.1], [0.5, 0.3], [0.4, 0.2], [0.4]], 14),
]


class Counting:
    """The hidden state is a number that grows with the tokens taken in, and determines the
    likeliest tokens."""

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        return torch.stack((ids, positions), 1).double()

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return (3 * hidden + embedded[:, :1] + 7 * embedded[:, 1:]) % VOCAB

    def logits(self, hidden: Tensor) -> Tensor:
        return -((torch.arange(VOCAB) - hidden) % VOCAB)


def expected(tree: DraftTree, newest: int, position: int, hidden: float) -> list[int]:
    """Compute node by node, each along its own path."""
    network, tokens = Counting(), [newest]
    for node in range(1, len(tree.parents)):
        state = torch.tensor([[hidden]], dtype=torch.float64)
        for depth, before in enumerate(tree.path(node)[:-1]):
            ids, places = torch.tensor([tokens[before]]), torch.tensor([position + depth])
            state = network(network.enter(ids, places), state)
        likely = network.logits(state)[0].topk(tree.ranks[node] + 1).indices
        tokens.append(int(likely[-1]))
    return tokens[1:]


def test_positions_end_at_the_longest_text():
    places: list[int] = []

    class Noting(Counting):
        def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
            places.extend(positions.tolist())
            return super().enter(ids, positions)

    table = RequestTable(1, 8, 1, 4)
    table.num_tokens[0] = 7
    drafter = EagleDrafter(Noting(), Noting(), table, CHAIN, torch.device("cpu"))
    hidden = torch.zeros(1, 1, dtype=torch.float64)
    rows = DraftRows(np.zeros(1, np.int64), np.array([1]), lambda: hidden)
    assert len(drafter.propose(rows).token_ids) == 1
    assert places == [6, 7, 7, 7]


def captured(function: RowFunction) -> CapturedRows:
    like = (torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
    graph = CapturedRows(function, (*like, like[1]), (4,), Again(), lambda: 0.0, GraphMemory(1, 0))
    assert not graph.idle_step()
    return graph


@pytest.mark.parametrize("rows", [RowGraph, captured])
@pytest.mark.parametrize("tree", TREES)
def test_each_node_follows_its_path(tree, rows):
    table = RequestTable(3, 32, 1, 16)
    for slot, tokens in ((0, [5, 9, 11]), (2, [8, 2, 3, 44, 17])):
        table.token_ids[slot, : len(tokens)] = tokens
        table.num_tokens[slot] = len(tokens)
    drafter = EagleDrafter(Counting(), Counting(), table, tree, torch.device("cpu"), rows)
    hidden = torch.tensor([[4.0], [21.0]], dtype=torch.float64)
    limits = np.array([tree.drafts, 3])
    some = DraftRows(np.array([2, 0]), limits, lambda: hidden)
    found = drafter.propose(some)
    assert found.tree is tree
    assert found.by_row() == [expected(tree, 17, 4, 4.0), expected(tree, 11, 2, 21.0)[:3]]
