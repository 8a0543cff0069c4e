"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor

from kvik.nn.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)) + residual (SwiGLU, Shazeer 2020).

    Gate and up are one matrix product, with the activation behind it.
    """

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x), residual)


class MLP:
    """down(gelu(up(x))) + residual, with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    __slots__ = ("down", "up")

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.up(x), residual)
