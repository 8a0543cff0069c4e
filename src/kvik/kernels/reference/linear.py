"""Matrix products and what follows them, computed in fp32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.reference.activation import gelu_tanh, silu_and_mul
from kvik.kernels.rounding import round_tokens
from kvik.kernels.weights import (
    Activation,
    FloatWeight,
    Int4Weight,
    Int8Weight,
    Matrix,
    Weight,
    output_width,
)


def pack(
    weight: Weight, bias: Tensor | None, activation: Activation | None, out_dtype: torch.dtype
) -> Matrix:
    """The weight stays as it is."""
    width = output_width(weight, activation)
    return Matrix(weight.inputs, width, activation, bias, out_dtype, weight)


def linear(x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
    """activation(x W^T + bias) + residual.

    Args:
        x: [tokens, inputs]. residual: [tokens, outputs].
    """
    weight = _weight(matrix)
    rounds = isinstance(weight, Int8Weight) and weight.quantize_activations
    wide = round_tokens(x) if rounds else x.float()
    y = wide @ weight.dequantized().t()
    if matrix.bias is not None:
        y = y + matrix.bias.float()
    if matrix.activation == "silu_and_mul":
        y = silu_and_mul(y)
    elif matrix.activation == "gelu_tanh":
        y = gelu_tanh(y)
    if residual is not None:
        y = y + residual.float()
    return y.to(matrix.out_dtype)


def matrix_rows(matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight: ids [n] -> [n, inputs]."""
    return _weight(matrix).rows(ids).dequantized().to(dtype)


def _weight(matrix: Matrix) -> Weight:
    assert isinstance(matrix.data, FloatWeight | Int8Weight | Int4Weight)
    return matrix.data
