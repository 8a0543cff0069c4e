"""Attention of few queries over a long context: the keys are split between programs.

"Flash-decoding" (Dao et al. 2023): one query leaves a GPU idle unless many programs read its keys
at once; a second kernel merges their results. The query heads of a KV head are the rows of one
tile (16 at least), so K and V are read once. Several queries, of drafts or of a short chunk, are
more rows of the tile.

Invariance: where a context is split depends only on the sequence (`attention_shapes.split`), not
on the batch; a program takes an equal share of its sequence's splits (all of them for a short
sequence in a large batch), in one loop over tiles, in which keys of the next split are loaded while
those of the last are used. The tile's rows depend on the sequence's number of queries. So the bits
of a sequence do not depend on the batch. (A sequence with enough queries to fill 64 rows has
smaller tiles in a step with trees, and differs by rounding.)

Each split has a result and the logarithm of its total weight; the whole is their weighted mean, to
which splits are added in their order (`join`): by the program itself if it has all splits of its
sequence, else by the merge kernel, with the same operations and so to the same bits.

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

from kvik.kernels.triton.attention_shapes import split
from kvik.kernels.triton.attention_tile import (
    LAST_AND_SINKS,
    LOG2,
    OF_STEPS,
    attend,
    begin,
    bits_set,
    ended,
    finish,
    first_seen,
    from_sinks,
    log2_weight,
    seen_by,
    slope_of,
    unit_of,
)
from kvik.kernels.triton.kv_load import factor_type, query_factors

AT_ONCE = tl.constexpr(8)  # splits that the merge kernel loads at once


@triton.jit
def sequence_of(
    query_start, seq_lens, first_keys, sequence, window, GROUP, KV_HEADS, BLOCK_M,
    WINDOW: tl.constexpr,
):  # fmt: skip
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
def nothing(sums, rows):
    """Return the whole (result, log2 of its largest weight, total) before any split.

    Args:
        sums: zeros like the result. rows: zeros like the weights.
    """
    return sums, rows - float("inf"), rows


@triton.jit
def join(whole, result, weight):
    """Add a split to the whole.

    The products are fused explicitly, so that it has the same bits wherever it is compiled.

    Args:
        whole: see `nothing`. weight: log2 of the split's, [m]; -inf if it saw no key.
    """
    sums, largest, total = whole
    new = tl.maximum(largest, weight)
    base = tl.where(new == float("-inf"), 0.0, new)
    factor, share = tl.exp2(largest - base), tl.exp2(weight - base)
    sums = tl.fma(sums, spread(factor, sums), result * spread(share, sums))
    return sums, new, tl.fma(total, factor, share)


@triton.jit
def mean_of(whole, sinks, head):
    """Return the mean after all splits and, unless `sinks` is None, the sink of each head; 0 if no
    split saw a key."""
    if sinks is not None:
        whole = join(whole, tl.zeros_like(whole[0]), tl.load(sinks + head) * LOG2)
    sums, _, total = whole
    return sums / spread(tl.where(total == 0.0, 1.0, total), sums)


@triton.jit
def spread(x, sums):
    """Return x, [m] or [1], as a factor of sums, [m, d] or [d]."""
    return x[:, None] if len(sums.shape) == 2 else x


@triton.jit
def store_split(part_out, part_weight, piece, result, weight, wanted, HEAD_DIM: tl.constexpr):
    """Store the result of a split, [m, BLOCK_D], and log2 of its weight, for the merge kernel."""
    d = tl.arange(0, result.shape[1])[None, :]
    target = part_out + (piece.to(tl.int64) * HEAD_DIM)[:, None] + d
    tl.store(target, result, mask=wanted[:, None] & (d < HEAD_DIM))
    tl.store(part_weight + piece, weight, mask=wanted)


@triton.jit(do_not_specialize=OF_STEPS)
def attention_decode_kernel(  # noqa: PLR0915
    q, sink_q, k_cache, v_cache, k_scales, v_scales, block_table, query_start, seq_lens, first_keys,
    tree, sinks, slopes, out, part_out, part_weight,
    q_stride, sink_q_stride, table_stride, scale, softcap, window, sink_keys, first_sequence, above,
    most, programs, least, slab,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """grid [KV heads * programs * tiles, sequences]

    q, sink_q, out [tokens, heads, HEAD_DIM]; part_out [sequences, slab, HEAD_DIM] and part_weight
    [sequences, slab] fp32: result of each split and log2 of its total weight, of query i and head h
    from (i * heads + h) * splits on.

    Args:
        sink_q: q for the first `sink_keys` keys, if there are sinks.
        above, most: only sequences of above + 1 .. most queries are computed.
        least: keys for which a program is used, at least: a sequence of fewer has fewer programs.
        MERGE: 0, every split is stored; 1, no sequence has more than one; 2, every program has all
            splits of its sequence.
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
    used = tl.maximum(tl.minimum(programs, tl.cdiv(splits * keys, least)), 1)
    unneeded = (program >= used) | (tile * BLOCK_M >= queries * GROUP)
    if (queries <= above) | (queries > most) | unneeded:
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
    position = cached + query
    is_tree, words = False, None
    if TREE:
        tree += start
        is_tree = tl.load(tree) != 0
        words = tl.load(tree + query, mask=wanted, other=0)
        if is_tree:
            position = cached + bits_set(words).to(tl.int32) - 1
    table = block_table + sequence.to(tl.int64) * table_stride

    unit = unit_of(scale, softcap, slopes)
    slope = None if slopes is None else slope_of(slopes, query_head)
    piece = tl.program_id(1) * slab + (query * HEADS + query_head) * splits
    part = program * splits // used
    ends = tl.minimum(first + (program + 1) * splits // used * keys, context)
    until = first + (part + 1) * keys  # the end of the split
    zeros = tl.zeros([BLOCK_M], tl.float32)
    whole = nothing(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), zeros)
    state = begin(BLOCK_M, BLOCK_D, BLOCK_N if BLOCK_M == 16 else 0)
    for strip in tl.static_range(1 - SUNK, 2):
        from_q, stride, begins, stop = q, q_stride, first + part * keys, ends
        if strip == 0:  # of the sinks, which the first split has before its own keys
            from_q, stride, begins = sink_q, sink_q_stride, 0
            few = is_tree & (cached < sink_keys)
            stop = tl.where(few, context, tl.minimum(context, sink_keys))
            stop = tl.where((part == 0) & (splits > 0), stop, 0)
        rows = tl.load(from_q + token[:, None] * stride + lane, mask=store, other=0.0)
        rows = query_factors(rows, KIND)
        origin = from_sinks(position, window, sink_keys, strip == 0)
        # The asynchronous products of 64 rows need a loop of each split, without a branch.
        for lap in range(tl.cdiv(stop - begins, keys) if BLOCK_M == 64 and strip == 1 else 1):
            since = begins + lap * keys if BLOCK_M == 64 and strip == 1 else begins
            to = tl.minimum(since + keys, stop) if BLOCK_M == 64 and strip == 1 else stop
            for at in range(since, to, BLOCK_N):
                place = at + tl.arange(0, BLOCK_N)
                where, visible = keys_at(
                    place, place < stop, tree, is_tree, cached, words, position, TREE
                )
                if WINDOW:
                    visible &= seen_by(where, position, window, sink_keys, WINDOW, strip == 0)
                state = attend(
                    rows, state, k_cache, v_cache, k_scales, v_scales, table, head, at,
                    tl.minimum(place, stop - 1),
                    visible, scale, softcap, slope, where, origin,
                    factor_type(DTYPE, KIND), KIND, KV_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, False,
                )  # fmt: skip
                if MERGE != 1 and strip == 1 and BLOCK_M != 64:  # noqa: SIM102
                    if (at + BLOCK_N >= until) | (at + BLOCK_N >= stop):
                        sums, largest, total = ended(state)
                        result, weight = finish(sums, total), log2_weight(largest, total, unit)
                        if MERGE:
                            whole = join(whole, result, weight)
                        else:
                            store_split(
                                part_out, part_weight, piece + part, result, weight, wanted,
                                HEAD_DIM,
                            )  # fmt: skip
                        state = begin(BLOCK_M, BLOCK_D, BLOCK_N if BLOCK_M == 16 else 0)
                        part += 1
                        until += keys
            if MERGE == 0 and strip == 1 and BLOCK_M == 64:
                sums, largest, total = ended(state)
                result, weight = finish(sums, total), log2_weight(largest, total, unit)
                store_split(part_out, part_weight, piece + part, result, weight, wanted, HEAD_DIM)
                state = begin(BLOCK_M, BLOCK_D, 0)
                part += 1
    if MERGE == 1:
        sums, largest, total = ended(state)
        whole = join(whole, finish(sums, total), log2_weight(largest, total, unit))
    if MERGE:
        target = out + (token * HEADS * HEAD_DIM)[:, None] + lane
        tl.store(target, mean_of(whole, sinks, query_head).to(DTYPE), mask=store)


@triton.jit(do_not_specialize=OF_STEPS)
def attention_merge_kernel(
    part_out, part_weight, query_start, seq_lens, first_keys, sinks, out,
    window, first_sequence, above, most, slab,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
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
    d = tl.arange(0, BLOCK_D)
    whole = nothing(tl.zeros([BLOCK_D], tl.float32), tl.zeros([1], tl.float32))
    for at in range(0, splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # unrolled, so that all are loaded at once
            part = piece + at + i
            lane = tl.arange(0, 1)
            mine = at + i < splits
            weight = tl.load(part_weight + part + lane, mask=mine, other=float("-inf"))
            source = part_out + part.to(tl.int64) * HEAD_DIM + d
            whole = join(whole, tl.load(source, mask=mine & (d < HEAD_DIM), other=0.0), weight)
    result = mean_of(whole, sinks, head + tl.arange(0, 1))
    target = out + ((start + query).to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(target + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
