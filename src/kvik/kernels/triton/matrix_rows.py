"""Rows of a quantised weight as floats: embeddings of tokens. Floor: the bytes of the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvik.kernels.triton.launch import TYPES, Resources
from kvik.kernels.triton.words import (
    E4M3,
    INT4,
    MINIMUM,
    NOTHING,
    ZERO,
    fp16_pair,
    plane_of,
    scale_and_zero,
)


@triton.jit
def _scaled(
    q,
    scales,
    factors,
    row,
    k,
    scale_stride,
    BESIDE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """q of inputs k of a row -> weights, fp32; of INT4 q has 16 too much."""
    if GROUP == 0:
        w = q * tl.load(scales + row)
    else:
        at = scales + k // GROUP * scale_stride + row
        if BESIDE == NOTHING:
            w = q * tl.load(at)
        elif BESIDE == MINIMUM:
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
    BESIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    TILES: tl.constexpr,
):
    """grid [n, tiles / TILES]; out [n, inputs]. HALVES: lower halves of words are neighbours."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + n)
    PLANES: tl.constexpr = 4 if FORMAT == INT4 else 2
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
            y = _scaled(q, scales, factors, row, known, scale_stride, BESIDE, GROUP)
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
    """grid [n, pieces]; values [rows, filled] int8, or bits of E4M3 as such; out [n, inputs]"""
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
    y = _scaled(q, scales, None, row, known, scale_stride, NOTHING, GROUP)
    to = tl.load(order + known) if order is not None else known
    tl.store(out + n * inputs + to, y.to(out.dtype.element_ty), mask=inside)


TILES_AT_ONCE = 4  # of 16 words: 512 weights of four bits
BYTES_AT_ONCE = 1024

_BF16, _FP32, _INT32, _INT64, _INT8 = (
    f"*{TYPES[t]}" for t in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.int8)
)
_SIZES = dict.fromkeys(("inputs", "tiles", "filled", "scale_stride"), "i32")

RESOURCES = (
    Resources(
        word_rows_kernel,
        "int4 in groups of 128, bf16",
        {"words": _INT32, "scales": _INT32, "ids": _INT64, "out": _BF16, **_SIZES},
        {
            "factors": None,
            "order": None,
            "FORMAT": INT4.value,
            "BESIDE": ZERO.value,
            "GROUP": 128,
            "HALVES": False,
            "TILES": TILES_AT_ONCE,
        },
        aligned=frozenset({"inputs", "scale_stride"}),
        max_registers=64,
    ),
    Resources(
        byte_rows_kernel,
        "E4M3, bf16",
        {"values": _INT8, "scales": _FP32, "ids": _INT64, "out": _BF16, **_SIZES},
        {"order": None, "FORMAT": E4M3.value, "GROUP": 0, "BLOCK": BYTES_AT_ONCE},
        aligned=frozenset({"inputs", "filled", "scale_stride"}),
        max_registers=64,
    ),
)
