"""Embeddings at the bottom of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.nn.linear import Linear


class Embedding:
    """A table of vectors: of tokens, or of positions."""

    __slots__ = ("ops", "table")

    def __init__(self, ops: Ops, table: Tensor) -> None:
        self.ops = ops
        self.table = table  # [rows, hidden]

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        return self.ops.gather_rows(self.table, ids)

    def add(self, ids: Tensor, x: Tensor) -> Tensor:
        """x [tokens, hidden] and the vectors of ids [tokens] -> their sum."""
        return self.ops.add(x, self(ids))


class TiedEmbedding:
    """Vectors of tokens that are also the rows of the head (Press and Wolf 2017): one matrix."""

    __slots__ = ("dtype", "head")

    def __init__(self, head: Linear, dtype: torch.dtype) -> None:
        self.head = head
        self.dtype = dtype  # of the vectors

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        return self.head.ops.matrix_rows(self.head.matrix, ids, self.dtype)
