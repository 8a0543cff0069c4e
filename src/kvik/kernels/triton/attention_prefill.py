"""Attention of many queries over the paged cache: FlashAttention-2 (Dao 2023), section 3.

A program has one tile of queries and one KV head, whose query heads share the tile: row i of a
sequence is query i / group with head i % group, so a tile of 128 rows reads K and V once for all of
them. A chunk behind a cached prefix is the general case: queries are the last of their context.
Tiles of keys that no row sees are not visited, and only those that some row does not see are
masked: at the diagonal, and at the lower edge of a window.

Programs find their sequence on the device, by bisection: tiles of sequence i begin at
(its first token) * group / rows + i, which leaves room for a partial tile of each. The last tiles
of a sequence see most keys and are launched first, so that short ones fill the end.

Invariance: tiles begin where their sequence does, so a sequence has the same bits in any company;
how it is cut into chunks changes them by rounding.

Floor: arithmetic. 4 * head_dim FLOPs per query, query head and key seen: half of all for a causal
prompt without prefix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvik.kernels.triton.attention_shapes import block_d, prefill_tiles
from kvik.kernels.triton.attention_tile import attend, begin, finish
from kvik.kernels.triton.kv_load import KINDS, operand, pointers
from kvik.kernels.triton.launch import Loop, Resources


@triton.jit
def sequence_at(query_start, tile, first_sequence, sequences, GROUP, BLOCK_M):
    """(sequence, its first tile), of a tile of the launch."""
    base = tl.load(query_start + first_sequence)
    low = first_sequence
    high = first_sequence + sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = (tl.load(query_start + middle) - base) * GROUP // BLOCK_M + middle - first_sequence
        if begins <= tile:
            low = middle
        else:
            high = middle - 1
    return low, (tl.load(query_start + low) - base) * GROUP // BLOCK_M + low - first_sequence


# Numbers that change from step to step must not compile anew.
@triton.jit(do_not_specialize=["table_stride", "window", "first_sequence", "sequences", "above"])
def attention_prefill_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    block_table,
    query_start,
    seq_lens,
    out,
    q_stride,
    table_stride,
    scale,
    window,
    first_sequence,
    sequences,
    above,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NEAR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """grid [KV heads * tiles]; q, out [tokens, heads, HEAD_DIM]

    Args:
        above: sequences of no more queries are left alone.
        BLOCK_N: keys of a tile; BLOCK_NEAR: where not every row sees all of them.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    HEADS: tl.constexpr = GROUP * KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    sequence, begins = sequence_at(query_start, tile, first_sequence, sequences, GROUP, BLOCK_M)
    tile -= begins
    start = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - start
    if (queries <= above) | (tile * BLOCK_M >= queries * GROUP):
        return
    cached = tl.load(seq_lens + sequence) - queries
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    d = tl.arange(0, BLOCK_D)
    real = (query < queries)[:, None] & (d < HEAD_DIM)[None, :]
    token = (start + query).to(tl.int64)
    lane = ((head * GROUP + row % GROUP) * HEAD_DIM)[:, None] + d[None, :]
    rows = operand(tl.load(q + token[:, None] * q_stride + lane, mask=real, other=0.0), DTYPE)
    position = cached + query
    table = block_table + sequence.to(tl.int64) * table_stride

    lowest = cached + tile * BLOCK_M // GROUP
    highest = cached + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
    # Keys first .. end - 1 are seen by some row, and whole tiles low .. high - 1 by all of them.
    end = highest + 1
    first = 0
    low = 0
    if WINDOW:
        first = tl.maximum(lowest - window + 1, 0)
        low = tl.cdiv(tl.maximum(highest - window + 1, 0), BLOCK_N) * BLOCK_N
    high = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, low)

    state = begin(BLOCK_M, BLOCK_D, 0)
    for part in tl.static_range(3):
        step = BLOCK_N if part == 1 else BLOCK_NEAR
        if part == 0:
            since, until = first // step * step, tl.minimum(low, end)
        elif part == 1:
            since, until = low, high
        else:
            since, until = high, end
        if part != 0 or WINDOW:
            for at in range(since, until, step):
                place = at + tl.arange(0, BLOCK_N if part == 1 else BLOCK_NEAR)
                visible = place[None, :] <= position[:, None]
                there = tl.minimum(place, end - 1)
                if WINDOW:
                    visible &= place[None, :] > position[:, None] - window
                    there = tl.maximum(there, first)
                state = attend(
                    rows,
                    state,
                    k_cache,
                    v_cache,
                    k_scales,
                    v_scales,
                    table,
                    head,
                    at,
                    there,
                    visible,
                    scale,
                    DTYPE,
                    KIND,
                    KV_HEADS,
                    BLOCK_SIZE,
                    HEAD_DIM,
                    BLOCK_D,
                    part == 1,
                )
    sums, _, total = state
    target = out + (token * HEADS * HEAD_DIM)[:, None] + lane
    tl.store(target, finish(sums, total).to(DTYPE), mask=real)


def _resources(
    head_dim: int, cache: torch.dtype, window: bool = False, loop: Loop | None = None
) -> Resources:
    """Of Llama-3's groups of 4 heads, in bf16, or fp32 as the cache is."""
    pointer, scales = pointers(cache)
    tiles = prefill_tiles(head_dim, max(2, cache.itemsize), rounded=bool(scales))
    queries = "*fp32" if cache == torch.float32 else "*bf16"
    return Resources(
        kernel=attention_prefill_kernel,
        what=f"head_dim {head_dim}, KV {str(cache).removeprefix('torch.')}{', window' * window}",
        types={
            "q": queries,
            "k_cache": pointer,
            "v_cache": pointer,
            "k_scales": scales,
            "v_scales": scales,
            "block_table": "*i32",
            "query_start": "*i32",
            "seq_lens": "*i32",
            "out": queries,
            "q_stride": "i32",
            "table_stride": "i32",
            "scale": "fp32",
            "window": "i32",
            "first_sequence": "i32",
            "sequences": "i32",
            "above": "i32",
        },
        constants={
            **({} if scales else {"k_scales": None, "v_scales": None}),
            "GROUP": 4,
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d(head_dim),
            "BLOCK_M": tiles.m,
            "BLOCK_N": tiles.n,
            "BLOCK_NEAR": tiles.near,
            "BLOCK_SIZE": 16,
            "KIND": KINDS[cache],
            "WINDOW": window,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        aligned=frozenset({"q_stride"}),
        loop=loop,
    )


# 128 keys of 128: 8 products with K and 8 with V, each for two groups of warps 64 cycles, and
# one wait for both.
_TILE = Loop(copies=16, products=16, waits=1, barriers=2, instructions=530)

RESOURCES = (
    _resources(64, torch.bfloat16, loop=Loop(copies=8, products=12, waits=1, barriers=2)),
    _resources(128, torch.bfloat16, loop=_TILE),
    _resources(128, torch.bfloat16, window=True, loop=_TILE),
    _resources(256, torch.bfloat16, loop=Loop(copies=8, products=18, waits=1, barriers=2)),
    *(
        _resources(head_dim, cache, loop=Loop(copies=4, products=6, waits=2))
        for head_dim, cache in (
            (64, torch.int8),
            (128, torch.float8_e4m3fn),
            (128, torch.int8),
            (256, torch.float8_e4m3fn),
        )
    ),
    _resources(128, torch.uint8, loop=Loop(copies=4, products=12, waits=2, instructions=1020)),
    _resources(128, torch.float32),
    _resources(256, torch.float32),
)
