"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix

# Embeddings at the bottom of a model.


class Embedding:
    """A table of vectors: of tokens, or of positions."""

    __slots__ = ("ops", "table")

    def __init__(self, ops: Ops, table: Tensor) -> None:
        self.ops = ops
        self.table = table  # [rows, hidden]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        rows, width = self.table.shape
        return rows, width

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        return self.ops.gather_rows(self.table, ids)

    def add(self, ids: Tensor, x: Tensor) -> Tensor:
        """x [tokens, hidden] and the vectors of ids [tokens] -> their sum."""
        return self.ops.add(x, self(ids))


class MatrixEmbedding:
    """Vectors of tokens that are rows of a matrix: because it is the head's too (Press and Wolf
    2017), or because it is stored in a format that kernels unpack."""

    __slots__ = ("dtype", "matrix", "ops", "tied")

    def __init__(self, ops: Ops, matrix: Matrix, dtype: torch.dtype, tied: bool) -> None:
        self.ops = ops
        self.matrix = matrix
        self.dtype = dtype  # of the vectors
        self.tied = tied  # the matrix is the head's

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width."""
        return self.matrix.spec.rows, self.matrix.spec.inputs

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [tokens] -> [tokens, hidden]."""
        return self.ops.matrix_rows(self.matrix, ids, self.dtype)


class RMSNorm:
    """x / rms(x) * weight (Zhang and Sennrich 2019), over the last axis."""

    __slots__ = ("eps", "ops", "weight")

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        self.ops = ops
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, dim] -> residual + norm(x)."""
        return self.ops.add(residual, self(x))


class LayerNorm:
    """(x - mean) / std * weight + bias (Ba et al. 2016), over the last axis."""

    __slots__ = ("bias", "eps", "ops", "weight")

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.ops = ops
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., dim] -> [..., dim]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, dim] -> residual + norm(x)."""
        return self.ops.add(residual, self(x))
