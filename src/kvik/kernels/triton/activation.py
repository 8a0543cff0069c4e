"""Activations of feed-forward layers. Everything is computed in fp32 and rounded once, at the end.

Floor: memory. silu_and_mul reads 2 and writes 1 number for each output, gelu_tanh reads and writes
one; a program takes a block of a row, so that few long rows also fill the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.launch import ceil_div, power_of_two

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
def gated_kernel(gate_up, out, inner, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """grid [rows, blocks]; gate_up [rows, 2 * inner], out [rows, inner]"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + inner + at, mask=inside, other=0.0).to(tl.float32)
    y = (gelu(gate) if GELU else gate * sigmoid(gate)) * up
    tl.store(out + row * inner + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scaled_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    """grid [blocks]; x, out [n]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * factor).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def gelu_tanh_kernel(x, out, n, BLOCK: tl.constexpr):
    """grid [blocks]; x, out [n]"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, gelu(wide).to(out.dtype.element_ty), mask=at < n)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020): gate_up [tokens, 2 * inner] -> [tokens, inner]."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up (Shazeer 2020): gate_up [tokens, 2 * inner] -> [tokens, inner]."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(MOST, power_of_two(inner))
    grid = (rows, ceil_div(inner, block))
    gated_kernel[grid](gate_up, out, inner, gate_up.stride(0), gelu, block)
    return out


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016), of any shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    block = min(MOST, power_of_two(x.numel()))
    gelu_tanh_kernel[(ceil_div(x.numel(), block),)](x, out, x.numel(), block)
    return out


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor, of any shape."""
    x = x.contiguous()
    out = torch.empty_like(x)
    block = min(MOST, power_of_two(x.numel()))
    scaled_kernel[(ceil_div(x.numel(), block),)](x, out, x.numel(), factor, block)
    return out
