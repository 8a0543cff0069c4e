"""Normalisation. Everything is computed in fp32 and rounded once, at the end.

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

from kvik.kernels.triton.launch import ceil_div, launch, power_of_two

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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops`."""
    return _normalise(rms_norm_kernel, x, eps, weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `Ops`."""
    return _normalise(layer_norm_kernel, x, eps, weight, bias)


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
