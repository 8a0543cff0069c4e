"""A tree of drafts from a layer that goes on from the model's hidden states (models/eagle.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.request_table import RequestTable


class EagleNetwork(Protocol):
    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Tokens [rows] at positions [rows], as the model takes them in: [rows, hidden]."""
        ...

    def step(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the next hidden state."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one depth that have children, and these.

    Attributes:
        nodes, parents: [nodes] int64; each parent's index among the nodes of the level before.
        children, owners, ranks: [children] int64, nodes of the tree, the index of each one's parent
            among `nodes`, and which of its candidates it is.
    """

    nodes: np.ndarray
    parents: np.ndarray
    children: np.ndarray
    owners: np.ndarray
    ranks: np.ndarray


class EagleDrafter:
    """Keeps nothing of a request."""

    def __init__(self, network: EagleNetwork, table: RequestTable, tree: DraftTree) -> None:
        self.network = network
        self.table = table
        self.tree = tree
        self._levels = _levels(tree)

    def enter(self, slot: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def propose(self, rows: DraftRows) -> Drafts:
        slots, count = rows.slots, len(rows.slots)
        newest = self.table.num_tokens[slots].astype(np.int64) - 1
        tokens = np.empty((count, len(self.tree.parents)), np.int64)
        tokens[:, 0] = self.table.token_ids[slots, newest]
        last = self.table.token_ids.shape[1] - 1  # nothing stands behind it
        hidden = rows.hidden[:, None]  # [rows, nodes of a level, hidden]
        device = hidden.device
        for depth, level in enumerate(self._levels):
            wide = len(level.nodes)
            ids = torch.from_numpy(tokens[:, level.nodes]).to(device)
            places = np.minimum(newest + depth, last)
            positions = torch.from_numpy(np.repeat(places, wide)).to(device)
            before = hidden[:, torch.from_numpy(level.parents).to(device)]
            after = self.network.step(
                self.network.embed(ids.flatten(), positions), before.flatten(0, 1)
            )
            ranks = int(level.ranks.max()) + 1
            likely = torch.topk(self.network.logits(after), ranks, dim=-1).indices
            found = likely.view(count, wide, ranks).cpu().numpy()
            tokens[:, level.children] = found[:, level.owners, level.ranks]
            hidden = after.view(count, wide, -1)
        limits = rows.limits.tolist()
        drafts = tokens[:, 1:].tolist()
        return Drafts([row[:limit] for row, limit in zip(drafts, limits, strict=True)], self.tree)


def _levels(tree: DraftTree) -> list[_Level]:
    levels: list[_Level] = []
    parents = np.array(tree.parents)
    before = np.zeros(1, np.int64)  # node 0 goes on from the model's own hidden state
    for depth in range(int(tree.depths.max())):
        children = np.flatnonzero(tree.depths == depth + 1)
        nodes = np.unique(parents[children])
        levels.append(
            _Level(
                nodes=nodes,
                parents=np.searchsorted(before, parents[nodes]) if depth else before,
                children=children,
                owners=np.searchsorted(nodes, parents[children]),
                ranks=np.array(tree.ranks)[children],
            )
        )
        before = nodes
    return levels
