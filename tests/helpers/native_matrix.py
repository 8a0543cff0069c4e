"""Random weights packed for the native kernels, their dequantised values, and their products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers.native import FLOATS, Poisoned, Runtime, call, normal
from torch import Tensor

from kvik.kernels.rounding import round_int4, round_mxfp4
from kvik.kernels.weights import (
    Weight,
    fp8_weight,
    in_nibbles,
    int4_min_weight,
    int8_weight,
)
from kvik.spec.weight_kind import WeightKind

F32, BF16, I8, I8_WEIGHT_ONLY = "f32", "bf16", "int8", "int8-weight-only"
I4, I4_MIN, FP8, MXFP4 = "int4", "int4-min", "fp8", "mxfp4"
IQ4, FP4, NF4, BNB_FP4 = "iq4", "fp4", "nf4", "bnb_fp4"
KIND_NAMES = (F32, BF16, I8, I8_WEIGHT_ONLY, I4, I4_MIN, FP8, MXFP4, IQ4, FP4, NF4, BNB_FP4)
NUMBERS = {name: number for number, name in enumerate(KIND_NAMES)}
INPUTS_PER_STEP = (1, 2, 4, 4, 8, 8, 4, 8, 8, 8, 8, 8)  # by number of the kind
# The integers of each code.
TABLES = {
    IQ4: (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    FP4: (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    NF4: (-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112),
    BNB_FP4: (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30),
}
# Names of kinds, with the inputs of a group after a "/" if they have groups (0: none), and how x is
# rounded for fp8 weights.
ONE_OF_EACH = (
    *(F32, BF16, I8, I8_WEIGHT_ONLY, FP8, "int8/16", "int8-weight-only/32"),
    *(
        "int4/128",
        "int4-min/32",
        "fp8/128",
        "fp8/0-token",
        "fp8/0-static",
        "fp8/128-group",
        "mxfp4/32",
        "iq4/32",
        "fp4/16",
        "nf4/64",
        "bnb_fp4/64",
    ),
)
FP8_X = {"float": 0, "token": 1, "group": 2, "static": 3}
STATIC_SCALE = 3.0 / 448  # saturates one of 370 normal numbers
KINDS = (
    *ONE_OF_EACH,
    *("int8/32", "int8-weight-only/64", "int4/32", "int4/64-zeros", "int4/128-zeros"),
)
TILE = 32
NO_ACTIVATION, SILU_AND_MUL, GELU_TANH, GELU_TANH_AND_MUL, GELU, GELU_AND_MUL = range(6)
RELU, CLAMPED_SWIGLU = 6, 9
PAIRED = (SILU_AND_MUL, GELU_TANH_AND_MUL, GELU_AND_MUL, CLAMPED_SWIGLU)


@dataclass(frozen=True)
class Values:
    """Arguments of `pack_matrix`.

    Attributes:
        source: [outputs, inputs] before rounding.
        dequantized: [outputs, inputs] fp32, after rounding.
        values, scales, zeros: arguments of `pack_matrix`.
    """

    source: Tensor
    dequantized: Tensor
    values: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    group: int
    kind: int


@dataclass(frozen=True)
class NativeMatrix:
    """A packed matrix.

    Attributes:
        source, dequantized: see `Values`.
        order, fp8_x, x_scale: see `linear` in arguments.hpp.
    """

    source: Tensor
    dequantized: Tensor
    kind: int
    outputs: int
    inputs: int
    group: int
    weight: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None = None
    fp8_x: int = 0
    x_scale: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that all matrix kernels share."""
        names = ("weight", "scales", "zeros", "kind", "inputs", "outputs", "group", "order")
        return {name: getattr(self, name) for name in names}


def random_values(
    kind: str, outputs: int, inputs: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Values:
    """Return normal weights rounded to the kind. The last group may be short."""
    source = normal(outputs, inputs, seed=seed, dtype=dtype)
    name, _, options = kind.partition("/")
    group = int(options.split("-")[0]) if options else 0
    if name in (F32, BF16):
        dequantized = source if kind == F32 else source.bfloat16()
        return Values(source, dequantized.float(), source, None, None, 0, NUMBERS[name])
    if name in TABLES:
        return _of_table(name, source, group)
    unit = group or 1
    groups = -(-inputs // unit)
    full = torch.nn.functional.pad(source.float(), (0, max(groups, 1) * unit - inputs))
    weight = _rounded(name, full, group, "zeros" in options)
    values, scales, zeros = weight.values[:, :inputs], weight.scales, None
    if in_nibbles(weight.kind):
        values = weight.values[:, : (inputs + 1) // 2]
        zeros = weight.zeros if weight.minima is None else weight.minima
    if group:
        scales = scales[:, :groups].contiguous()
        zeros = None if zeros is None else zeros[:, :groups].contiguous()
    dequantized = weight.dequantized()[:, :inputs]
    return Values(source, dequantized, values.contiguous(), scales, zeros, group, NUMBERS[name])


def _of_table(name: str, source: Tensor, group: int) -> Values:
    """Round to the nearest numbers of a table, with scales that are fp16 values."""
    inputs, table = source.shape[1], torch.tensor(TABLES[name], dtype=torch.float32)
    full = torch.nn.functional.pad(source.float(), (0, -inputs % group))
    grouped = full.unflatten(1, (-1, group))
    scales = grouped.abs().amax(2) / table.max()
    scales = torch.where(scales == 0, 1.0, scales.half().float())
    distances = (grouped / scales[:, :, None])[..., None] - table
    codes = distances.abs().argmin(3)
    dequantized = (table[codes] * scales[:, :, None]).flatten(1)[:, :inputs]
    halves = codes.flatten(1).to(torch.uint8)
    values = (halves[:, ::2] | halves[:, 1::2] << 4)[:, : (inputs + 1) // 2]
    return Values(source, dequantized, values.contiguous(), scales, None, group, NUMBERS[name])


def _rounded(name: str, source: Tensor, group: int, zeros: bool) -> Weight:
    """Round `source` [outputs, inputs] fp32 of whole groups. Scales of groups are fp16 values."""
    if name == MXFP4:
        return round_mxfp4(source)
    if name == I4:
        weight = round_int4(source, group)
        return weight if zeros else replace(weight, kind=WeightKind("int4", group), zeros=None)
    grouped = source.unflatten(1, (-1, group or source.shape[1]))
    most = {I4_MIN: 15.0, FP8: 448.0}.get(name, 127.0)
    low = grouped.amin(2, True).half().float() if name == I4_MIN else torch.zeros(())
    scales = (grouped - low).abs().amax(2, True) / most
    scales = torch.where(scales == 0, 1.0, scales.half().float() if group else scales)
    q = ((grouped - low) / scales).flatten(1)
    kept = scales[:, :, 0] if group else scales.flatten()
    if name == I4_MIN:
        halves = q.round().clamp(0, 15).to(torch.uint8).unflatten(1, (-1, 2))
        return int4_min_weight(halves[:, :, 0] | halves[:, :, 1] << 4, kept, -low[:, :, 0], group)
    q = q.clamp(-most, most)
    if name == FP8:
        return fp8_weight(q.to(torch.float8_e4m3fn), kept, group)
    return int8_weight(q.round().to(torch.int8), kept, name == I8, group)


def packed_sizes(v: Values, outputs: int, inputs: int, *, paired: bool) -> tuple[int, int, int]:
    """Return the bytes of the packed weight, scales and zeros."""
    tiles = -(-(outputs // 2) // (TILE // 2)) if paired else -(-outputs // TILE)
    steps = -(-inputs // INPUTS_PER_STEP[v.kind])
    groups = -(-inputs // v.group) if v.group else 0
    scale_bytes = 4 + groups * {NUMBERS[FP8]: 4, NUMBERS[MXFP4]: 1}.get(v.kind, 2)
    zero_bytes = groups * (2 if v.kind == NUMBERS[I4_MIN] else 1)
    scales = tiles * TILE * (0 if v.scales is None else scale_bytes)
    zeros = tiles * TILE * (0 if v.zeros is None else zero_bytes)
    return tiles * steps * TILE * 4, scales, zeros


def pack(
    runtime: Runtime, v: Values, *, paired: bool = False, pieces: int = 1, fill: int = 0xA5
) -> NativeMatrix:
    """Pack in several calls, into memory filled with `fill`."""
    outputs, inputs = v.source.shape
    sizes = packed_sizes(v, outputs, inputs, paired=paired)
    weight, scales, zeros = (torch.full((size + 64,), fill, dtype=torch.uint8) for size in sizes)
    for part in torch.arange(outputs).chunk(pieces):
        first, count = int(part[0]), len(part)
        rows = slice(first, first + count)
        values = v.values[rows]
        call(
            runtime,
            "pack_matrix",
            values=values,
            values_stride=values.stride(0),
            scales=None if v.scales is None else v.scales[rows],
            zeros=None if v.zeros is None else v.zeros[rows],
            first=first,
            count=count,
            kind=v.kind,
            inputs=inputs,
            outputs=outputs,
            group=v.group,
            paired=int(paired),
            value_dtype=values.dtype if values.dtype in FLOATS else 0,
            weight=weight,
            packed_scales=scales,
            packed_zeros=zeros,
        )
    for tensor, size in zip((weight, scales, zeros), sizes, strict=True):
        assert bool((tensor[size:] == fill).all()), "written outside of the matrix"
    return NativeMatrix(
        source=v.source,
        dequantized=v.dequantized,
        kind=v.kind,
        outputs=outputs,
        inputs=inputs,
        group=v.group,
        weight=weight,
        scales=scales,
        zeros=None if v.zeros is None else zeros,
    )


def random_matrix(
    runtime: Runtime, kind: str, outputs: int, inputs: int, *, seed: int = 0, paired: bool = False
) -> NativeMatrix:
    """Return normal weights, rounded to the kind and packed."""
    packed = pack(runtime, random_values(kind, outputs, inputs, seed), paired=paired)
    rounding = FP8_X.get(kind.rpartition("-")[2], 0)
    scale = torch.tensor([STATIC_SCALE]) if rounding == FP8_X["static"] else None
    return replace(packed, fp8_x=rounding, x_scale=scale)


def linear(
    runtime: Runtime,
    x: Tensor,
    matrix: NativeMatrix,
    *,
    activation: int = NO_ACTIVATION,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    gap: int = 3,
) -> Tensor:
    """Return act(x W^T + bias) + residual [rows, columns], with `gap` elements between rows."""
    columns = matrix.outputs // 2 if activation in PAIRED else matrix.outputs
    out = Poisoned(x.shape[0], columns, dtype=out_dtype, gap=gap)
    call(
        runtime,
        "linear",
        x=x,
        x_stride=x.stride(0),
        rows=x.shape[0],
        activation=activation,
        bias=bias,
        bias_pair=columns,
        residual=residual,
        residual_stride=0 if residual is None else residual.stride(0),
        y=out.view,
        y_stride=out.stride,
        dtype=x.dtype,
        out_dtype=out_dtype,
        fp8_x=matrix.fp8_x,
        x_scale=matrix.x_scale,
        **matrix.arguments,
    )
    out.assert_rest_untouched()
    return out.view
