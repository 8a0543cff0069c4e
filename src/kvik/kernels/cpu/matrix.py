"""Weights packed for the native kernels: tiles of outputs, so that vector lanes are outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from kvik.kernels.cpu.native import DTYPES, Native
from kvik.kernels.weights import (
    Activation,
    FloatWeight,
    Int4Weight,
    Int8Weight,
    Matrix,
    Weight,
    output_width,
)

ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    "silu_and_mul": 1,
    "gelu_tanh": 2,
}  # as arguments.hpp numbers them
TILE = 32  # outputs

F32, BF16, I8, I8_WEIGHT_ONLY, I4 = range(5)  # MatrixKind
INPUTS_PER_STEP = (1, 2, 4, 4, 8)  # by kind: what four bytes of an output hold


@dataclass(frozen=True, slots=True)
class Packed:
    """Attributes:
    weight, scales, zeros: bytes as `pack_matrix` lays them out; empty where a kind has none.
    kind: MatrixKind of arguments.hpp.
    outputs: rows of the weight, before an activation joins them.
    group: inputs that share a scale.
    bias: [outputs] fp32, or None.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    kind: int
    outputs: int
    group: int
    bias: Tensor | None


class Matrices:
    """Matrix products by the native kernels."""

    def __init__(self, native: Native) -> None:
        self.native = native

    def pack(
        self,
        weight: Weight,
        bias: Tensor | None,
        activation: Activation | None,
        out_dtype: torch.dtype,
    ) -> Matrix:
        """See `Ops.pack`."""
        paired = activation == "silu_and_mul"
        values, scales, zeros = packed_sizes(weight, paired=paired)
        packed = Packed(
            self.native.weights.take(values),
            self.native.weights.take(scales),
            self.native.weights.take(zeros),
            _kind(weight),
            weight.outputs,
            _group(weight),
            None if bias is None else bias.float().contiguous(),
        )
        self._fill(packed, weight, paired=paired)
        width = output_width(weight, activation)
        return Matrix(weight.inputs, width, activation, bias, out_dtype, packed)

    def _fill(self, packed: Packed, weight: Weight, *, paired: bool) -> None:
        values = weight.values.contiguous()
        scales, zeros = _scales_and_zeros(weight)
        self.native.launch(
            "pack_matrix",
            values=values.data_ptr(),
            values_stride=values.stride(0),
            scales=_pointer(scales),
            zeros=_pointer(zeros),
            first=0,
            count=weight.outputs,
            kind=packed.kind,
            inputs=weight.inputs,
            outputs=weight.outputs,
            group=packed.group,
            paired=int(paired),
            value_dtype=DTYPES.get(values.dtype, 0),
            weight=packed.weight.data_ptr(),
            packed_scales=packed.scales.data_ptr(),
            packed_zeros=packed.zeros.data_ptr() if zeros is not None else 0,
        )

    def linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        """See `Ops.linear`."""
        packed = matrix.data
        assert isinstance(packed, Packed)
        y = self.native.empty(x.shape[0], matrix.outputs, dtype=matrix.out_dtype)
        self.native.launch(
            "linear",
            x=x.data_ptr(),
            x_stride=x.stride(0),
            rows=self.native.rows(x),
            weight=packed.weight.data_ptr(),
            scales=packed.scales.data_ptr(),
            zeros=packed.zeros.data_ptr() if packed.zeros.numel() else 0,
            kind=packed.kind,
            inputs=matrix.inputs,
            outputs=packed.outputs,
            group=packed.group,
            activation=ACTIVATIONS[matrix.activation],
            bias=_pointer(packed.bias),
            residual=_pointer(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            dtype=DTYPES[x.dtype],
            out_dtype=DTYPES[matrix.out_dtype],
        )
        return y

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`."""
        packed = matrix.data
        assert isinstance(packed, Packed)
        out = self.native.empty(ids.shape[0], matrix.inputs, dtype=dtype)
        self.native.launch(
            "matrix_rows",
            weight=packed.weight.data_ptr(),
            scales=packed.scales.data_ptr(),
            zeros=packed.zeros.data_ptr() if packed.zeros.numel() else 0,
            kind=packed.kind,
            inputs=matrix.inputs,
            outputs=packed.outputs,
            group=packed.group,
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=self.native.rows(ids),
            dtype=DTYPES[dtype],
        )
        return out


def packed_sizes(weight: Weight, *, paired: bool) -> tuple[int, int, int]:
    """Bytes of the packed values, scales and zero points (csrc/packed.hpp).

    Args:
        paired: gate and up share tiles.
    """
    outputs, inputs = weight.outputs, weight.inputs
    tiles = ceil_div(outputs // 2, TILE // 2) if paired else ceil_div(outputs, TILE)
    values = tiles * ceil_div(inputs, INPUTS_PER_STEP[_kind(weight)]) * TILE * 4
    match weight:
        case FloatWeight():
            return values, 0, 0
        case Int8Weight():
            return values, tiles * TILE * 4, 0
        case Int4Weight():
            groups = tiles * TILE * ceil_div(inputs, weight.group)
            return values, 2 * groups, 0 if weight.zeros is None else groups
        case _:
            assert_never(weight)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _kind(weight: Weight) -> int:
    match weight:
        case FloatWeight():
            return BF16 if weight.values.dtype == torch.bfloat16 else F32
        case Int8Weight():
            return I8 if weight.quantize_activations else I8_WEIGHT_ONLY
        case Int4Weight():
            return I4
        case _:
            assert_never(weight)


def _group(weight: Weight) -> int:
    """Inputs that share a scale."""
    return weight.group if isinstance(weight, Int4Weight) else weight.inputs


def _scales_and_zeros(weight: Weight) -> tuple[Tensor | None, Tensor | None]:
    match weight:
        case FloatWeight():
            return None, None
        case Int8Weight():
            return weight.scales.float().contiguous(), None
        case Int4Weight():
            zeros = None if weight.zeros is None else weight.zeros.contiguous()
            return weight.scales.float().contiguous(), zeros
        case _:
            assert_never(weight)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
