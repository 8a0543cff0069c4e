"""Weights packed for the native kernels: tiles of outputs, so that vector lanes are outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from kvik.kernels.cpu.native import DTYPES, Native, pointer
from kvik.kernels.packing import Packing, Parts, check_order
from kvik.kernels.reference.ops import fill_input_scale, fill_order
from kvik.kernels.weights import (
    Activation,
    FloatKind,
    FloatWeight,
    Fp8Activations,
    Fp8Kind,
    Fp8Weight,
    Int4Kind,
    Int4MinKind,
    Int4MinWeight,
    Int4Weight,
    Int8Kind,
    Int8Weight,
    Matrix,
    MatrixSpec,
    OrderedKind,
    OrderedWeight,
    PlainKind,
    PlainWeight,
    Weight,
)

# Weights in tiles (csrc/packed.hpp), in a file. All instruction sets have the same tiles.


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`.

    Raises:
        ValueError: the kernels cannot multiply groups of this size.
    """
    found = {
        name: _meta(size, torch.uint8)
        for name, size in zip(("weight", "scales", "zeros"), packed_sizes(spec), strict=True)
        if size
    }
    if isinstance(spec.kind, OrderedKind):
        found["order"] = _meta(spec.inputs, torch.int32)
    if has_input_scale(spec):
        found["input_scale"] = _meta(1, torch.float32)
    if spec.bias:
        found["bias"] = _meta(spec.rows, torch.float32)
    return found


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    packed = matrix.data
    assert isinstance(packed, CpuPacked)
    all_parts = {
        "weight": packed.weight,
        "scales": packed.scales,
        "zeros": packed.zeros,
        "order": packed.order,
        "input_scale": packed.input_scale,
        "bias": matrix.bias,
    }
    return {name: part for name, part in all_parts.items() if part is not None and part.numel()}


def over(spec: MatrixSpec, parts: Parts) -> Matrix:
    """See `Packing`."""
    order = parts.get("order")
    if order is not None:
        check_order(order)
    none = torch.empty(0, dtype=torch.uint8)
    packed = packed_over(
        spec,
        parts["weight"],
        parts.get("scales", none),
        parts.get("zeros", none),
        order,
        parts.get("input_scale"),
    )
    return Matrix(spec, parts.get("bias"), packed)


def _meta(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


TILES = Packing("tiles-1", layout, parts, over)


ACTIVATIONS: dict[Activation | None, int] = {
    None: 0,
    "silu_and_mul": 1,
    "gelu_tanh": 2,
}  # as arguments.hpp numbers them
FP8_ACTIVATIONS: dict[Fp8Activations, int] = {"float": 0, "token": 1, "group": 2, "static": 3}
TILE = 32  # outputs

F32, BF16, I8, I8_WEIGHT_ONLY, I4, I4_MIN, FP8 = range(7)  # MatrixKind
INPUTS_PER_STEP = (1, 2, 4, 4, 8, 8, 4)  # by kind: what four bytes of an output hold
MAX_GROUP = 32768  # of inputs: integers are summed in 32 bits
MAX_GROUP_WITH_ZEROS = 256  # their sum is multiplied by the zero point in 16 bits


@dataclass(frozen=True, slots=True)
class CpuPacked:
    """Attributes:
    weight, scales, zeros: bytes as `pack_matrix` lays them out; empty where a kind has none.
    order: [inputs] int32; None: as they come.
    input_scale: [1] fp32; None: calibration has found none.
    kind: MatrixKind of arguments.hpp.
    group: inputs that share a scale; 0: all of them.
    fp8_activations: how x is rounded, as arguments.hpp numbers it.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None
    input_scale: Tensor | None
    kind: int
    group: int
    fp8_activations: int


class CpuMatrices:
    """Matrix products by the native kernels."""

    def __init__(self, native: Native) -> None:
        self.native = native

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """See `Ops.matrix`. Its bias is fp32.

        Raises:
            ValueError: the kernels cannot multiply groups of this size.
        """
        values, scales, zeros = packed_sizes(spec)
        take = self.native.weights.take
        ordered = isinstance(spec.kind, OrderedKind)
        order = take(4 * spec.inputs).view(torch.int32) if ordered else None
        input_scale = torch.zeros(1) if has_input_scale(spec) else None
        packed = packed_over(spec, take(values), take(scales), take(zeros), order, input_scale)
        bias = torch.empty(spec.rows, dtype=torch.float32) if spec.bias else None
        return Matrix(spec, bias, packed)

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`.

        Raises:
            ValueError: rows from before have their inputs in another order.
        """
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, CpuPacked)
        if isinstance(weight, OrderedWeight):
            assert packed.order is not None
            fill_order(packed.order, weight.order)
            weight = weight.plain
        if isinstance(weight, Fp8Weight) and weight.input_scale is not None:
            assert packed.input_scale is not None
            fill_input_scale(packed.input_scale, weight.input_scale)
        values, scales, zeros = _arguments(weight)
        self.native.launch(
            "pack_matrix",
            values=values.data_ptr(),
            values_stride=values.stride(0),
            scales=pointer(scales),
            zeros=pointer(zeros),
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
        assert isinstance(packed, CpuPacked)
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
            order=pointer(packed.order),
            activation=ACTIVATIONS[spec.activation],
            bias=pointer(matrix.bias),
            residual=pointer(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            dtype=DTYPES[x.dtype],
            out_dtype=DTYPES[spec.out_dtype],
            fp8_x=packed.fp8_activations,
            x_scale=pointer(packed.input_scale),
        )
        return y

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`."""
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, CpuPacked)
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
            order=pointer(packed.order),
            ids=ids.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            rows=self.native.rows(ids),
            dtype=DTYPES[dtype],
        )
        return out


def packed_over(
    spec: MatrixSpec,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor,
    order: Tensor | None,
    input_scale: Tensor | None,
) -> CpuPacked:
    """Over memory of the sizes that `packed_sizes` says."""
    kind = plain_kind(spec)
    rounding = FP8_ACTIVATIONS[kind.activations] if isinstance(kind, Fp8Kind) else 0
    return CpuPacked(
        weight, scales, zeros, order, input_scale, _number(kind), _group(kind), rounding
    )


def packed_sizes(spec: MatrixSpec) -> tuple[int, int, int]:
    """Bytes of the packed values, scales and zero points (csrc/packed.hpp).

    Raises:
        ValueError: the kernels cannot multiply groups of this size.
    """
    _check_group(plain_kind(spec))
    paired = spec.activation == "silu_and_mul"  # gate and up share tiles
    tiles = ceil_div(spec.rows // 2, TILE // 2) if paired else ceil_div(spec.rows, TILE)
    kind = plain_kind(spec)
    values = tiles * ceil_div(spec.inputs, INPUTS_PER_STEP[_number(kind)]) * TILE * 4
    group, outputs = _group(kind), tiles * TILE
    groups = outputs * ceil_div(spec.inputs, group) if group else 0
    match kind:
        case FloatKind():
            return values, 0, 0
        case Int8Kind():
            return values, 4 * outputs + 2 * groups, 0
        case Fp8Kind():
            return values, 4 * outputs + 4 * groups, 0
        case Int4Kind(_, zeros):
            return values, 4 * outputs + 2 * groups, groups if zeros else 0
        case Int4MinKind():
            return values, 4 * outputs + 2 * groups, 2 * groups
        case _:
            assert_never(kind)


def plain_kind(spec: MatrixSpec) -> PlainKind:
    """The kind of the weight, whatever the order of its inputs."""
    return spec.kind.plain if isinstance(spec.kind, OrderedKind) else spec.kind


def has_input_scale(spec: MatrixSpec) -> bool:
    """Its inputs are rounded by a scale that calibration has found."""
    kind = plain_kind(spec)
    return isinstance(kind, Fp8Kind) and kind.activations == "static"


def _group(kind: PlainKind) -> int:
    return 0 if isinstance(kind, FloatKind) else kind.group


def _check_group(kind: PlainKind) -> None:
    group, step = _group(kind), INPUTS_PER_STEP[_number(kind)]
    least = step if isinstance(kind, Int4Kind | Int4MinKind) else 0
    if group < least or group % step:
        raise ValueError(f"weights in groups of {group}: must be a multiple of {step}")
    most = MAX_GROUP_WITH_ZEROS if isinstance(kind, Int4Kind) and kind.zeros else MAX_GROUP
    if group > most:
        raise ValueError(f"weights in groups of {group}: at most {most} of this kind")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _number(kind: PlainKind) -> int:
    """As arguments.hpp numbers them."""
    match kind:
        case FloatKind(dtype):
            return BF16 if dtype == torch.bfloat16 else F32
        case Int8Kind(quantize_activations):
            return I8 if quantize_activations else I8_WEIGHT_ONLY
        case Int4Kind():
            return I4
        case Int4MinKind():
            return I4_MIN
        case Fp8Kind():
            return FP8
        case _:
            assert_never(kind)


def _arguments(weight: PlainWeight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, scales, and zero points or minima as `pack_matrix` takes them."""
    match weight:
        case FloatWeight(values):
            known = values if values.dtype in DTYPES else values.float()
            return known.contiguous(), None, None
        case Int8Weight(values, scales) | Fp8Weight(values, scales):
            return values.contiguous(), scales.float().contiguous(), None
        case Int4Weight(values, scales, zeros):
            points = None if zeros is None else zeros.contiguous()
            return values.contiguous(), scales.float().contiguous(), points
        case Int4MinWeight(values, scales, minima):
            return values.contiguous(), scales.float().contiguous(), minima.float().contiguous()
        case _:
            assert_never(weight)
