"""A linear layer is the product of its matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import FloatWeight
from kvik.nn.layers import Linear
from kvik_bench.kernel_cases import filled_matrix


@pytest.mark.parametrize("ops", [REFERENCE, TORCH], ids=["reference", "torch"])
def test_product_activation_and_residual(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x, residual = (
        torch.randn(shape, generator=generator) for shape in ((8, 6), (8,), (5, 6), (5, 4))
    )
    matrix = filled_matrix(ops, FloatWeight(weight), bias, "silu_and_mul", torch.float32)
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    layer = Linear(ops, matrix)
    torch.testing.assert_close(layer(x), F.silu(gate) * up)
    torch.testing.assert_close(layer(x, residual), F.silu(gate) * up + residual)
