"""Linear layers."""

from __future__ import annotations

from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix


class Linear:
    """y = activation(x W^T + b) + residual."""

    __slots__ = ("matrix", "ops")

    def __init__(self, ops: Ops, matrix: Matrix) -> None:
        self.ops = ops
        self.matrix = matrix

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [tokens, inputs], residual [tokens, outputs] -> [tokens, outputs]."""
        return self.ops.linear(x, self.matrix, residual)
