"""Embeddings at the bottom of a model and the head that turns hidden states into logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvik.nn.linear import Linear


class Embedding:
    """A table of vectors: of tokens, or of positions."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [rows, hidden]

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        return F.embedding(ids, self.weight)


class TiedHead:
    """Logits by the token embedding itself (Press and Wolf 2017)."""

    __slots__ = ("embedding",)

    def __init__(self, embedding: Embedding) -> None:
        self.embedding = embedding

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab]."""
        return F.linear(hidden, self.embedding.weight)


LMHead = TiedHead | Linear
