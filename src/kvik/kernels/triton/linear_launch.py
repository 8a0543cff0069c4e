"""Products of matrices as they are launched: tiles, splits, and memory for parts of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.kernels.triton import linear_bytes, linear_words, words
from kvik.kernels.triton.launch import ceil_div
from kvik.kernels.triton.linear_end import ACTIVATIONS, finish
from kvik.kernels.triton.matrix_shapes import FEW, FEW_INT4, Tile, splits_for, tile_for
from kvik.kernels.triton.packed import (
    STEP,
    Packed,
    group_of,
    interleaved,
    plain_kind,
    span_of,
)
from kvik.kernels.weights import (
    Fp8Kind,
    Int4Kind,
    Int4MinKind,
    Matrix,
    PlainKind,
)


def format_of(kind: PlainKind) -> tuple[int, int]:
    """The format of codes, and what is known of a group beside its scale (`words.py`)."""
    match kind:
        case Int4Kind():
            return words.INT4.value, words.ZERO.value
        case Int4MinKind():
            return words.INT4.value, words.MINIMUM.value
        case Fp8Kind():
            return words.E4M3.value, words.NOTHING.value
        case _:
            return words.INT8.value, words.NOTHING.value


@dataclass(frozen=True, slots=True)
class _Plan:
    tile: Tile
    grid: tuple[int, int]
    steps: int
    split_steps: int
    partials: Tensor | None  # sums of splits


def _plan(
    x: Tensor, matrix: Matrix, sums: torch.dtype, *, narrow: bool, int4: bool = False
) -> _Plan:
    spec, tokens = matrix.spec, len(x)
    tile = tile_for(tokens, narrow=narrow, fp32=x.dtype == torch.float32, int4=int4)
    steps = ceil_div(spec.inputs, STEP)
    splits = splits_for(tile, spec.rows, steps)
    tiles = ceil_div(spec.rows, tile.outputs) * ceil_div(tokens, tile.tokens)
    size = tiles * splits * tile.outputs * tile.tokens
    partials = torch.empty(size, dtype=sums, device=x.device) if splits > 1 else None
    return _Plan(tile, (tiles, splits), steps, ceil_div(steps, splits), partials)


def words_linear(x: Tensor, packed: Packed, matrix: Matrix, residual: Tensor | None) -> Tensor:
    """x [tokens, inputs] as it is, times a weight in words."""
    spec, kind = matrix.spec, plain_kind(matrix.spec)
    y = torch.empty(len(x), spec.outputs, dtype=spec.out_dtype, device=x.device)
    narrow, int4 = isinstance(kind, Int4MinKind), isinstance(kind, Int4Kind)
    plan = _plan(x, matrix, torch.float32, narrow=narrow, int4=int4)
    group, tile = group_of(kind), plan.tile
    kernel: Any = linear_words.words_kernel[plan.grid]
    kernel(
        x,
        packed.values,
        packed.scales,
        packed.factors,
        matrix.bias,
        residual,
        y,
        plan.partials,
        packed.arrivals,
        len(x),
        spec.rows,
        spec.inputs,
        plan.steps,
        plan.split_steps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        packed.scales.shape[-1],
        *format_of(kind),
        group,
        span_of(group),
        spec.inputs % STEP == 0,
        tile not in (*FEW, FEW_INT4),
        ACTIVATIONS[spec.activation],
        plan.grid[1],
        tile.outputs,
        tile.tokens,
        tile.stages,
        num_warps=tile.num_warps,
    )
    return y


def bytes_linear(
    codes: Tensor,
    x_scales: Tensor,
    x_group: int,
    how: int,
    packed: Packed,
    matrix: Matrix,
    residual: Tensor | None,
) -> Tensor:
    """x rounded to eight bits, [tokens, filled inputs], times a weight in bytes. Activations apply
    where rows of gate and up take turns."""
    spec, kind = matrix.spec, plain_kind(matrix.spec)
    assert spec.activation != "silu_and_mul" or interleaved(spec)
    y = torch.empty(len(codes), spec.outputs, dtype=spec.out_dtype, device=codes.device)
    group = group_of(kind)
    in_all = how == linear_bytes.INT8.value and not group
    narrow = how == linear_bytes.E4M3_IN_FP16.value
    plan = _plan(codes, matrix, torch.int32 if in_all else torch.float32, narrow=narrow)
    tile, values = plan.tile, packed.values
    if narrow:
        codes, values = codes.view(torch.int8), values.view(torch.int8)
    kernel: Any = linear_bytes.bytes_kernel[plan.grid]
    kernel(
        codes,
        x_scales,
        values,
        packed.scales,
        matrix.bias,
        residual,
        y,
        plan.partials,
        packed.arrivals,
        len(codes),
        spec.rows,
        plan.steps,
        plan.split_steps,
        0 if residual is None else residual.stride(0),
        packed.scales.shape[-1],
        how,
        group,
        x_group,
        span_of(group),
        ACTIVATIONS[spec.activation],
        plan.grid[1],
        tile.outputs,
        tile.tokens,
        tile.stages,
        num_warps=tile.num_warps,
    )
    return y


def float_linear(x: Tensor, values: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
    """x [tokens, inputs] times values [rows, inputs] of the same dtype, by cuBLAS, which sums in
    fp32; but where it splits the inputs, torch allows it to add the parts in the dtype. Floor: few
    tokens, the bytes of the values; many, 2 * tokens * rows * inputs FLOPs."""
    spec, bias = matrix.spec, matrix.bias
    if spec.activation is None:
        if residual is not None and bias is None and spec.out_dtype == x.dtype == residual.dtype:
            return residual.addmm_(x, values.t())  # anywhere else it would be copied first
        if spec.out_dtype == x.dtype:
            z = F.linear(x, values, bias)
            return z if residual is None else z.add_(residual)
    if spec.out_dtype == torch.float32 != x.dtype and x.is_cuda:
        # Logits as the product had them, not rounded to x's dtype on the way.
        z = torch.mm(x, values.t(), out_dtype=torch.float32)
        return finish(z, bias, spec.activation, residual, spec.out_dtype)
    return finish(F.linear(x, values, bias), None, spec.activation, residual, spec.out_dtype)
