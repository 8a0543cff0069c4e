"""Normalisation layers."""

from __future__ import annotations

from torch import Tensor

from kvik.kernels.ops import Ops


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
