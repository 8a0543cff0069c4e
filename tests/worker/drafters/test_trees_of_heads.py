"""The tokens at the nodes of a tree: of Medusa, whose heads fill it at once, and of EAGLE, which
grows it level by level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.captured import Again
from torch import Tensor

from kvik.worker.captures import GraphMemory
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.heads import EagleDrafter, MedusaDrafter
from kvik.worker.graphs import CapturedRows, RowFunction, RowGraph
from kvik.worker.request_table import RequestTable

CPU = torch.device("cpu")


def rows_of(hidden: Tensor, *limits: int) -> DraftRows:
    return DraftRows(np.arange(len(limits)), np.array(limits), lambda: hidden)


# Children of the root have ranks 0, 1 and 2; the second level is below the first two.
FILLED = DraftTree((-1, 0, 0, 1, 2, 0, 1), (0, 0, 1, 0, 0, 2, 1))


def medusa_heads(hidden: Tensor) -> Tensor:
    """Head k ranks token 10 k + h first, then the tokens after it; h: the first number of a row."""
    likeliest = hidden[:, :1].long() + torch.tensor([0, 10])  # [rows, heads]
    logits = -(torch.arange(30) - likeliest[:, :, None]).abs().float()
    logits[:, :, :1] = -100
    return logits + 0.1 * (torch.arange(30) > likeliest[:, :, None])  # of neighbours, the later one


def test_each_node_has_the_candidate_of_its_depth_and_rank():
    drafter = MedusaDrafter(medusa_heads, FILLED, CPU)
    found = drafter.propose(rows_of(torch.tensor([[3.0, 0.0], [7.0, 0.0]]), 6, 6))
    assert found.tree is FILLED and found.probs is None
    # rank 0: h, rank 1: h + 1, rank 2: h - 1
    assert found.by_row() == [[3, 4, 13, 13, 2, 14], [7, 8, 17, 17, 6, 18]]
    found = drafter.propose(rows_of(torch.tensor([[3.0], [7.0]]), 2, 4))
    assert found.by_row() == [[3, 4], [7, 8, 17, 17]]


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
    drafter = EagleDrafter(Noting(), Noting(), table, CHAIN, CPU)
    rows = rows_of(torch.zeros(1, 1, dtype=torch.float64), 1)
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
    drafter = EagleDrafter(Counting(), Counting(), table, tree, CPU, rows)
    hidden = torch.tensor([[4.0], [21.0]], dtype=torch.float64)
    limits = np.array([tree.drafts, 3])
    some = DraftRows(np.array([2, 0]), limits, lambda: hidden)
    found = drafter.propose(some)
    assert found.tree is tree
    assert found.by_row() == [expected(tree, 17, 4, 4.0), expected(tree, 11, 2, 21.0)[:3]]
