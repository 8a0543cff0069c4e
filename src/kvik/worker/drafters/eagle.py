"""Drafts in a tree, by a layer that continues the model's hidden states (after EAGLE; Li et al.
2024, arXiv 2401.15077; `models/draft_heads.py`).

The layer makes a hidden state of a node from that of its parent and from the node's token; the
model's head makes the candidates for its children from it. So a tree takes a forward of the layer
for each level, and none of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.upload import upload
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.graphs import RowFunction, RowGraph
from kvik.worker.request_table import RequestTable

if TYPE_CHECKING:
    from kvik.worker.drafters.heads import HeadTarget


@dataclass(frozen=True, slots=True)
class _Level:
    """Nodes of one depth that have children, and their children."""

    # nodes, parents: [nodes] int64; each parent's index among the nodes of the level before.
    nodes: Tensor
    parents: Tensor
    # children, owners, ranks: [children] int64: nodes of the tree, each one's parent as an index
    # into `nodes`, and its rank among the parent's candidates.
    children: Tensor
    owners: Tensor
    ranks: Tensor
    candidates: int  # number per node: the largest rank + 1


class EagleDrafter(Drafter):
    """Drafts with an EAGLE layer. Stores no state for a request."""

    def __init__(
        self,
        layer: Callable[[Tensor, Tensor], Tensor],
        model: HeadTarget,
        table: RequestTable,
        tree: DraftTree,
        device: torch.device,
        rows: Callable[[RowFunction], RowGraph] = RowGraph,
    ) -> None:
        """
        Args:
            layer: inputs and hidden states, [rows, hidden] each -> the next hidden states.
            model: the model, whose embedding and head are used with the layer.
            device: of the hidden states.
            rows: makes the graph that runs `_grow`.
        """
        self.layer = layer
        self.model = model
        self.table = table
        self.tree = tree
        self._levels = _levels(tree, device)
        self._rows = rows(self._grow)

    def propose(self, rows: DraftRows) -> Drafts:
        slots = rows.slots
        newest = self.table.num_tokens[slots].astype(np.int64) - 1
        tokens = self.table.token_ids[slots, newest].astype(np.int64)
        hidden = rows.hidden()
        inputs = (upload(array, hidden.device) for array in (tokens, newest))
        drafts = self._rows.run(hidden, *inputs).cpu()  # [rows, drafts]
        return Drafts.first(rows.limits, drafts.numpy(), self.tree)

    def _grow(self, hidden: Tensor, newest: Tensor, places: Tensor) -> Tensor:
        """Grow the trees level by level.

        Args:
            hidden: [rows, hidden], at the token before the newest. newest, places: [rows] int64,
                the newest tokens and their positions.

        Returns:
            [rows, drafts] int64.
        """
        count = len(newest)
        tokens = newest.new_zeros(count, len(self.tree.parents))
        tokens[:, 0] = newest
        last = self.table.token_ids.shape[1] - 1  # the last position
        hidden = hidden[:, None]  # [rows, nodes of a level, hidden]
        for depth, level in enumerate(self._levels):
            wide = len(level.nodes)
            ids = tokens.index_select(1, level.nodes)
            positions = (places + depth).clamp(max=last)[:, None].expand(count, wide)
            before = hidden.index_select(1, level.parents)
            inputs = self.model.enter(ids.flatten(), positions.flatten())
            after = self.layer(inputs, before.flatten(0, 1))
            likely = torch.topk(self.model.logits(after), level.candidates, dim=-1).indices
            candidates = likely.view(count, wide, level.candidates)
            tokens.index_copy_(1, level.children, candidates[:, level.owners, level.ranks])
            hidden = after.view(count, wide, -1)
        return tokens[:, 1:]


def _levels(tree: DraftTree, device: torch.device) -> list[_Level]:
    levels: list[_Level] = []
    parents, ranks = np.array(tree.parents), np.array(tree.ranks, np.int64)
    before = np.zeros(1, np.int64)  # node 0 continues the model's own hidden state
    for depth in range(int(tree.depths.max())):
        children = np.flatnonzero(tree.depths == depth + 1)
        nodes = np.unique(parents[children])
        above = np.searchsorted(before, parents[nodes]) if depth else before
        levels.append(
            _Level(
                nodes=upload(nodes, device),
                parents=upload(above, device),
                children=upload(children, device),
                owners=upload(np.searchsorted(nodes, parents[children]), device),
                ranks=upload(ranks[children], device),
                candidates=int(ranks[children].max()) + 1,
            )
        )
        before = nodes
    return levels
