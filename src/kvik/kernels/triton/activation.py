"""Activations of feed-forward layers. Everything is computed in fp32 and rounded once, at the end.

Floor: memory. One number is read and one written for each output, and a second one is read if gate
and up are multiplied. A program processes a block of a row, so that few long rows also fill the
GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.launch import in_blocks, launch
from kvik.kernels.weights import (
    ACTIVATIONS,
    PAIRED,
    SILU_LIMIT,
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    XIELU_SLOPE,
    Activation,
)

CLAMPED, TANH = tl.constexpr(ACTIVATIONS["clamped_swiglu"]), tl.constexpr(ACTIVATIONS["tanh"])
CLIPPED = tl.constexpr(ACTIVATIONS["clipped_swiglu"])
LIMIT, SLOPE = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_SLOPE)
LIMITED, SILU_MOST = tl.constexpr(ACTIVATIONS["limited_swiglu"]), tl.constexpr(SILU_LIMIT)
SLOPE_AT_0 = tl.constexpr(XIELU_SLOPE)
MOST = 1024  # elements of a program: 16 bytes of bf16 at a time for each of 128 threads


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    z = tl.exp(-tl.abs(x))  # never overflows
    return tl.where(x < 0, z, 1.0) / (1.0 + z)


@triton.jit
def gelu(x):
    """GELU of fp32 in its tanh form."""
    # (1 + tanh(z)) / 2 = sigmoid(2 z), where z = sqrt(2 / pi) (x + 0.044715 x^3)
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def capped(x, cap):
    """cap * tanh(x / cap) of fp32; near 0, where exponentials would cancel, by a polynomial that is
    explained in csrc/simd.hpp."""
    x /= cap
    square = x * x
    p = (1.6432008781e-2 * square - 5.2668025893e-2) * square + 1.3320643329e-1
    near = x + x * square * (p * square - 3.3332941164e-1)
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    return cap * tl.where(tl.abs(x) < 0.55, near, tl.where(x < 0.0, -far, far))


@triton.jit
def above_zero(x):
    """max(0, x), and NaN of NaN, of which `tl.maximum` makes 0 on a GPU."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation, numbered as in `ACTIVATIONS`, to fp32; for a paired one, to the gate."""
    if ACTIVATION == 1:
        x = x * sigmoid(x)
    elif ACTIVATION // 2 == 1:
        x = gelu(x)
    elif ACTIVATION // 2 == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 6:
        x = above_zero(x)
    elif ACTIVATION == 8:
        x = above_zero(x) * above_zero(x)
    elif ACTIVATION == CLAMPED:
        x = tl.where(x > LIMIT, LIMIT, x)
        x = x * sigmoid(x * SLOPE)
    elif ACTIVATION == LIMITED:
        x = tl.where(x > SILU_MOST, SILU_MOST, x)
        x = x * sigmoid(x)
    elif ACTIVATION == TANH:
        x = capped(x, 1.0)
    elif ACTIVATION == CLIPPED:
        x = x * sigmoid(x)
        x = tl.where(x > LIMIT, LIMIT, x)
    return x


@triton.jit
def limited(x, LIMIT: tl.constexpr):
    x = tl.where(x > LIMIT, LIMIT, x)
    return tl.where(x < -LIMIT, -LIMIT, x)


@triton.jit
def factor_of(up, ACTIVATION: tl.constexpr):
    """Return the factor of the gate of a paired activation, fp32."""
    if ACTIVATION == CLAMPED:
        up = limited(up, LIMIT) + 1.0
    elif ACTIVATION == LIMITED:
        up = limited(up, SILU_MOST)
    elif ACTIVATION == CLIPPED:
        up = limited(up, LIMIT)
    return up


@triton.jit
def activate_kernel(x, out, columns, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """grid [rows, blocks]; x [rows, columns, or twice as many if gate and up are multiplied]"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    first = x + row * row_stride + at
    y = activated(tl.load(first, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if ACTIVATION % 2 == 1:
        up = tl.load(first + columns, mask=inside, other=0.0).to(tl.float32)
        y *= factor_of(up, ACTIVATION)
    tl.store(out + row * columns + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def xielu_kernel(x, out, columns, row_stride, positive, negative, BLOCK: tl.constexpr):
    """grid [rows, blocks]; x [rows, columns]"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    wide = tl.load(x + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    twice = capped(tl.minimum(wide, 0.0), 2.0)  # 2 tanh(x / 2), near 0 more accurate than e^x - 1
    below = negative * (twice / (1.0 - 0.5 * twice) - wide)
    y = tl.where(wide > 0.0, positive * wide * wide, below) + SLOPE_AT_0 * wide
    tl.store(out + row * columns + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scaled_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    """grid [blocks]; x, out [n]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * factor).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def softcap_kernel(x, n, cap, BLOCK: tl.constexpr):
    """grid [blocks]; x [n]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, capped(tl.load(x + at, mask=at < n, other=0.0), cap), mask=at < n)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """See `Ops`."""
    rows, columns = len(x), x.shape[1] // 2 if activation in PAIRED else x.shape[1]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block, blocks = in_blocks(columns, MOST)
    numbers, constants = (columns, x.stride(0)), (ACTIVATIONS[activation], block)
    launch(activate_kernel, (rows, blocks), (x, out), numbers, constants)
    return out


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    """See `Ops`."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    block, blocks = in_blocks(columns, MOST)
    numbers = columns, x.stride(0), positive, negative
    launch(xielu_kernel, (rows, blocks), (x, out), numbers, (block,))
    return out


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor, of any shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    block, blocks = in_blocks(x.numel(), MOST)
    launch(scaled_kernel, (blocks,), (x, out), (x.numel(), factor), (block,))
    return out


def softcap(x: Tensor, cap: float) -> None:
    """See `Ops`; x is contiguous."""
    block, blocks = in_blocks(x.numel(), MOST)
    launch(softcap_kernel, (blocks,), (x,), (x.numel(), cap), (block,))
