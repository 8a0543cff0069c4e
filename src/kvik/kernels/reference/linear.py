"""Matrix products and what follows them, computed in fp32 and rounded once."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from kvik.kernels.reference.activation import gelu_tanh, silu_and_mul
from kvik.kernels.rounding import round_tokens
from kvik.kernels.weights import (
    FloatKind,
    FloatWeight,
    Int4Kind,
    Int4Weight,
    Int8Kind,
    Int8Weight,
    Matrix,
    MatrixSpec,
    Weight,
)


def matrix(spec: MatrixSpec) -> Matrix:
    """The weight stays as it is: the data is a `Weight`."""
    bias = None
    if spec.bias:
        dtype = spec.kind.dtype if isinstance(spec.kind, FloatKind) else torch.float32
        bias = torch.empty(spec.rows, dtype=dtype, device=spec.device)
    return Matrix(spec, bias, _unfilled(spec))


def pack_rows(matrix: Matrix, first: int, weight: Weight) -> None:
    """Copy rows first.. of the weight."""
    match stored_weight(matrix).rows(slice(first, first + weight.outputs)), weight:
        case FloatWeight() as rows, FloatWeight():
            rows.values.copy_(weight.values)
        case Int8Weight() as rows, Int8Weight():
            rows.values.copy_(weight.values)
            rows.scales.copy_(weight.scales)
        case Int4Weight() as rows, Int4Weight():
            rows.values.copy_(weight.values)
            rows.scales.copy_(weight.scales)
            if rows.zeros is not None and weight.zeros is not None:
                rows.zeros.copy_(weight.zeros)


def linear(x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
    """activation(x W^T + bias) + residual.

    Args:
        x: [tokens, inputs]. residual: [tokens, outputs].
    """
    spec, weight = matrix.spec, stored_weight(matrix)
    rounds = isinstance(weight, Int8Weight) and weight.quantize_activations
    wide = round_tokens(x) if rounds else x.float()
    y = wide @ weight.dequantized().t()
    if matrix.bias is not None:
        y = y + matrix.bias.float()
    if spec.activation == "silu_and_mul":
        y = silu_and_mul(y)
    elif spec.activation == "gelu_tanh":
        y = gelu_tanh(y)
    if residual is not None:
        y = y + residual.float()
    return y.to(spec.out_dtype)


def matrix_rows(matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the weight: ids [n] -> [n, inputs]."""
    return stored_weight(matrix).rows(ids).dequantized().to(dtype)


def stored_weight(matrix: Matrix) -> Weight:
    """What `matrix` made."""
    assert isinstance(matrix.data, FloatWeight | Int8Weight | Int4Weight)
    return matrix.data


def _unfilled(spec: MatrixSpec) -> Weight:
    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=spec.device)

    rows, inputs = spec.rows, spec.inputs
    match spec.kind:
        case FloatKind(dtype):
            return FloatWeight(empty(rows, inputs, dtype=dtype))
        case Int8Kind(quantize_activations):
            values, scales = (
                empty(rows, inputs, dtype=torch.int8),
                empty(rows, dtype=torch.float32),
            )
            return Int8Weight(values, scales, quantize_activations)
        case Int4Kind(group, has_zeros):
            values = empty(rows, inputs // 2, dtype=torch.uint8)
            scales = empty(rows, inputs // group, dtype=torch.float32)
            zeros = empty(rows, inputs // group, dtype=torch.uint8) if has_zeros else None
            return Int4Weight(values, scales, zeros, group)
        case _:
            assert_never(spec.kind)
