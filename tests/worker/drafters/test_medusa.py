"""The tokens at the nodes of a tree that heads fill."""

from __future__ import annotations

import numpy as np
import torch

from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows
from kvik.worker.drafters.heads import MedusaDrafter

CPU = torch.device("cpu")
# Children of the root have ranks 0, 1 and 2; the second level is below the first two.
TREE = DraftTree((-1, 0, 0, 1, 2, 0, 1), (0, 0, 1, 0, 0, 2, 1))


def rows(hidden: torch.Tensor, *limits: int) -> DraftRows:
    count = len(limits)
    return DraftRows(np.arange(count), np.array(limits), lambda: hidden)


def heads(hidden: torch.Tensor) -> torch.Tensor:
    """Head k ranks token 10 k + h first, then the tokens after it; h: the first number of a row."""
    likeliest = hidden[:, :1].long() + torch.tensor([0, 10])  # [rows, heads]
    logits = -(torch.arange(30) - likeliest[:, :, None]).abs().float()
    logits[:, :, :1] = -100
    return logits + 0.1 * (torch.arange(30) > likeliest[:, :, None])  # of neighbours, the later one


def test_each_node_has_the_candidate_of_its_depth_and_rank():
    drafter = MedusaDrafter(heads, TREE, CPU)
    found = drafter.propose(rows(torch.tensor([[3.0, 0.0], [7.0, 0.0]]), 6, 6))
    assert found.tree is TREE and found.probs is None
    # rank 0: h, rank 1: h + 1, rank 2: h - 1
    assert found.by_row() == [[3, 4, 13, 13, 2, 14], [7, 8, 17, 17, 6, 18]]


def test_a_row_gets_the_first_nodes():
    found = MedusaDrafter(heads, TREE, CPU).propose(rows(torch.tensor([[3.0], [7.0]]), 2, 4))
    assert found.by_row() == [[3, 4], [7, 8, 17, 17]]
