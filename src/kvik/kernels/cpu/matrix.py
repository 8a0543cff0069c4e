"""Weights packed for the native kernels: tiles of outputs, so that vector lanes are outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.cpu.native import DTYPES, Argument, Native
from kvik.kernels.packing import Packing, Parts, check_order
from kvik.kernels.reference.ops import fill_shared
from kvik.kernels.weights import (
    ACTIVATIONS,
    UNITS,
    Matrix,
    MatrixSpec,
    Weight,
    in_nibbles,
    scale_dtype,
)
from kvik.spec.weight_kind import Rounding, WeightKind

# Weights in tiles (csrc/packed.hpp), in a file. Tiles are the same for all instruction sets.


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`.

    Raises:
        ValueError: the kernels cannot multiply groups of this size.
    """
    parts = {
        name: _meta(size, torch.uint8)
        for name, size in zip(("weight", "scales", "zeros"), packed_sizes(spec), strict=True)
        if size
    }
    if spec.kind.ordered:
        parts["order"] = _meta(spec.inputs, torch.int32)
    if spec.kind.activations == "static":
        parts["input_scale"] = _meta(1, torch.float32)
    if spec.bias:
        parts["bias"] = _meta(spec.rows, torch.float32)
    return parts


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    packed = matrix.data
    assert isinstance(packed, CpuPacked)
    names = ("weight", "scales", "zeros", "order", "input_scale")
    tensors = {name: getattr(packed, name) for name in names} | {"bias": matrix.bias}
    return {name: part for name, part in tensors.items() if part is not None and part.numel()}


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


FP8_ACTIVATIONS: dict[Rounding, int] = {"float": 0, "token": 1, "group": 2, "static": 3}
TILE = 32  # outputs

# MatrixKind
F32, BF16, I8, I8_WEIGHT_ONLY, I4, I4_MIN, FP8, MXFP4, IQ4, FP4, NF4, BNB_FP4 = range(12)
OTHER_KINDS: Mapping[str, int] = {
    **{"bfloat16": BF16, "fp8": FP8, "mxfp4": MXFP4, "iq4": IQ4},
    **{"nvfp4": FP4, "nf4": NF4, "bnb_fp4": BNB_FP4},
}
# By kind: inputs in four bytes of an output.
INPUTS_PER_STEP = (1, 2, 4, 4, 8, 8, 4, 8, 8, 8, 8, 8)
MAX_GROUP = 65536  # of inputs: integers are summed in 32 bits, over all inputs without groups
MAX_GROUP_WITH_ZEROS = 256  # their sum is multiplied by the zero point in 16 bits


@dataclass(frozen=True, slots=True)
class CpuPacked:
    """A weight packed for the native kernels."""

    # weight, scales, zeros: bytes in the layout of `pack_matrix`; empty if a kind has none.
    weight: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None  # [inputs] int32; None: unchanged
    input_scale: Tensor | None  # [1] fp32; None: there is no calibrated scale
    kind: int  # MatrixKind of arguments.hpp
    group: int  # inputs that share a scale; 0: all of them
    fp8_activations: int  # how x is rounded, numbered as in arguments.hpp
    # Distance from the biases of gate to those of up; None: those of up follow.
    bias_pair: int | None = None

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments of kernels that read the weight."""
        return {
            "weight": self.weight,
            "scales": self.scales,
            "zeros": self.zeros if self.zeros.numel() else None,
            "kind": self.kind,
            "group": self.group,
            "order": self.order,
        }


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
        order = take(4 * spec.inputs).view(torch.int32) if spec.kind.ordered else None
        input_scale = torch.zeros(1) if spec.kind.activations == "static" else None
        packed = packed_over(spec, take(values), take(scales), take(zeros), order, input_scale)
        bias = torch.empty(spec.rows, dtype=torch.float32) if spec.bias else None
        return Matrix(spec, bias, packed)

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`.

        Raises:
            ValueError: rows packed before have their inputs in another order.
        """
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, CpuPacked)
        self.share(matrix, weight)
        values, scales, zeros = _arguments(weight)
        self.native.launch(
            "pack_matrix",
            values=values,
            scales=scales,
            zeros=zeros,
            first=first,
            count=weight.outputs,
            kind=packed.kind,
            inputs=spec.inputs,
            outputs=spec.rows,
            group=packed.group,
            paired=spec.paired,
            value_dtype=DTYPES.get(values.dtype, 0),
            weight=packed.weight,
            packed_scales=packed.scales,
            packed_zeros=None if zeros is None else packed.zeros,
        )

    def share(self, matrix: Matrix, weight: Weight) -> None:
        """Set what all rows of a matrix share (order, input scale) from some of its rows.

        Raises:
            ValueError: rows packed before have their inputs in another order.
        """
        packed = matrix.data
        assert isinstance(packed, CpuPacked)
        fill_shared(weight, packed.order, packed.input_scale)

    def linear(
        self, x: Tensor, matrix: Matrix, residual: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        """See `Ops.linear`.

        Args:
            into: memory for the result, with dense rows; None: new memory.
        """
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, CpuPacked)
        y = into
        if y is None:
            y = self.native.empty(x.shape[0], spec.outputs, dtype=spec.out_dtype)
        self.native.launch(
            "linear",
            x=x,
            **packed.arguments,
            inputs=spec.inputs,
            outputs=spec.rows,
            activation=ACTIVATIONS[spec.activation],
            bias=matrix.bias,
            bias_pair=spec.outputs if packed.bias_pair is None else packed.bias_pair,
            residual=residual,
            y=y,
            out_dtype=spec.out_dtype,
            fp8_x=packed.fp8_activations,
            x_scale=packed.input_scale,
        )
        return y

    def linear_each(self, x: Tensor, matrix: Matrix, outputs: int) -> Tensor:
        """See `Ops.linear_each`."""
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, CpuPacked)
        heads = x.shape[1]
        y = self.native.empty(x.shape[0], heads, outputs, dtype=x.dtype)
        self.native.launch(
            "linear_each",
            x=x,
            x_head_stride=x.stride(1),
            heads=heads,
            weight=packed.weight,
            kind=packed.kind,
            inputs=spec.inputs,
            outputs=outputs,
            head_rows=spec.rows // heads,
            y=y,
        )
        return y

    def rows(
        self,
        matrix: Matrix,
        ids: Tensor,
        dtype: torch.dtype,
        into: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """See `Ops.matrix_rows`.

        Args:
            into: memory for the result, with dense rows; None: new memory.
            first: the id of the matrix's first row. Nothing is written for ids of other rows.
        """
        spec, packed = matrix.spec, matrix.data
        assert isinstance(packed, CpuPacked)
        out = into
        if out is None:
            out = self.native.empty(ids.shape[0], spec.inputs, dtype=dtype)
        self.native.launch(
            "matrix_rows",
            **packed.arguments,
            inputs=spec.inputs,
            first=first,
            outputs=spec.rows,
            ids=ids,
            out=out,
            rows=self.native.rows(ids),
            dtype=dtype,
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
    """Make a `CpuPacked` over memory of the sizes from `packed_sizes`."""
    kind = spec.kind
    rounding = FP8_ACTIVATIONS[kind.activations] if kind.codes == "fp8" else 0
    return CpuPacked(weight, scales, zeros, order, input_scale, _number(kind), kind.group, rounding)


def packed_sizes(spec: MatrixSpec) -> tuple[int, int, int]:
    """Return bytes of the packed values, scales and zero points (csrc/packed.hpp).

    Raises:
        ValueError: the kernels cannot multiply groups of this size.
    """
    kind = spec.kind
    _check_group(kind)
    if _number(kind) == I8 and spec.inputs > MAX_GROUP and not kind.group:
        raise ValueError(f"weights of {spec.inputs} inputs: at most {MAX_GROUP} of this kind")
    paired = spec.paired  # gate and up share tiles
    tiles = ceil_div(spec.rows // 2, TILE // 2) if paired else ceil_div(spec.rows, TILE)
    values = tiles * ceil_div(spec.inputs, INPUTS_PER_STEP[_number(kind)]) * TILE * 4
    if kind.floats:
        return values, 0, 0
    outputs = tiles * TILE
    groups = outputs * ceil_div(spec.inputs, kind.group) if kind.group else 0
    scales = 4 * outputs + kind.group_scale_bytes(native=True) * groups
    return values, scales, {"": 0, "zeros": 1, "minima": 2}[kind.offsets] * groups


def _check_group(kind: WeightKind) -> None:
    group, step = kind.group, INPUTS_PER_STEP[_number(kind)]
    if group < (step if in_nibbles(kind) else 0) or group % step:
        raise ValueError(f"weights in groups of {group}: must be a multiple of {step}")
    max_group = MAX_GROUP_WITH_ZEROS if kind.offsets == "zeros" else MAX_GROUP
    if group > max_group:
        raise ValueError(f"weights in groups of {group}: at most {max_group} of this kind")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _number(kind: WeightKind) -> int:
    """Return the MatrixKind of arguments.hpp."""
    if kind.codes == "int8":
        return I8_WEIGHT_ONLY if kind.activations == "float" else I8
    if kind.codes == "int4":
        return I4_MIN if kind.offsets == "minima" else I4
    return OTHER_KINDS.get(kind.codes, F32)


def _arguments(weight: Weight) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return values, scales, and zero points or minima, as arguments of `pack_matrix`."""
    values, scales, offsets = weight.values, weight.scales, weight.zeros
    if scales is not None:
        scales = scales.to(scale_dtype(weight.kind))
        if weight.kind.codes in UNITS:  # the kernels have integers
            scales = scales / UNITS[weight.kind.codes]
    if weight.minima is not None:
        offsets = weight.minima.float()
    values = values if values.dtype in DTYPES else values.float()
    return (
        values.contiguous(),
        None if scales is None else scales.contiguous(),
        None if offsets is None else offsets.contiguous(),
    )
