"""Attention of few queries over a long context: the keys are split between programs.

"Flash-decoding" (Dao et al. 2023): one query leaves a GPU idle unless many programs read its keys
at once; a second kernel merges their results. The query heads of a KV head are the rows of one
tile (16 at least), so K and V are read once. Several queries, of drafts or of a short chunk, are
more rows of the tile.

Invariance: where a context is split depends only on the sequence (`attention_shapes.split`), not
on the batch; a program takes every `programs`-th split of its sequence, one after the other, so
that neither short nor many sequences leave programs idle. The tile's rows depend on the sequence's
own number of queries. So the bits of a sequence do not depend on the batch. (A sequence with enough
queries to fill 64 rows has smaller tiles in a step with trees, and differs by rounding.)

Each split has a result and the logarithm of its total weight; the whole is their weighted mean,
relative to the largest. Splits are added in their order, in blocks of `AT_ONCE`.

Captured graphs: the grid comes from the host's maxima, lengths are read on the device. A row whose
seq_len is 0 writes zeros. A sequence with fewer queries than were captured is computed in tiles of
the captured height, and may differ by rounding from an eager step.

Trees: of this step's keys, a query sees those in its word (see attention/base.py).

Sinks of a window are keys of a sequence's first split, with separate factors (`Attend`). So they
need no additional result to merge, and their cost does not grow with the context.

Floor: memory. Reads context * kv_heads * head_dim * 2 numbers per sequence, and per split and query
head writes and reads head_dim + 1 numbers of 4 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.triton.attention_shapes import SPREAD, split
from kvik.kernels.triton.attention_tile import (
    LAST_AND_SINKS,
    LOG2,
    attend,
    begin,
    bits_set,
    ended,
    finish,
    first_seen,
    log2_weight,
    seen_by,
    unit_of,
    with_sinks,
)
from kvik.kernels.triton.kv_load import operand

AT_ONCE = tl.constexpr(16)  # splits that a program merges at once


@triton.jit
def sequence_of(
    query_start,
    seq_lens,
    first_keys,
    sequence,
    window,
    GROUP,
    KV_HEADS,
    BLOCK_M,
    WINDOW: tl.constexpr,
):
    """Divide a sequence into splits, in the same way for the split and the merge kernel.

    Args:
        first_keys: [sequences], the first key that any query sees; may be None.

    Returns:
        first token, queries, keys before them, first key that any query sees, keys of a split,
        number of splits.
    """
    start = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - start
    context = tl.load(seq_lens + sequence)
    cached = context - queries
    first = tl.maximum(first_seen(cached, window, WINDOW), 0) if WINDOW else 0
    if first_keys is not None:
        first = tl.maximum(first, tl.load(first_keys + sequence))
    keys, splits = split(
        tl.maximum(context - first, 0), KV_HEADS * tl.cdiv(queries * GROUP, BLOCK_M)
    )
    return start, queries, cached, first, keys, splits


@triton.jit
def nodes_at(tree, node, inside, cached, words, place):
    """Return the positions of keys that may be nodes of a tree, and which rows see them.

    Args:
        tree: words of the sequence's tokens.
        node: [n], negative if a key is not a node. place: [n], the position of such a key.
        words: [m], of the rows.

    Returns:
        position [n]; [m, n], also true if a key is not a node.
    """
    is_node = node >= 0
    ancestors = tl.load(tree + node, mask=inside & is_node, other=0)
    position = tl.where(is_node, cached + bits_set(ancestors).to(tl.int32) - 1, place)
    bit = tl.minimum(tl.maximum(node, 0), 62)
    among = ((words[:, None] >> bit[None, :]) & 1) != 0
    return position, among | ~is_node[None, :]


@triton.jit
def keys_at(place, inside, tree, is_tree, cached, words, position, TREE: tl.constexpr):
    """Return the positions of the keys at some places, [n], and which rows see them apart from
    windows, [m, n].

    Args:
        inside: [n], which places count. tree, cached, words: see `nodes_at`.
    """
    visible = inside[None, :]
    where = place
    if TREE:
        node = tl.where(is_tree, place - cached, -1)
        where, among = nodes_at(tree, node, inside, cached, words, place)
        visible &= among
        visible &= (node >= 0)[None, :] | (where[None, :] <= position[:, None])
    else:
        visible &= where[None, :] <= position[:, None]
    return where, visible


@triton.jit
def strip_of(part, first, keys, end, context, sink_end, few, OF_SINKS: tl.constexpr):
    """Return the first place of a split's keys, and the place after its last; or of the sinks,
    which the first split processes before its own keys.

    Args:
        first, keys: see `sequence_of`. end: after the last key that a row sees.
        sink_end: after the last sink. few: whether nodes of a tree may also be sinks.
    """
    if OF_SINKS:
        ends = tl.where(few, context, tl.minimum(end, sink_end))
        return 0, tl.where(part == 0, ends, 0)
    begins = first + part * keys
    return begins, tl.minimum(begins + keys, end)


# Numbers that change from step to step must not cause a new compilation.
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "window",
        "sink_keys",
        "first_sequence",
        "above",
        "most",
        "programs",
        "slab",
    ]
)
def attention_decode_kernel(
    q,
    sink_q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    block_table,
    query_start,
    seq_lens,
    first_keys,
    tree,
    sinks,
    out,
    part_out,
    part_weight,
    q_stride,
    sink_q_stride,
    table_stride,
    scale,
    softcap,
    window,
    sink_keys,
    first_sequence,
    above,
    most,
    programs,
    slab,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """grid [KV heads * programs * tiles, sequences]

    q, sink_q, out [tokens, heads, HEAD_DIM]; part_out [sequences, slab, HEAD_DIM] and part_weight
    [sequences, slab] fp32: result of each split and log2 of its total weight, of query i and head h
    from (i * heads + h) * splits on.

    Args:
        sink_q: q for the first `sink_keys` keys, if there are sinks.
        above, most: only sequences of above + 1 .. most queries are computed.
        DIRECT: no sequence has more than one split, which is the result.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    HEADS: tl.constexpr = GROUP * KV_HEADS
    SUNK: tl.constexpr = WINDOW == LAST_AND_SINKS
    head = tl.program_id(0) % KV_HEADS
    program = tl.program_id(0) // KV_HEADS % programs
    tile = tl.program_id(0) // (KV_HEADS * programs)
    sequence = first_sequence + tl.program_id(1)
    start, queries, cached, first, keys, splits = sequence_of(
        query_start, seq_lens, first_keys, sequence, window, GROUP, KV_HEADS, BLOCK_M, WINDOW
    )
    if (queries <= above) | (queries > most) | (tile * BLOCK_M >= queries * GROUP):
        return
    context = cached + queries
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    query_head = head * GROUP + row % GROUP
    wanted = query < queries
    d = tl.arange(0, BLOCK_D)
    store = wanted[:, None] & (d < HEAD_DIM)[None, :]
    lane = (query_head * HEAD_DIM)[:, None] + d[None, :]
    token = (start + query).to(tl.int64)
    if not SUNK:
        rows = operand(tl.load(q + token[:, None] * q_stride + lane, mask=store, other=0.0), DTYPE)

    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
    end = cached + last + 1  # after the last key that a row of the tile sees
    position = cached + query
    is_tree, words = False, None
    if TREE:
        tree += start
        is_tree = tl.load(tree) != 0
        words = tl.load(tree + query, mask=wanted, other=0)
        if is_tree:
            end = context
            position = cached + bits_set(words).to(tl.int32) - 1
    table = block_table + sequence.to(tl.int64) * table_stride

    if DIRECT:
        splits = tl.maximum(splits, 1)  # a row without a key has a result
    for part in range(program, splits, programs):
        state = begin(BLOCK_M, BLOCK_D, BLOCK_N if BLOCK_M == 16 else 0)
        for strip in tl.static_range(1 - SUNK, 2):
            if SUNK:  # loaded when needed, as registers suffice for only one of both
                at = q + token[:, None] * q_stride + lane
                if strip == 0:
                    at = sink_q + token[:, None] * sink_q_stride + lane
                rows = operand(tl.load(at, mask=store, other=0.0), DTYPE)
            few = is_tree & (cached < sink_keys)
            begins, ends = strip_of(part, first, keys, end, context, sink_keys, few, strip == 0)
            for at in range(begins, ends, BLOCK_N):
                place = at + tl.arange(0, BLOCK_N)
                where, visible = keys_at(
                    place, place < ends, tree, is_tree, cached, words, position, TREE
                )
                if WINDOW:
                    visible &= seen_by(where, position, window, sink_keys, WINDOW, strip == 0)
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
                    tl.minimum(place, ends - 1),
                    visible,
                    scale,
                    softcap,
                    DTYPE,
                    KIND,
                    KV_HEADS,
                    BLOCK_SIZE,
                    HEAD_DIM,
                    BLOCK_D,
                    False,
                )
        unit = unit_of(scale, softcap)
        if DIRECT:
            sums, total = with_sinks(ended(state), unit, sinks, query_head)
            target = out + (token * HEADS * HEAD_DIM)[:, None] + lane
            tl.store(target, finish(sums, total).to(DTYPE), mask=store)
        else:
            sums, largest, total = ended(state)
            piece = tl.program_id(1) * slab + (query * HEADS + query_head) * splits + part
            target = part_out + (piece.to(tl.int64) * HEAD_DIM)[:, None] + d[None, :]
            tl.store(target, finish(sums, total), mask=store)
            tl.store(part_weight + piece, log2_weight(largest, total, unit), mask=wanted)


@triton.jit
def merge(
    part_out, part_weight, sinks, head, piece, splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Merge the splits of one query head: [BLOCK_D]; 0 if no split saw a key.

    Args:
        sinks: see `with_sinks`.
        piece: index of its first split.
    """
    every = tl.arange(0, SPREAD)
    weights = tl.load(part_weight + piece + every, mask=every < splits, other=float("-inf"))
    largest = tl.max(weights, 0)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(weights - largest), 0)
    if sinks is not None:
        total += tl.exp2(sink - largest)
    d = tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for at in range(0, splits, AT_ONCE):
        part = at + tl.arange(0, AT_ONCE)
        mine = part < splits
        weight = tl.load(part_weight + piece + part, mask=mine, other=float("-inf"))
        result = tl.load(
            part_out + ((piece + part).to(tl.int64) * HEAD_DIM)[:, None] + d[None, :],
            mask=mine[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        sums += tl.sum(tl.exp2(weight - largest)[:, None] * result, 0)
    return sums / tl.where(total == 0.0, 1.0, total)


# Numbers that change from step to step must not cause a new compilation.
@triton.jit(do_not_specialize=["window", "first_sequence", "above", "most", "slab"])
def attention_merge_kernel(
    part_out,
    part_weight,
    query_start,
    seq_lens,
    first_keys,
    sinks,
    out,
    window,
    first_sequence,
    above,
    most,
    slab,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """grid [heads, most, sequences]; arguments as in `attention_decode_kernel`"""
    HEADS: tl.constexpr = GROUP * KV_HEADS
    head = tl.program_id(0)
    query = tl.program_id(1)
    sequence = first_sequence + tl.program_id(2)
    start, queries, _, _, _, splits = sequence_of(
        query_start, seq_lens, first_keys, sequence, window, GROUP, KV_HEADS, BLOCK_M, WINDOW
    )
    if (queries <= above) | (queries > most) | (query >= queries):
        return
    piece = tl.program_id(2) * slab + (query * HEADS + head) * splits
    result = merge(part_out, part_weight, sinks, head, piece, splits, HEAD_DIM, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    target = out + ((start + query).to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(target + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
