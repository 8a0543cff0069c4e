"""Matrices of every kind on a GPU: made, filled, multiplied, read row by row.

Floats are multiplied by cuBLAS; for many tokens also E4M3 with E4M3, and weights whose x is not
rounded, after they were widened to the dtype of x. The rest is multiplied by the kernels here, and
weights in groups that are not a multiple of 16, which are rare, by torch, a few rows at a time.

The order of a row's sum depends on the kind, the shape and the class of the number of tokens
(`matrix_shapes.py`: up to 8, 16, 32, 64, 128, 256, more), but not on the number within a class. For
cuBLAS it depends on the algorithm that cuBLAS chooses for the shape, including the number of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.torch_ops import TORCH
from kvik.kernels.triton import linear_bytes, linear_words, words
from kvik.kernels.triton.launch import ROOMY, ceil_div, launch, shared_memory
from kvik.kernels.triton.linear_end import finish
from kvik.kernels.triton.matrix_shapes import (
    FEW,
    FEW_INT4,
    MAX_IN_WORDS,
    WIDENED_BYTES,
    Tile,
    splits_for,
    tile_for,
    tile_in_words,
)
from kvik.kernels.triton.packed import (
    MIN_GROUP,
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
    planes_of,
    scale_and_zero,
    weights_of,
)
from kvik.kernels.weights import ACTIVATIONS, Matrix, MatrixSpec, Weight
from kvik.spec.weight_kind import WeightKind

# Rows of a quantised weight as floats: embeddings of tokens, and matrices for many tokens. Floor:
# the bytes of the rows, as stored and as floats.


@triton.jit
def _widened(w, at, factors, row, factor_stride, FORMAT: tl.constexpr, OFFSET: tl.constexpr):
    """Scale unpacked w [BO, SPAN] of a group, whose scales of rows [BO] are `at`, rounded once."""
    if OFFSET == NO_OFFSET:
        y = w * load_scale(at, FORMAT)[:, None]
    elif OFFSET == MINIMUM:
        scale, minimum = fp16_pair(tl.load(at))
        scale *= tl.load(factors + row)
        minimum *= tl.load(factors + factor_stride + row)
        y = (w - 16.0) * scale[:, None] - minimum[:, None]
    else:
        scale, zero = scale_and_zero(tl.load(at))
        # Exact up to the difference, as a scale has nineteen binary digits: one instruction.
        y = w * scale[:, None] - ((16 + zero).to(tl.float32) * scale)[:, None]
    return y


# Otherwise parts that begin at row 0, or end elsewhere, would be compiled separately.
@triton.jit(do_not_specialize=["first", "count"])
def word_rows_kernel(
    words, scales, factors, order, ids, out,
    first, count, rows, inputs, steps, scale_stride,
    FORMAT: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    PAIRED: tl.constexpr, BO: tl.constexpr,
):  # fmt: skip
    """grid [steps, count / BO]; out [count, inputs]; a step is 128 inputs

    ids: [count] rows; None: those from `first` on, where PAIRED counts all of gate before up, which
        alternate in the words.
    """
    step, n = tl.program_id(0), tl.program_id(1) * BO + tl.arange(0, BO)
    near = tl.minimum(n, count - 1)
    if ids is not None:
        row = tl.load(ids + near).to(tl.int64)
    else:
        row = first + near
        if PAIRED:
            row = row % (rows // 2) * 2 + row // (rows // 2)
        row = row.to(tl.int64)
    TILES: tl.constexpr = 4 // planes_of(FORMAT)
    at = words + (row // 64 * steps * (1024 * TILES) + row % 64 * 16)[:, None]
    at += tl.arange(0, 16)[None, :]
    to = out + n.to(tl.int64)[:, None] * inputs
    # All formats are exact in bf16, in which they cost fewest instructions.
    tile = at + step * (1024 * TILES)
    w0 = tl.load(tile)
    w1 = tl.load(tile + 1024) if TILES == 2 else w0
    for s in tl.static_range(128 // SPAN):
        start = step * 128 + s * SPAN
        w = weights_of(w0, w1, s, SPAN, FORMAT, tl.bfloat16).to(tl.float32)
        scale = scales + row
        if GROUP:
            scale += start // GROUP * scale_stride
        y = _widened(w, scale, factors, row, scale_stride, FORMAT, OFFSET)
        k = start + tl.arange(0, SPAN)
        column = tl.load(order + tl.minimum(k, inputs - 1)) if order is not None else k
        inside = (n < count)[:, None] & (k < inputs)[None, :]
        tl.store(to + column[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def byte_rows_kernel(
    values, scales, order, ids, out, inputs, filled, scale_stride,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    y = q * tl.load(scales + (known // GROUP * scale_stride + row if GROUP else row))
    to = tl.load(order + known) if order is not None else known
    tl.store(out + n * inputs + to, y.to(out.dtype.element_ty), mask=inside)


ROWS_AT_ONCE = 32
BYTES_AT_ONCE = 1024


# Launches of products of matrices: tiles, splits, and memory for parts of sums.


def format_of(kind: WeightKind) -> tuple[int, int]:
    """Return the format of codes, and the kind of a group's zero points or minima (`words.py`)."""
    formats = {"int4": words.INT4, "mxfp4": words.E2M1, "nvfp4": words.NVFP4, "fp8": words.E4M3}
    codes = formats.get(kind.codes, words.INT8)
    offset = words.NO_OFFSET
    if kind.codes == "int4":
        offset = words.MINIMUM if kind.offsets == "minima" else words.ZERO
    return codes.value, offset.value


def how_bytes(kind: WeightKind, library: Library, dtype: torch.dtype) -> int:
    """Return how weights in bytes are multiplied by rounded x (`linear_bytes.py`).

    Args:
        dtype: of x before it was rounded. Tensor cores add products of E4M3 with less than the
            precision of fp32 (on an H200, results were off by up to 1e-3).
    """
    wide = span_of(kind.group) > MIN_GROUP
    if kind.codes == "int8":
        how = linear_bytes.INT8 if wide else linear_bytes.INT8_IN_FP16
    else:
        native = library.tensor_cores and wide and dtype != torch.float32
        how = linear_bytes.E4M3 if native else linear_bytes.E4M3_IN_FP16
    return int(how.value)


def narrow_in_words(kind: WeightKind, device: torch.device) -> bool:
    """Return whether many tokens have tiles with half as many sums: with minima, and for eight bits
    if wide ones exceed the shared memory."""
    return kind.offsets == "minima" or (kind.gpu_bits == 8 and shared_memory(device) < ROOMY)


def _multiplied(
    kernel: Any,
    x: Tensor,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    constants: Sequence[int],
    matrix: Matrix,
    residual: Tensor | None,
    tile: Tile,
    sums: torch.dtype,
) -> Tensor:
    """Multiply x [tokens, inputs] by a weight, with a kernel that ends as in `linear_end.py`.

    Args:
        tensors, numbers, constants: the kernel's first ones; those of the end and of the division
            into tiles and splits follow.
        sums: the dtype of partial sums.
    """
    spec, packed, tokens = matrix.spec, matrix.data, x.shape[0]
    assert isinstance(packed, TritonPacked)
    y = torch.empty(tokens, spec.outputs, dtype=spec.out_dtype, device=x.device)
    steps = ceil_div(spec.inputs, STEP)
    splits = splits_for(tile, spec.rows, steps)
    tiles = ceil_div(spec.rows, tile.outputs) * ceil_div(tokens, tile.tokens)
    size = tiles * splits * tile.outputs * tile.tokens
    partials = torch.empty(size, dtype=sums, device=x.device) if splits > 1 else None
    stride = 0 if residual is None else residual.stride(0)
    divided = (tokens, spec.rows, steps, ceil_div(steps, splits), stride, packed.scales.shape[-1])
    sizes = (tile.outputs, tile.tokens, tile.stages)
    launch(
        kernel,
        (tiles, splits),
        (*tensors, matrix.bias, residual, y, partials, packed.arrivals),
        (*numbers, *divided),
        (*constants, ACTIVATIONS[spec.activation], splits, *sizes),
        num_warps=tile.num_warps,
    )
    return y


def words_linear(
    x: Tensor, packed: TritonPacked, matrix: Matrix, residual: Tensor | None
) -> Tensor:
    """Multiply x [tokens, inputs], unrounded, by a weight in words."""
    spec, kind = matrix.spec, matrix.spec.kind
    narrow, fp32 = narrow_in_words(kind, x.device), x.dtype == torch.float32
    int4 = kind.codes == "int4" and kind.offsets != "minima"
    tile = tile_in_words(x.shape[0], fp32=fp32, narrow=narrow, int4=int4)
    tensors, numbers = (x, packed.values, packed.scales, packed.factors), (spec.inputs, x.stride(0))
    whole, subtract = spec.inputs % STEP == 0, tile != FEW_INT4
    constants = (*format_of(kind), kind.group, span_of(kind.group), whole, subtract)
    kernel, sums = linear_words.words_kernel, torch.float32
    return _multiplied(kernel, x, tensors, numbers, constants, matrix, residual, tile, sums)


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
    spec, group, values = matrix.spec, matrix.spec.kind.group, packed.values
    assert not spec.paired or interleaved(spec)
    in_all = how == linear_bytes.INT8.value and not group
    narrow = how == linear_bytes.E4M3_IN_FP16.value
    if narrow:
        codes, values = codes.view(torch.int8), values.view(torch.int8)
    tile = tile_for(codes.shape[0], narrow=narrow)
    tensors = (codes, x_scales, values, packed.scales)
    constants = (how, group, x_group, span_of(group))
    kernel, sums = linear_bytes.bytes_kernel, torch.int32 if in_all else torch.float32
    return _multiplied(kernel, codes, tensors, (), constants, matrix, residual, tile, sums)


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


def word_rows(
    packed: TritonPacked, spec: MatrixSpec, ids: Tensor | None, first: int, out: Tensor
) -> Tensor:
    """Write rows `ids` of a weight in words to out [rows, inputs], or rows from `first` on, without
    `ids`; then all rows of gate are before those of up. Return out."""
    kind, count = spec.kind, out.shape[0]
    steps = ceil_div(spec.inputs, STEP)
    order = packed.order if ids is not None else None
    launch(
        word_rows_kernel,
        (steps, ceil_div(count, ROWS_AT_ONCE)),
        (packed.values, packed.scales, packed.factors, order, ids, out),
        (first, count, spec.rows, spec.inputs, steps, packed.scales.shape[-1]),
        (*format_of(kind), kind.group, span_of(kind.group), interleaved(spec), ROWS_AT_ONCE),
    )
    return out


def widened_linear(
    x: Tensor, packed: TritonPacked, matrix: Matrix, residual: Tensor | None, scratch: Tensor
) -> Tensor:
    """Multiply x [tokens, inputs], unrounded, by a weight in words, widened to the dtype of x.

    Weights are rounded to that dtype after scaling. Floor: 2 * tokens * rows * inputs FLOPs; the
    bytes of the widened weights are written and read in addition.

    Args:
        scratch: bytes for widened rows, in which parts of the matrix follow each other.
    """
    spec, rows = matrix.spec, matrix.spec.rows
    values = scratch.view(x.dtype)
    parts = ceil_div(rows, values.shape[0] // spec.inputs // STEP * STEP)
    rows_per_part = ceil_div(ceil_div(rows, parts), STEP) * STEP
    plain = spec.activation is None and matrix.bias is None
    added = plain and residual is not None and residual.dtype == x.dtype
    z = residual if added else torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    assert z is not None
    for first in range(0, rows, rows_per_part):
        part = z if parts == 1 else z[:, first : first + rows_per_part]
        count = part.shape[1]
        out = values[: count * spec.inputs].view(count, spec.inputs)
        part.addmm_(x, word_rows(packed, spec, None, first, out).t(), beta=int(added))
    if plain and (added or residual is None):
        return z
    return finish(z, matrix.bias, spec.activation, residual, spec.out_dtype)


class TritonMatrices:
    """The rows `matrix`, `pack_rows`, `linear` and `matrix_rows` of `Ops`, for one device."""

    def __init__(self, device: torch.device, library: Library | None = None) -> None:
        """
        Args:
            library: support for E4M3; None: that of the device.
        """
        self.library = library or library_of(device)
        self._scratch: Tensor | None = None  # for widened weights

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
        spec, packed, kind = matrix.spec, matrix.data, matrix.spec.kind
        tokens = x.shape[0]  # len(x) takes four times as long
        if not tokens:
            return torch.empty(0, spec.outputs, dtype=spec.out_dtype, device=x.device)
        if isinstance(packed, Weight) and kind.floats:
            return float_linear(x, packed.values, matrix, residual)
        if not isinstance(packed, TritonPacked):
            return TORCH.linear(x, matrix, residual)
        if packed.order is not None:
            x = x.index_select(1, packed.order)
        if in_words(kind):
            if tokens <= MAX_IN_WORDS or spec.out_dtype != x.dtype:
                return words_linear(x, packed, matrix, residual)
            if self._scratch is None:
                self._scratch = torch.empty(WIDENED_BYTES, dtype=torch.uint8, device=x.device)
            return widened_linear(x, packed, matrix, residual, self._scratch)
        if kind.codes == "int8":
            filled = packed.values.shape[1]
            codes, x_scales = round_tokens(x, filled, kind.group, False, None)
            how = how_bytes(kind, self.library, x.dtype)
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
        if in_words(kind):
            return word_rows(packed, spec, ids, 0, out)
        codes = packed.values.view(torch.int8)
        launch(
            byte_rows_kernel,
            (len(ids), ceil_div(spec.inputs, BYTES_AT_ONCE)),
            (codes, packed.scales, packed.order, ids, out),
            (spec.inputs, codes.shape[1], packed.scales.shape[-1]),
            (format_of(kind)[0], kind.group, BYTES_AT_ONCE),
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
        if many and library.rows and packed.single_scale is not None and packed.single_scale.alike:
            codes, _ = round_tokens(x, filled, 0, True, packed.input_scale)
            assert packed.input_scale is not None
            row_scale = packed.scales[:1]
            z = product_of_wholes(
                codes, packed.input_scale, packed.values, row_scale, library.multiply
            )
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
            how = how_bytes(kind, library, x.dtype)
            if not spec.paired:
                return bytes_linear(codes, x_scales, x_group, how, packed, matrix, residual)
            plain = Matrix(replace(spec, activation=None), None, packed)
            z = bytes_linear(codes, x_scales, x_group, how, packed, plain, None)
        z = z[: len(x), : spec.rows]
        return finish(z, matrix.bias, spec.activation, residual, spec.out_dtype)
