"""A tree of drafts from heads that read the model's last hidden state (models/medusa.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows, Drafts


class MedusaDrafter:
    """Keeps nothing of a request."""

    def __init__(self, heads: Callable[[Tensor], Tensor], tree: DraftTree) -> None:
        """
        Args:
            heads: hidden [rows, hidden] -> logits [rows, depths, vocab] of the tokens behind the
                next one.
        """
        self.heads = heads
        self.tree = tree
        self._depth = tree.depths[1:] - 1  # [drafts]
        self._rank = np.array(tree.ranks[1:], np.int64)

    def enter(self, slot: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        pass

    def propose(self, rows: DraftRows) -> Drafts:
        logits = self.heads(rows.hidden)
        ranks = int(self._rank.max()) + 1
        likely = torch.topk(logits, ranks, dim=-1).indices.cpu().numpy()  # [rows, depths, ranks]
        tokens = likely[:, self._depth, self._rank]  # [rows, drafts]
        limits = rows.limits.tolist()
        return Drafts(
            [row[:limit] for row, limit in zip(tokens.tolist(), limits, strict=True)], self.tree
        )
