"""Matrices of every kind on a GPU: made, filled, multiplied, read row by row.

Floats are multiplied by cuBLAS, and so is E4M3 with E4M3 for many tokens; the rest by the kernels
here, and weights in groups that are not a multiple of 16, which are rare, by torch, a few rows at a
time.

The order of a row's sum depends on the kind, the shape and the class of the number of tokens
(`matrix_shapes.py`: up to 8, 16, 32, 64, more), but not on the number within a class. For cuBLAS it
depends on the algorithm that cuBLAS chooses for the shape, including the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.torch_ops import TORCH
from kvik.kernels.triton import linear_bytes, linear_words, words
from kvik.kernels.triton.launch import ceil_div
from kvik.kernels.triton.linear_end import finish
from kvik.kernels.triton.matrix_shapes import FEW, FEW_INT4, Tile, splits_for, tile_for
from kvik.kernels.triton.packed import (
    LEAST_GROUP,
    STEP,
    TritonPacked,
    fill,
    in_words,
    interleaved,
    span_of,
    unfilled,
)
from kvik.kernels.triton.rounding import round_tokens
from kvik.kernels.triton.scaled_mm import (
    TOKEN_STEP,
    Library,
    library_of,
    product,
    product_of_blocks,
    product_of_wholes,
)
from kvik.kernels.triton.words import (
    E4M3,
    MINIMUM,
    NO_OFFSET,
    fp16_pair,
    load_scale,
    plane_of,
    planes_of,
    scale_and_zero,
)
from kvik.kernels.weights import ACTIVATIONS, Matrix, MatrixSpec, Weight
from kvik.spec.weight_kind import WeightKind

# Rows of a quantised weight as floats: embeddings of tokens. Floor: the bytes of the rows.


@triton.jit
def _scaled(
    q,
    scales,
    factors,
    row,
    k,
    scale_stride,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Scale q of inputs k of a row to weights, fp32; for INT4 q is 16 too large."""
    if GROUP == 0:
        w = q * tl.load(scales + row)
    else:
        at = scales + k // GROUP * scale_stride + row
        if OFFSET == NO_OFFSET:
            w = q * load_scale(at, FORMAT)
        elif OFFSET == MINIMUM:
            scale, minimum = fp16_pair(tl.load(at))
            scale *= tl.load(factors + row)
            w = (q - 16.0) * scale - minimum * tl.load(factors + scale_stride + row)
        else:
            scale, zero = scale_and_zero(tl.load(at))
            w = (q - 16.0 - zero.to(tl.float32)) * scale
    return w


@triton.jit
def word_rows_kernel(
    words,
    scales,
    factors,
    order,
    ids,
    out,
    inputs,
    tiles,
    scale_stride,
    FORMAT: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    TILES: tl.constexpr,
):
    """grid [n, tiles / TILES]; out [n, inputs]. HALVES: lower halves of words are neighbours."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + n)
    PLANES: tl.constexpr = planes_of(FORMAT)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)[:, None]
    c = tl.arange(0, 16)[None, :]
    at = words + ((row // 64 * tiles + tile) * 64 + row % 64) * 16 + c
    w = tl.load(at, mask=tile < tiles, other=0)
    for plane in tl.static_range(PLANES):
        start = tile * (32 * PLANES) + 32 * plane
        low, high = plane_of(w, plane, FORMAT, tl.float32)
        for half in tl.static_range(2):
            q = low if half == 0 else high
            k = start + (16 * half + c if HALVES else 2 * c + half)
            inside = k < inputs
            known = tl.minimum(k, inputs - 1)
            y = _scaled(q, scales, factors, row, known, scale_stride, FORMAT, OFFSET, GROUP)
            to = tl.load(order + known) if order is not None else known
            tl.store(out + n * inputs + to, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def byte_rows_kernel(
    values,
    scales,
    order,
    ids,
    out,
    inputs,
    filled,
    scale_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid [n, blocks]; values [rows, filled] int8, or bits of E4M3 as such; out [n, inputs]"""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + n)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < inputs
    code = tl.load(values + row * filled + k, mask=inside, other=0).to(tl.int32)
    if FORMAT == E4M3:
        bits = ((code & 0x7F) << 20) | (code & -0x80000000)
        q = bits.to(tl.float32, bitcast=True) * (2.0**120)
    else:
        q = code.to(tl.float32)
    known = tl.minimum(k, inputs - 1)
    y = _scaled(q, scales, None, row, known, scale_stride, FORMAT, NO_OFFSET, GROUP)
    to = tl.load(order + known) if order is not None else known
    tl.store(out + n * inputs + to, y.to(out.dtype.element_ty), mask=inside)


TILES_AT_ONCE = 4  # of 16 words: 512 weights of four bits
BYTES_AT_ONCE = 1024


# Launches of products of matrices: tiles, splits, and memory for parts of sums.


def format_of(kind: WeightKind) -> tuple[int, int]:
    """Return the format of codes, and the kind of a group's zero points or minima (`words.py`)."""
    formats = {"int4": words.INT4, "fp8": words.E4M3, "int8": words.INT8, "mxfp4": words.E2M1}
    offset = words.NO_OFFSET
    if kind.codes == "int4":
        offset = words.MINIMUM if kind.offsets == "minima" else words.ZERO
    return formats[kind.codes].value, offset.value


def how_bytes(kind: WeightKind, library: Library) -> int:
    """Return how weights in bytes are multiplied by rounded x (`linear_bytes.py`)."""
    wide = span_of(kind.group) > LEAST_GROUP
    if kind.codes == "int8":
        how = linear_bytes.INT8 if wide else linear_bytes.INT8_IN_FP16
    else:
        native = library.tensor_cores and wide
        how = linear_bytes.E4M3 if native else linear_bytes.E4M3_IN_FP16
    return int(how.value)


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


def words_linear(
    x: Tensor, packed: TritonPacked, matrix: Matrix, residual: Tensor | None
) -> Tensor:
    """Multiply x [tokens, inputs], unrounded, by a weight in words."""
    spec, kind = matrix.spec, matrix.spec.kind
    y = torch.empty(len(x), spec.outputs, dtype=spec.out_dtype, device=x.device)
    narrow = kind.offsets == "minima"
    int4 = kind.codes == "int4" and not narrow
    plan = _plan(x, matrix, torch.float32, narrow=narrow, int4=int4)
    group, tile = kind.group, plan.tile
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
    packed: TritonPacked,
    matrix: Matrix,
    residual: Tensor | None,
) -> Tensor:
    """Multiply x rounded to eight bits, [tokens, filled inputs], by a weight in bytes.

    Paired activations are applied only if rows of gate and up alternate.
    """
    spec, kind = matrix.spec, matrix.spec.kind
    assert not spec.paired or interleaved(spec)
    y = torch.empty(len(codes), spec.outputs, dtype=spec.out_dtype, device=codes.device)
    group = kind.group
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
    """Multiply x [tokens, inputs] by values [rows, inputs] of the same dtype.

    cuBLAS sums in fp32; but if it splits the inputs, torch allows it to add the parts in their
    dtype. Floor: for few tokens the bytes of the values; for many 2 * tokens * rows * inputs FLOPs.
    """
    spec, bias = matrix.spec, matrix.bias
    if spec.activation is None:
        if residual is not None and bias is None and spec.out_dtype == x.dtype == residual.dtype:
            return residual.addmm_(x, values.t())  # not in place, it would be copied first
        if spec.out_dtype == x.dtype:
            z = F.linear(x, values, bias)
            return z if residual is None else z.add_(residual)
    if spec.out_dtype == torch.float32 != x.dtype and x.is_cuda:
        # Logits straight from the product, not rounded to x's dtype.
        z = torch.mm(x, values.t(), out_dtype=torch.float32)
        return finish(z, bias, spec.activation, residual, spec.out_dtype)
    return finish(F.linear(x, values, bias), None, spec.activation, residual, spec.out_dtype)


class TritonMatrices:
    """The rows `matrix`, `pack_rows`, `linear` and `matrix_rows` of `Ops`, for one device."""

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        """
        Args:
            library: support for E4M3; None: that of the device.
        """
        self.library = library or library_of(device)

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """See `Ops.matrix`. The bias of a quantised one is fp32."""
        return unfilled(spec)

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`.

        Raises:
            ValueError: rows packed before have their inputs in another order.
        """
        if isinstance(matrix.data, TritonPacked):
            fill(matrix.spec, matrix.data, first, weight)
        else:
            TORCH.pack_rows(matrix, first, weight)

    def linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        """See `Ops.linear`."""
        spec, packed, kind = matrix.spec, matrix.data, matrix.spec.kind
        if not len(x):
            return torch.empty(0, spec.outputs, dtype=spec.out_dtype, device=x.device)
        if isinstance(packed, Weight) and kind.floats:
            return float_linear(x, packed.values, matrix, residual)
        if not isinstance(packed, TritonPacked):
            return TORCH.linear(x, matrix, residual)
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        if in_words(kind):
            return words_linear(x, packed, matrix, residual)
        if kind.codes == "int8":
            filled = packed.values.shape[1]
            codes, x_scales = round_tokens(x, filled, kind.group, False, None)
            how = how_bytes(kind, self.library)
            return bytes_linear(codes, x_scales, kind.group, how, packed, matrix, residual)
        return self._e4m3_linear(x, packed, kind, matrix, residual)

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`."""
        spec, packed, kind = matrix.spec, matrix.data, matrix.spec.kind
        if not isinstance(packed, TritonPacked):
            return TORCH.matrix_rows(matrix, ids, dtype)
        out = torch.empty(len(ids), spec.inputs, dtype=dtype, device=ids.device)
        if not len(ids):
            return out
        group, stride = kind.group, packed.scales.shape[-1]
        kernel: Any
        if in_words(kind):
            tiles = packed.values.shape[1]
            kernel = word_rows_kernel[(len(ids), ceil_div(tiles, TILES_AT_ONCE))]
            kernel(
                packed.values,
                packed.scales,
                packed.factors,
                packed.order,
                ids,
                out,
                spec.inputs,
                tiles,
                stride,
                *format_of(kind),
                group,
                span_of(group) == LEAST_GROUP,
                TILES_AT_ONCE,
            )
        else:
            codes = packed.values.view(torch.int8)
            kernel = byte_rows_kernel[(len(ids), ceil_div(spec.inputs, BYTES_AT_ONCE))]
            kernel(
                codes,
                packed.scales,
                packed.order,
                ids,
                out,
                spec.inputs,
                codes.shape[1],
                stride,
                format_of(kind)[0],
                group,
                BYTES_AT_ONCE,
            )
        return out

    def _e4m3_linear(
        self,
        x: Tensor,
        packed: TritonPacked,
        kind: WeightKind,
        matrix: Matrix,
        residual: Tensor | None,
    ) -> Tensor:
        """Multiply by E4M3. Gate and up do not alternate: `finish` applies paired activations."""
        spec, library = matrix.spec, self.library
        x_group = kind.group if kind.activations == "group" else 0
        filled = packed.values.shape[1]
        many = len(x) > FEW[-1].tokens and spec.out_dtype == torch.bfloat16
        if many and library.rows and packed.whole is not None and packed.whole.alike:
            codes, _ = round_tokens(x, filled, 0, True, packed.input_scale)
            assert packed.input_scale is not None
            one = packed.scales[:1]
            z = product_of_wholes(codes, packed.input_scale, packed.values, one, library.multiply)
        elif many and library.rows and not kind.group:
            codes, x_scales = round_tokens(x, filled, 0, True, packed.input_scale)
            z = product(codes, x_scales, packed.values, packed.scales, library.multiply)
        elif many and library.blocks and packed.squares is not None and packed.squares.everywhere:
            missing = -len(x) % TOKEN_STEP
            padded = F.pad(x, (0, 0, 0, missing)) if missing else x
            codes, x_scales = round_tokens(padded, filled, x_group, True, None)
            squares = packed.squares.scales
            z = product_of_blocks(codes, x_scales, packed.values, squares, library.multiply)
        else:
            codes, x_scales = round_tokens(x, filled, x_group, True, packed.input_scale)
            how = how_bytes(kind, library)
            if not spec.paired:
                return bytes_linear(codes, x_scales, x_group, how, packed, matrix, residual)
            plain = Matrix(replace(spec, activation=None), None, packed)
            z = bytes_linear(codes, x_scales, x_group, how, packed, plain, None)
        z = z[: len(x), : spec.rows]
        return finish(z, matrix.bias, spec.activation, residual, spec.out_dtype)
