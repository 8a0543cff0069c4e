"""A tree of drafts from heads that read the model's last hidden state (models/medusa.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvik.kernels.upload import upload
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.row_graphs import EagerRows, RowFunction, RowGraph


class MedusaDrafter:
    """Keeps nothing of a request."""

    def __init__(
        self,
        heads: Callable[[Tensor], Tensor],
        tree: DraftTree,
        rows: Callable[[RowFunction], RowGraph] = EagerRows,
    ) -> None:
        """
        Args:
            heads: hidden [rows, hidden] -> logits [rows, depths, vocab] of the tokens behind the
                next one.
            rows: how they run.
        """
        self.heads = heads
        self.tree = tree
        self._depth = torch.from_numpy(tree.depths[1:] - 1)  # [drafts]
        self._rank = torch.tensor(tree.ranks[1:], dtype=torch.int64)
        self._rows = rows(self._guess)

    def enter(self, slot: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def propose(self, rows: DraftRows) -> Drafts:
        tokens = self._rows.run(rows.hidden()).cpu()  # [rows, drafts]
        return Drafts.first(rows.limits, tokens.numpy(), self.tree)

    def _guess(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> the tokens of the tree [rows, drafts]."""
        if self._depth.device != hidden.device:
            self._depth, self._rank = (
                upload(tensor.numpy(), hidden.device) for tensor in (self._depth, self._rank)
            )
        ranks = max(self.tree.ranks) + 1
        likely = torch.topk(self.heads(hidden), ranks, dim=-1).indices  # [rows, depths, ranks]
        return likely[:, self._depth, self._rank]
