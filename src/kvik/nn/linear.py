"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix

# Queries, keys and values: projections of one input, cut into heads.


class Heads:
    """Several projections of x. Neighbours whose weights are stored alike are one matrix; of
    others each keeps its own format."""

    __slots__ = ("head_dim", "heads", "linears")

    def __init__(
        self, linears: Sequence[Linear], heads: Sequence[tuple[int, ...]], head_dim: int
    ) -> None:
        """
        Args:
            heads: of the projections that each of `linears` makes.
        """
        self.linears = linears
        self.heads = heads
        self.head_dim = head_dim

    def __call__(self, x: Tensor) -> list[Tensor]:
        """x [tokens, inputs] -> [tokens, heads, head_dim] of each projection."""
        found: list[Tensor] = []
        for linear, heads in zip(self.linears, self.heads, strict=True):
            together = linear(x).view(-1, sum(heads), self.head_dim)
            found += together.split_with_sizes(heads, 1)
        return found


# Feed-forward blocks.


class GatedMLP:
    """down(silu(gate(x)) * up(x)) + residual (SwiGLU, Shazeer 2020).

    Gate and up are one matrix product, with the activation behind it.
    """

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x), residual)


class MLP:
    """down(gelu(up(x))) + residual, with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    __slots__ = ("down", "up")

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.up(x), residual)


class Linear:
    """y = activation(x W^T + b) + residual."""

    __slots__ = ("matrix", "ops")

    def __init__(self, ops: Ops, matrix: Matrix) -> None:
        self.ops = ops
        self.matrix = matrix

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [tokens, inputs], residual [tokens, outputs] -> [tokens, outputs]."""
        return self.ops.linear(x, self.matrix, residual)
