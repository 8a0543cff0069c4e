"""Attention of many queries over the paged cache: FlashAttention-2 (Dao 2023), section 3.

A program has one tile of queries and one KV head, whose query heads share the tile: row i of a
sequence is query i / group with head i % group, so a tile of 128 rows reads K and V once for all of
them. A chunk after a cached prefix is the general case: queries are the last of their context.
Tiles of keys that no row sees are skipped, and only tiles that some row does not see completely are
masked: at the diagonal, and at the lower edge of a window.

Programs find their sequence on the device, by bisection: tiles of sequence i begin at
(its first token) * group / rows + i, which leaves space for a partial tile of each. The last tiles
of a sequence see most keys and are launched first, so that short ones fill the end.

Invariance: tiles begin where their sequence does, so the bits of a sequence do not depend on the
batch; its division into chunks changes them by rounding.

Floor: arithmetic. 4 * head_dim FLOPs per query, query head and key seen: half of all for a causal
prompt without prefix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.triton.attention_tile import (
    LAST_AND_SINKS,
    OF_STEPS,
    attend,
    begin,
    finish,
    first_seen,
    from_sinks,
    seen_by,
    slope_of,
    unit_of,
    with_sinks,
)
from kvik.kernels.triton.kv_load import operand


@triton.jit
def sequence_at(query_start, tile, first_sequence, sequences, GROUP, BLOCK_M):
    """Return (sequence, its first tile) for a tile of the launch."""
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


@triton.jit
def first_of(
    lowest, highest, first_keys, sequence, window, sink_keys, BLOCK_N, WINDOW: tl.constexpr
):
    """Return the first key that some row of a tile sees, apart from sinks, and the start of the
    first tile of keys that is not cut off below for any row.

    Args:
        lowest, highest: positions of the rows. first_keys: see the kernel.
    """
    first = 0
    low = 0
    if WINDOW:
        first = tl.maximum(first_seen(lowest, window, WINDOW), 0)
        low = tl.maximum(first_seen(highest, window, WINDOW), 0)
    if WINDOW == LAST_AND_SINKS:
        first = tl.minimum(tl.maximum(first, sink_keys), highest)
        low = tl.maximum(low, sink_keys)
    if first_keys is not None:
        first = tl.maximum(first, tl.load(first_keys + sequence))
        low = tl.maximum(low, first)
    return first, tl.cdiv(low, BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=OF_STEPS)
def attention_prefill_kernel(
    q, sink_q, k_cache, v_cache, k_scales, v_scales, block_table, query_start, seq_lens, first_keys,
    sinks, slopes, out,
    q_stride, sink_q_stride, table_stride, scale, softcap, window, sink_keys, first_sequence,
    sequences, above,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_NEAR: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """grid [KV heads * tiles]; q, sink_q, out [tokens, heads, HEAD_DIM]

    Args:
        sink_q: q for the first `sink_keys` keys, if there are sinks.
        first_keys: [sequences], the first key that any query sees; may be None.
        above: sequences of at most this many queries are skipped.
        BLOCK_N: keys of a tile that all rows see; BLOCK_NEAR: of other tiles.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    HEADS: tl.constexpr = GROUP * KV_HEADS
    SUNK: tl.constexpr = WINDOW == LAST_AND_SINKS
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
    query_head = head * GROUP + row % GROUP
    lane = (query_head * HEAD_DIM)[:, None] + d[None, :]
    rows = operand(tl.load(q + token[:, None] * q_stride + lane, mask=real, other=0.0), DTYPE)
    position = cached + query
    table = block_table + sequence.to(tl.int64) * table_stride

    lowest = cached + tile * BLOCK_M // GROUP
    highest = cached + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
    # Keys first .. end - 1 are seen by some row, and whole tiles low .. high - 1 by all rows; sinks
    # are a separate part, with other factors.
    end = highest + 1
    first, low = first_of(lowest, highest, first_keys, sequence, window, sink_keys, BLOCK_N, WINDOW)
    high = tl.maximum((lowest + 1) // BLOCK_N * BLOCK_N, low)

    slope = None if slopes is None else slope_of(slopes, query_head)
    state = begin(BLOCK_M, BLOCK_D, 0)
    for part in tl.static_range(0 if SUNK else 1, 4):
        factors = rows
        step = BLOCK_N if part == 2 else BLOCK_NEAR
        origin = from_sinks(position, window, sink_keys, part == 0)
        if part == 0:
            at = sink_q + token[:, None] * sink_q_stride + lane
            factors = operand(tl.load(at, mask=real, other=0.0), DTYPE)
            since, until = 0, tl.minimum(sink_keys, end)
        elif part == 1:
            since, until = first // step * step, tl.minimum(low, end)
        elif part == 2:
            since, until = low, high
        else:
            since, until = high, end
        if part != 1 or WINDOW or first_keys is not None:
            for at in range(since, until, step):
                place = at + tl.arange(0, BLOCK_N if part == 2 else BLOCK_NEAR)
                visible = place[None, :] <= position[:, None]
                there = tl.minimum(place, (until if part == 0 else end) - 1)
                if WINDOW:
                    visible &= seen_by(place, position, window, sink_keys, WINDOW, part == 0)
                if first_keys is not None:
                    visible &= (place >= first)[None, :]
                if part != 0:
                    there = tl.maximum(there, first)
                state = attend(
                    factors, state, k_cache, v_cache, k_scales, v_scales, table, head, at, there,
                    visible, scale, softcap, slope, place, origin,
                    DTYPE, KIND, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, part == 2,
                )  # fmt: skip
    sums, total = with_sinks(state, unit_of(scale, softcap, slopes), sinks, query_head)
    target = out + (token * HEADS * HEAD_DIM)[:, None] + lane
    tl.store(target, finish(sums, total).to(DTYPE), mask=real)
