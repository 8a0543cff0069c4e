"""Weights packed for the native kernels: tiles of outputs, so that vector lanes are outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from kvik.kernels.cpu.native import DTYPES, Native
from kvik.kernels.weights import (
    Activation,
    FloatKind,
    FloatWeight,
    Int4Kind,
    Int4Weight,
    Int8Kind,
    Int8Weight,
    Matrix,
    MatrixSpec,
    Weight,
    WeightKind,
)

ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    "silu_and_mul": 1,
    "gelu_tanh": 2,
}  # as arguments.hpp numbers them
TILE = 32  # outputs

F32, BF16, I8, I8_WEIGHT_ONLY, I4 = range(5)  # MatrixKind
INPUTS_PER_STEP = (1, 2, 4, 4, 8)  # by kind: what four bytes of an output hold
MAX_GROUP_WITH_ZEROS = 256  # of inputs: their sum is multiplied by the zero point in 16 bits


@dataclass(frozen=True, slots=True)
class Packed:
    """Attributes:
    weight, scales, zeros: bytes as `pack_matrix` lays them out; empty where a kind has none.
    kind: MatrixKind of arguments.hpp.
    group: inputs that share a scale.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    kind: int
    group: int


class Matrices:
    """Matrix products by the native kernels."""

    def __init__(self, native: Native) -> None:
        self.native = native

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """See `Ops.matrix`. Its bias is fp32.

        Raises:
            ValueError: the kernels cannot multiply groups of this size.
        """
        if isinstance(spec.kind, Int4Kind):
            _check_group(spec.kind)
        values, scales, zeros = packed_sizes(spec)
        take = self.native.weights.take
        group = spec.kind.group if isinstance(spec.kind, Int4Kind) else spec.inputs
        packed = Packed(take(values), take(scales), take(zeros), _number(spec.kind), group)
        bias = torch.empty(spec.rows, dtype=torch.float32) if spec.bias else None
        return Matrix(spec, bias, packed)

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`."""
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, Packed)
        values, scales, zeros = _arguments(weight)
        self.native.launch(
            "pack_matrix",
            values=values.data_ptr(),
            values_stride=values.stride(0),
            scales=_pointer(scales),
            zeros=_pointer(zeros),
            first=first,
            count=weight.outputs,
            kind=packed.kind,
            inputs=spec.inputs,
            outputs=spec.rows,
            group=packed.group,
            paired=int(spec.activation == "silu_and_mul"),
            value_dtype=DTYPES.get(values.dtype, 0),
            weight=packed.weight.data_ptr(),
            packed_scales=packed.scales.data_ptr(),
            packed_zeros=packed.zeros.data_ptr() if zeros is not None else 0,
        )

    def linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        """See `Ops.linear`."""
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, Packed)
        y = self.native.empty(x.shape[0], spec.outputs, dtype=spec.out_dtype)
        self.native.launch(
            "linear",
            x=x.data_ptr(),
            x_stride=x.stride(0),
            rows=self.native.rows(x),
            weight=packed.weight.data_ptr(),
            scales=packed.scales.data_ptr(),
            zeros=packed.zeros.data_ptr() if packed.zeros.numel() else 0,
            kind=packed.kind,
            inputs=spec.inputs,
            outputs=spec.rows,
            group=packed.group,
            activation=ACTIVATIONS[spec.activation],
            bias=_pointer(matrix.bias),
            residual=_pointer(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            dtype=DTYPES[x.dtype],
            out_dtype=DTYPES[spec.out_dtype],
        )
        return y

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`."""
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, Packed)
        out = self.native.empty(ids.shape[0], spec.inputs, dtype=dtype)
        self.native.launch(
            "matrix_rows",
            weight=packed.weight.data_ptr(),
            scales=packed.scales.data_ptr(),
            zeros=packed.zeros.data_ptr() if packed.zeros.numel() else 0,
            kind=packed.kind,
            inputs=spec.inputs,
            outputs=spec.rows,
            group=packed.group,
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=self.native.rows(ids),
            dtype=DTYPES[dtype],
        )
        return out


def packed_sizes(spec: MatrixSpec) -> tuple[int, int, int]:
    """Bytes of the packed values, scales and zero points (csrc/packed.hpp)."""
    paired = spec.activation == "silu_and_mul"  # gate and up share tiles
    tiles = ceil_div(spec.rows // 2, TILE // 2) if paired else ceil_div(spec.rows, TILE)
    values = tiles * ceil_div(spec.inputs, INPUTS_PER_STEP[_number(spec.kind)]) * TILE * 4
    match spec.kind:
        case FloatKind():
            return values, 0, 0
        case Int8Kind():
            return values, tiles * TILE * 4, 0
        case Int4Kind(group, zeros):
            groups = tiles * TILE * ceil_div(spec.inputs, group)
            return values, 2 * groups, groups if zeros else 0
        case _:
            assert_never(spec.kind)


def _check_group(kind: Int4Kind) -> None:
    step = INPUTS_PER_STEP[I4]
    if kind.group <= 0 or kind.group % step:
        raise ValueError(f"four bits in groups of {kind.group}: must be a multiple of {step}")
    if kind.zeros and kind.group > MAX_GROUP_WITH_ZEROS:
        raise ValueError(
            f"four bits in groups of {kind.group}: at most {MAX_GROUP_WITH_ZEROS} with zero points"
        )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _number(kind: WeightKind) -> int:
    """As arguments.hpp numbers them."""
    match kind:
        case FloatKind(dtype):
            return BF16 if dtype == torch.bfloat16 else F32
        case Int8Kind(quantize_activations):
            return I8 if quantize_activations else I8_WEIGHT_ONLY
        case Int4Kind():
            return I4
        case _:
            assert_never(kind)


def _arguments(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, scales and zero points as `pack_matrix` takes them."""
    match weight:
        case FloatWeight(values):
            known = values if values.dtype in DTYPES else values.float()
            return known.contiguous(), None, None
        case Int8Weight(values, scales):
            return values.contiguous(), scales.float().contiguous(), None
        case Int4Weight(values, scales, zeros):
            points = None if zeros is None else zeros.contiguous()
            return values.contiguous(), scales.float().contiguous(), points
        case _:
            assert_never(weight)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
