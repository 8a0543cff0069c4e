"""Normalisation, and what else needs sums over rows. Everything is computed in fp32 and rounded
once, at the end.

Floor: memory; each number is read and written once. A whole row is in registers; a program
processes several short rows, such as the heads that Qwen3 normalises.

The residual is not added here: the product before a norm adds it, in place in the residual stream
(`linear`), which is then read once, here. With the addition in the norm, product and norm together
would move five numbers per element of the hidden state instead of four, in as many launches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.activation import above_zero, activated, factor_of, sigmoid
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two
from kvik.kernels.weights import ACTIVATIONS, Activation

TILE = 1024  # numbers per program, if rows are shorter
LONGEST = 65536  # numbers of a row, which must fit into the registers of a program


@triton.jit
def _rows_of(rows, inner, outer_stride, inner_stride, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return the offsets of this program's rows in x and in out, the columns, and a mask."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, DIM)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    mask = (row < rows)[:, None] & (at < dim)[None, :]
    own = row.to(tl.int64)[:, None] * dim + at[None, :]
    return start[:, None] + at[None, :], own, at, mask


@triton.jit
def _gains(own, at, mask, inner, dim, EACH: tl.constexpr):
    """Return the offsets of the gains of this program's rows, and a mask."""
    if EACH:
        gain, inside = own % (inner * dim), mask
    else:
        gain, inside = at[None, :], (at < dim)[None, :]
    return gain, inside


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, out, rows, inner, outer_stride, inner_stride, dim, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """grid [groups of rows]; x [rows / inner, inner, dim], out [rows, dim]. EACH: weight [inner,
    dim], else [dim]"""
    there, own, at, mask = _rows_of(rows, inner, outer_stride, inner_stride, dim, ROWS, DIM)
    wide = tl.load(x + there, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)
    gain, inside = _gains(own, at, mask, inner, dim, EACH)
    by = tl.load(weight + gain, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + own, (wide * scale[:, None] * by).to(out.dtype.element_ty), mask=mask)


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["rows"])
def layer_norm_kernel(
    x, weight, bias, out, rows, inner, outer_stride, inner_stride, dim, eps,
    ROWS: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """grid [groups of rows]; x [rows / inner, inner, dim], out [rows, dim]. EACH: weight and bias
    [inner, dim], else [dim]"""
    there, own, at, mask = _rows_of(rows, inner, outer_stride, inner_stride, dim, ROWS, DIM)
    wide = tl.load(x + there, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, wide - (tl.sum(wide, 1) / dim)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / dim + eps)
    gain, inside = _gains(own, at, mask, inner, dim, EACH)
    by = tl.load(weight + gain, mask=inside, other=0.0).to(tl.float32)
    plus = tl.load(bias + gain, mask=inside, other=0.0).to(tl.float32)
    y = centred * scale[:, None] * by + plus
    tl.store(out + own, y.to(out.dtype.element_ty), mask=mask)


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["rows"])
def rescaled_kernel(
    x, like, out, rows, inner, outer_stride, inner_stride, like_stride, dim, least_square,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """grid [groups of rows]; x [rows / inner, inner, dim], like [rows / inner, dim], out [rows,
    dim]"""
    there, own, at, mask = _rows_of(rows, inner, outer_stride, inner_stride, dim, ROWS, DIM)
    first = ((tl.program_id(0) * ROWS + tl.arange(0, ROWS)) // inner).to(tl.int64) * like_stride
    wide = tl.load(x + there, mask=mask, other=0.0).to(tl.float32)
    model = tl.load(like + first[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)
    square = tl.maximum(tl.sum(wide * wide, 1) / dim, least_square)
    factor = tl.sqrt(tl.sum(model * model, 1) / dim) / tl.sqrt(square)
    tl.store(out + own, (wide * factor[:, None]).to(out.dtype.element_ty), mask=mask)


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["rows"])
def activate_top_kernel(
    x, out, rows, stride, dim, deviations,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """grid [groups of rows]; x [rows, 2 dim], out [rows, dim]"""
    there, own, _, mask = _rows_of(rows, 1, stride, 0, dim, ROWS, DIM)
    gate = tl.load(x + there, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, gate - (tl.sum(gate, 1) / dim)[:, None], 0.0)
    std = tl.sqrt(tl.sum(centred * centred, 1) / dim)
    top = activated(above_zero(centred - deviations * std[:, None]), ACTIVATION)
    up = tl.load(x + there + dim, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + own, (top * factor_of(up, ACTIVATION)).to(out.dtype.element_ty), mask=mask)


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["rows"])
def stream_weights_kernel(
    x, logits, factors, out, rows, stride, logits_stride, dim, columns, eps, rounds,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, STREAMS: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """grid [groups of rows]; x [rows, dim], logits [rows, columns], factors [4, columns], out
    [rows, columns]. SIDE: STREAMS, or the next power of two."""
    there, _, _, mask = _rows_of(rows, 1, stride, 0, dim, ROWS, DIM)
    wide = tl.load(x + there, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    single = columns - STREAMS * STREAMS
    one, all_of = at < single, (row < rows)[:, None] & (at < single)[None, :]
    gains = tl.load(factors + at, mask=one, other=0.0)
    biases = tl.load(factors + columns + at, mask=one, other=0.0)
    most = tl.load(factors + 2 * columns + at, mask=one, other=0.0)
    least = tl.load(factors + 3 * columns + at, mask=one, other=0.0)
    each = tl.load(logits + row[:, None] * logits_stride + at[None, :], mask=all_of, other=0.0)
    shares = sigmoid(each * scale[:, None] * gains[None, :] + biases[None, :])
    to = out + row[:, None] * columns + at[None, :]
    tl.store(to, most[None, :] * shares + least[None, :], mask=all_of)
    if STREAMS > 0:
        i, j = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
        inside = (i < STREAMS) & (j < STREAMS)
        of = single + i * STREAMS + j
        gains = tl.load(factors + of, mask=inside, other=0.0)
        biases = tl.load(factors + columns + of, mask=inside, other=0.0)
        least = tl.load(factors + 4 * columns - 1)
        # What is added to sums; to those of padding, so that they are not 0.
        of_rows, of_columns = tl.where(i < STREAMS, least, 1.0), tl.where(j < STREAMS, least, 1.0)
        mask = inside & (row < rows)[:, None, None]
        each = tl.load(logits + row[:, None, None] * logits_stride + of, mask=mask, other=0.0)
        m = tl.where(inside, each * scale[:, None, None] * gains + biases, float("-inf"))
        m = tl.exp(m - tl.max(tl.where(i < STREAMS, m, 0.0), 2, keep_dims=True))
        total = tl.sum(m, 2, keep_dims=True) + tl.where(i < STREAMS, 0.0, 1.0)
        m = tl.where(inside, m / total + least, 0.0)
        m = m / (tl.sum(m, 1, keep_dims=True) + of_columns)
        for _ in range(rounds - 1):
            m = m / (tl.sum(m, 2, keep_dims=True) + of_rows)
            m = m / (tl.sum(m, 1, keep_dims=True) + of_columns)
        there = out + row[:, None, None] * columns + single + j * STREAMS + i
        tl.store(there, m, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops`."""
    return _normalise(rms_norm_kernel, x, eps, weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `Ops`."""
    return _normalise(layer_norm_kernel, x, eps, weight, bias)


def rescaled(x: Tensor, like: Tensor, least_square: float) -> Tensor:
    """See `Ops`."""
    x, inner, outer_stride, inner_stride = _as_rows(x)
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    dim, rows = x.shape[-1], x.numel() // x.shape[-1]
    block, at_once, warps = shape_of(dim)
    launch(
        rescaled_kernel, (ceil_div(rows, at_once),), (x, like, out),
        (rows, inner, outer_stride, inner_stride, like.stride(0), dim, least_square),
        (at_once, block), num_warps=warps,
    )  # fmt: skip
    return out


def activate_top(x: Tensor, activation: Activation, deviations: float) -> Tensor:
    """See `Ops`."""
    rows, dim = len(x), x.shape[1] // 2
    out = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    block, at_once, warps = shape_of(dim)
    launch(
        activate_top_kernel, (ceil_div(rows, at_once),), (x, out),
        (rows, x.stride(0), dim, deviations), (ACTIVATIONS[activation], at_once, block),
        num_warps=warps,
    )  # fmt: skip
    return out


def stream_weights(
    x: Tensor, logits: Tensor, factors: Tensor, eps: float, streams: int, rounds: int
) -> Tensor:
    """See `Ops`."""
    rows, dim = x.shape
    columns = logits.shape[1]
    out = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    block, at_once, warps = shape_of(dim)
    launch(
        stream_weights_kernel, (ceil_div(rows, at_once),), (x, logits, factors, out),
        (rows, x.stride(0), logits.stride(0), dim, columns, eps, rounds),
        (power_of_two(columns), at_once, block, streams, power_of_two(streams or 1)),
        num_warps=warps,
    )  # fmt: skip
    return out


def _normalise(kernel: Any, x: Tensor, eps: float, weight: Tensor, *bias: Tensor) -> Tensor:
    """Launch a kernel on the rows of x [..., dim]."""
    x, inner, outer_stride, inner_stride = _as_rows(x)
    out = torch.empty(*x.shape, dtype=x.dtype, device=x.device)
    dim, rows = x.shape[-1], x.numel() // x.shape[-1]
    block, at_once, warps = shape_of(dim)
    launch(
        kernel, (ceil_div(rows, at_once),), (x, weight, *bias, out),
        (rows, inner, outer_stride, inner_stride, dim, eps), (at_once, block, weight.dim() == 2),
        num_warps=warps,
    )  # fmt: skip
    return out


@cache
def shape_of(dim: int) -> tuple[int, int, int]:
    """Return the columns, rows and warps of a program: 16 numbers for each thread.

    Raises:
        ValueError: a row does not fit.
    """
    if dim > LONGEST:
        raise ValueError(f"rows of {dim} numbers: at most {LONGEST} can be normalised")
    block = power_of_two(dim)
    rows = max(1, TILE // block)
    return block, rows, min(16, max(1, block * rows // 512))


def _as_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x, the rows in a run of one stride, and the strides of such runs and of rows."""
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2 and x.stride(1) == 1:
        return x, 1, x.stride(0), 0
    x = x.contiguous()
    return x, 1, x.shape[-1], 0
