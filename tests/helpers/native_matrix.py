"""Random weights packed for the native kernels, beside what they stand for, and their products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.rounding import round_int4, round_int8
from kvik.kernels.weights import Int4Weight
from tests.helpers.native import Poisoned, Runtime, call, normal

F32, BF16, I8, I8_WEIGHT_ONLY, I4 = "f32", "bf16", "int8", "int8-weight-only", "int4"
# The kinds with the group sizes and zero points of int4.
KINDS = (F32, BF16, I8, I8_WEIGHT_ONLY, I4, "int4-32", "int4-64-zeros", "int4-128-zeros")
NUMBERS = {F32: 0, BF16: 1, I8: 2, I8_WEIGHT_ONLY: 3}
INPUTS_PER_STEP = (1, 2, 4, 4, 8)  # by number
TILE = 32
NO_ACTIVATION, SILU_AND_MUL, GELU_TANH = range(3)


@dataclass(frozen=True)
class Values:
    """Weights as `pack_matrix` takes them.

    Attributes:
        source: [outputs, inputs] before they were rounded.
        dequantized: [outputs, inputs] fp32, what they stand for.
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


def random_values(
    kind: str, outputs: int, inputs: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Values:
    """Normal weights rounded to the kind. int4: the last group is short if it must be."""
    source = normal(outputs, inputs, seed=seed, dtype=dtype)
    if kind in (F32, BF16):
        dequantized = source if kind == F32 else source.bfloat16()
        return Values(source, dequantized.float(), source, None, None, inputs, NUMBERS[kind])
    if kind in (I8, I8_WEIGHT_ONLY):
        if inputs == 0:
            empty, scales = source.to(torch.int8), torch.ones(outputs)
            return Values(source, source.float(), empty, scales, None, 0, NUMBERS[kind])
        weight = round_int8(source, quantize_activations=kind == I8)
        scales = weight.scales
        return Values(
            source, weight.dequantized(), weight.values, scales, None, inputs, NUMBERS[kind]
        )
    _, *options = kind.split("-")
    group = int(options[0]) if options else 128
    if inputs == 0:
        empty, scales = torch.empty(outputs, 0, dtype=torch.uint8), torch.empty(outputs, 0)
        return Values(source, source.float(), empty, scales, None, group, 4)
    full = torch.nn.functional.pad(source.float(), (0, -inputs % group))
    rounded = round_int4(full, group, symmetric="zeros" not in options)
    # the packed scales are bf16
    scales = rounded.scales.bfloat16().float()
    dequantized = Int4Weight(rounded.values, scales, rounded.zeros, group).dequantized()
    values = rounded.values[:, : (inputs + 1) // 2].contiguous()
    return Values(source, dequantized[:, :inputs], values, scales, rounded.zeros, group, 4)


def packed_sizes(v: Values, outputs: int, inputs: int, *, paired: bool) -> tuple[int, int, int]:
    """Bytes of the packed weight, scales and zeros."""
    tiles = -(-(outputs // 2) // (TILE // 2)) if paired else -(-outputs // TILE)
    steps = -(-inputs // INPUTS_PER_STEP[v.kind])
    groups = -(-inputs // v.group) if v.kind == 4 else 0
    scales = tiles * TILE * (4 if v.kind in (2, 3) else 2 * groups)
    zeros = tiles * TILE * groups if v.zeros is not None else 0
    return tiles * steps * TILE * 4, scales, zeros


def pack(
    runtime: Runtime, v: Values, *, paired: bool = False, pieces: int = 1, fill: int = 0xA5
) -> NativeMatrix:
    """Pack in so many calls, into memory that holds `fill`."""
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
            value_dtype=values.dtype if values.dtype.is_floating_point else 0,
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
    """Normal weights, rounded to the kind and packed."""
    return pack(runtime, random_values(kind, outputs, inputs, seed), paired=paired)


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
    """act(x W^T + bias) + residual [rows, columns], rows `gap` elements apart."""
    columns = matrix.outputs // 2 if activation == SILU_AND_MUL else matrix.outputs
    out = Poisoned(x.shape[0], columns, dtype=out_dtype, gap=gap)
    call(
        runtime,
        "linear",
        x=x,
        x_stride=x.stride(0),
        rows=x.shape[0],
        weight=matrix.weight,
        scales=matrix.scales,
        zeros=matrix.zeros,
        kind=matrix.kind,
        inputs=matrix.inputs,
        outputs=matrix.outputs,
        group=matrix.group,
        activation=activation,
        bias=bias,
        residual=residual,
        residual_stride=0 if residual is None else residual.stride(0),
        y=out.view,
        y_stride=out.stride,
        dtype=x.dtype,
        out_dtype=out_dtype,
    )
    out.assert_rest_untouched()
    return out.view
