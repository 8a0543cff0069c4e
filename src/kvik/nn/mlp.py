"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.nn.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020); gate and up are one matrix product."""

    __slots__ = ("down", "gate_up", "ops")

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self.ops = ops
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))


class MLP:
    """down(gelu(up(x))), with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    __slots__ = ("down", "ops", "up")

    def __init__(self, ops: Ops, up: Linear, down: Linear) -> None:
        self.ops = ops
        self.up = up
        self.down = down

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.ops.gelu_tanh(self.up(x)))
