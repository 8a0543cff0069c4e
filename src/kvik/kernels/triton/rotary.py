"""Normalise heads, apply rotary positions, and store K and V in the cache, in one launch.

Floor: memory. For each token q is read and written in place; k and v are read once, normalised,
rotated and rounded, and written to the cache once. k is written only there, as attention reads it
from the cache. A program processes a tile of heads of q, k or v of one token, about 1024 numbers,
so that a single token also keeps several SMs busy. For one token the launch dominates the time.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.kv_load import KINDS, stored
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two
from kvik.kernels.triton.rounding import round_in_eight_bits, round_in_four_bits

TILE = 1024  # numbers of a program


@triton.jit
def rotations_kernel(
    high, low, positions, out, last, low_rows, DIM: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """grid [tokens]; high [multiples, DIM], low [low_rows, DIM], positions [tokens], out [tokens,
    DIM]"""
    token = tl.program_id(0).to(tl.int64)
    position = tl.minimum(tl.load(positions + token), last)
    at = tl.arange(0, HALF)
    inside = at < DIM // 2
    high += position // low_rows * DIM + at
    low += position % low_rows * DIM + at
    cos, sin = tl.load(high, mask=inside), tl.load(high + DIM // 2, mask=inside)
    low_cos, low_sin = tl.load(low, mask=inside), tl.load(low + DIM // 2, mask=inside)
    out += token * DIM + at
    tl.store(out, cos * low_cos - sin * low_sin, mask=inside)
    tl.store(out + DIM // 2, cos * low_sin + sin * low_cos, mask=inside)


@triton.jit
def _rotate(low, high, rotation, at, inside, DIM: tl.constexpr):
    """Rotate both halves of some heads by the angles at `rotation`: fp32."""
    cos = tl.load(rotation + at, mask=inside, other=0.0)[None, :]
    sin = tl.load(rotation + DIM // 2 + at, mask=inside, other=0.0)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _halves(x, head, heads, at, inside, DIM: tl.constexpr):
    """Load a tile of heads: offsets, a mask, and both halves in fp32."""
    mask = (head < heads)[:, None] & inside[None, :]
    offset = head[:, None] * DIM + at[None, :]
    low = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + offset + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return offset, mask, low, high


@triton.jit
def _normalised(low, high, weight, eps, at, inside, DIM: tl.constexpr, dtype: tl.constexpr):
    """Normalise each head by its root mean square and the weight [DIM]; rounded as if it had been
    written to memory. low, high: 0 after the end of a half."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
    first = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    second = tl.load(weight + DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    low, high = low * scale * first, high * scale * second
    return low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)


@triton.jit
def _change_in_place(
    x, weight, eps, rotation, head, heads, at, inside,
    DIM: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    offset, mask, low, high = _halves(x, head, heads, at, inside, DIM)
    if NORMED:
        low, high = _normalised(low, high, weight, eps, at, inside, DIM, x.dtype.element_ty)
    if ROTATED:
        low, high = _rotate(low, high, rotation, at, inside, DIM)
    tl.store(x + offset, low.to(x.dtype.element_ty), mask=mask)
    tl.store(x + offset + DIM // 2, high.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _keep(
    x, weight, eps, rotation, cache, scales, slot, head, heads, at, inside,
    DIM: tl.constexpr, HALF: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Store heads of k or v of one token in the cache at position `slot`."""
    offset, mask, low, high = _halves(x, head, heads, at, inside, DIM)
    if NORMED:
        low, high = _normalised(low, high, weight, eps, at, inside, DIM, x.dtype.element_ty)
    if ROTATED:
        low, high = _rotate(low, high, rotation, at, inside, DIM)
        low = low.to(x.dtype.element_ty).to(tl.float32)  # as if written to memory
        high = high.to(x.dtype.element_ty).to(tl.float32)
    mask = mask & (slot >= 0)
    first = slot * heads  # vectors of the cache before this token
    if KIND == "float":
        to = cache + first * DIM + offset
        tl.store(to, low.to(cache.dtype.element_ty), mask=mask)
        tl.store(to + DIM // 2, high.to(cache.dtype.element_ty), mask=mask)
    else:
        if KIND == "int4":
            low, high, words = round_in_four_bits(low, high)
            low = _pairs(low, HALF)
            high = _pairs(high, HALF)
            at = tl.arange(0, HALF // 2)
            mask = (head < heads)[:, None] & (at < DIM // 4)[None, :] & (slot >= 0)
            to = cache + first * (DIM // 2) + head[:, None] * (DIM // 2) + at[None, :]
            tl.store(to, low.to(cache.dtype.element_ty), mask=mask)
            tl.store(to + DIM // 4, high.to(cache.dtype.element_ty), mask=mask)
        else:
            low, high, words = round_in_eight_bits(low, high, KIND == "fp8")
            to = cache + first * DIM + offset
            tl.store(to, low.to(cache.dtype.element_ty), mask=mask)
            tl.store(to + DIM // 2, high.to(cache.dtype.element_ty), mask=mask)
        tl.store(scales + first + head, words.to(tl.int16), mask=(head < heads) & (slot >= 0))


@triton.jit
def _pairs(codes, HALF: tl.constexpr):
    """Pack [rows, half] codes of four bits into [rows, half / 2] bytes, the first in the low
    bits."""
    even, odd = tl.split(tl.reshape(codes, (codes.shape[0], HALF // 2, 2)))
    return even | (odd << 4)


@triton.jit
def rotary_kernel(
    q, k, rotation, q_stride, k_stride, heads, kv_heads,
    DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """grid [tokens, tiles of q, then of k]; both in place"""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = at < DIM // 2
    q_tiles = tl.cdiv(heads, HEADS)
    rotation += token * DIM
    if tile < q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        x = q + token * q_stride
        _change_in_place(x, None, 0.0, rotation, head, heads, at, inside, DIM, True, False)
    else:
        head = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        x = k + token * k_stride
        _change_in_place(x, None, 0.0, rotation, head, kv_heads, at, inside, DIM, True, False)


@triton.jit
def store_kernel(
    q, k, v, q_weight, k_weight, rotation, k_cache, v_cache, k_scales, v_scales, slots,
    q_stride, k_stride, v_stride, heads, kv_heads, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, ROTATED: tl.constexpr,
    NORMED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """grid [tokens, tiles of q (if it is changed), then of k, then of v]"""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = tl.arange(0, HALF)
    inside = at < DIM // 2
    slot = tl.load(slots + token)
    kv_tiles = tl.cdiv(kv_heads, HEADS)
    if ROTATED:
        rotation += token * DIM
    if ROTATED or NORMED:
        tile -= tl.cdiv(heads, HEADS)
    if tile < 0:
        if ROTATED or NORMED:  # else there is no such tile
            head = (tile + tl.cdiv(heads, HEADS)) * HEADS + tl.arange(0, HEADS)
            _change_in_place(
                q + token * q_stride, q_weight, eps, rotation, head, heads, at, inside,
                DIM, ROTATED, NORMED,
            )  # fmt: skip
    elif tile < kv_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        _keep(
            k + token * k_stride, k_weight, eps, rotation, k_cache, k_scales, slot, head, kv_heads,
            at, inside, DIM, HALF, ROTATED, NORMED, KIND,
        )  # fmt: skip
    else:
        head = (tile - kv_tiles) * HEADS + tl.arange(0, HEADS)
        _keep(
            v + token * v_stride, None, eps, rotation, v_cache, v_scales, slot, head, kv_heads,
            at, inside, DIM, HALF, False, False, KIND,
        )  # fmt: skip


@triton.jit
def keep_queries_kernel(
    q, query_start, seq_lens, state_rows, ring, q_stride, scale,
    LAST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [last queries, sequences], the newest query first"""
    back = tl.program_id(0)
    sequence = tl.program_id(1)
    end = tl.load(query_start + sequence + 1)
    queries = end - tl.load(query_start + sequence)
    row = tl.load(state_rows + sequence)
    if (back >= queries) | (row < 0):
        return
    token = (end - 1 - back).to(tl.int64)
    place = (tl.load(seq_lens + sequence) - 1 - back) % LAST
    to = ring + (row.to(tl.int64) * LAST + place) * WIDTH
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(q + token * q_stride + at, mask=at < WIDTH, other=0.0)
        tl.store(to + at, x.to(tl.float32) * scale, mask=at < WIDTH)


def keep_queries(
    q: Tensor,
    ring: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_rows: Tensor,
    scale: float,
    max_queries: int,
) -> None:
    """Do the same as `attention.base.keep_queries`, with numbers read on the device.

    Args:
        q: [tokens, heads, head_dim], rotated. ring: [slots, last, heads, head_dim] fp32.
        state_rows: [sequences], rows of the ring; below 0: nothing is kept.
        max_queries: most queries of a sequence.
    """
    q = _with_whole_heads(q)
    last, width = ring.shape[1], ring.shape[2] * ring.shape[3]
    launch(
        keep_queries_kernel, (min(last, max_queries), len(seq_lens)),
        (q, query_start, seq_lens, state_rows, ring), (q.stride(0), scale),
        (last, width, min(1024, power_of_two(width))), enable_fp_fusion=False,
    )  # fmt: skip


def rotations(high: Tensor, low: Tensor, positions: Tensor, last: int) -> Tensor:
    """See `Ops`."""
    tokens, (rows, dim) = len(positions), low.shape
    out = torch.empty(tokens, dim, dtype=torch.float32, device=low.device)
    launch(
        rotations_kernel, (tokens,), (high, low, positions.contiguous(), out), (last, rows),
        (dim, power_of_two(max(2, dim // 2))), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def rotary(q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops`; q and k are overwritten, and returned."""
    q, k = _with_whole_heads(q), _with_whole_heads(k)
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    half, tile = _tile(dim, heads)
    launch(
        rotary_kernel, (tokens, ceil_div(heads, tile) + ceil_div(kv_heads, tile)), (q, k, rotation),
        (q.stride(0), k.stride(0), heads, kv_heads), (dim, half, tile),
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return q, k


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: Tensor | None,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Normalise and rotate q and k, and write k and v to the cache, rounded to its format.

    Args:
        q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]: head_dim is even. q is
            overwritten; k is not, as the changed k is written only to the cache.
        rotation: [tokens, head_dim] fp32, cosines, then sines; None: nothing is rotated.
        caches: of k and v, [blocks, block_size, kv_heads, head_dim], in four bits
            [..., head_dim / 2], contiguous. In four bits head_dim is a multiple of 4.
        scales: of both, [blocks, block_size, kv_heads], if caches are rounded.
        slots: [tokens] int64, the position of each token; -1: it is not stored.
        norms: of the heads of q and k: both weights [head_dim], and eps (`Ops.rms_norm`).

    Returns:
        q, normalised and rotated.
    """
    q, k, v = _with_whole_heads(q), _with_whole_heads(k), _with_whole_heads(v)
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    half, tile = _tile(dim, kv_heads)
    kind = KINDS[caches[0].dtype]
    k_cache, v_cache = (stored(cache) for cache in caches)
    # The bits of scales; without scales these are placeholders that are not written.
    k_scales, v_scales = caches if scales is None else (s.view(torch.int16) for s in scales)
    rotated, normed = rotation is not None, norms is not None
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    tiles = (ceil_div(heads, tile) if rotated or normed else 0) + 2 * ceil_div(kv_heads, tile)
    launch(
        store_kernel, (tokens, tiles),
        (
            q, k, v, q_weight, k_weight, q if rotation is None else rotation,
            k_cache, v_cache, k_scales, v_scales, slots,
        ),
        (q.stride(0), k.stride(0), v.stride(0), heads, kv_heads, eps),
        (dim, half, tile, rotated, normed, kind),
        num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return q


@cache
def _tile(dim: int, heads: int) -> tuple[int, int]:
    """Return the columns of half a head, and the heads, of a program's tile."""
    half = power_of_two(max(2, dim // 2))
    return half, min(max(1, TILE // (2 * half)), power_of_two(heads))


def _with_whole_heads(x: Tensor) -> Tensor:
    """Return x [tokens, heads, head_dim] with each token contiguous; tokens may be strided."""
    _, head, channel = x.stride()
    return x if channel == 1 and head == x.shape[2] else x.contiguous()
