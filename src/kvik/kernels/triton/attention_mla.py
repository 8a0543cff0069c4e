"""Decoding in latent space: multi-head latent attention (DeepSeek-V2, 2024, section 2.1.2).

A token's keys and values of all heads are linear in one latent vector c. So a query is multiplied
by W_UK once, and then by c: q . (W_UK c) = (W_UK^T q) . c. The result is a mean of latent vectors,
which the caller multiplies by W_UV. In addition, all heads share one key with rotary positions. A
tile of heads (rows) reads a token's vector once and multiplies it twice, as its latent part is both
key and value. Splits, grid and merge are as in attention_decode.py, with all heads as one group.

Floor: at 128 heads about 240 FLOPs for each byte read (2 * 128 * (576 + 512) over 1152 bytes of
bf16), so both memory and tensor cores; with fewer heads memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.attention_decode import (
    attention_merge_kernel,
    join,
    keys_at,
    mean_of,
    nothing,
    sequence_of,
)
from kvik.kernels.triton.attention_paged import PagedStep, SequenceRun, joined
from kvik.kernels.triton.attention_shapes import SPREAD, STAGES, WORKSPACE, max_splits
from kvik.kernels.triton.attention_tile import (
    LOG2_E,
    OF_STEPS,
    begin,
    bits_set,
    ended,
    finish,
    log2_weight,
    weigh,
)
from kvik.kernels.triton.kv_load import operand, product, vectors_at
from kvik.kernels.triton.launch import ROOMY, ceil_div, launch, power_of_two, shared_memory

KEYS = 32  # of a tile: 36 KiB of bf16 at 512 + 64
SHORTEST, TALL = 16, 32  # rows of a tile
LAUNCHED = 8192  # programs that a launch aims at
UNSPLIT = SPREAD.value // 2 * TALL  # rows of a sequence; with more tiles each has a single split


@triton.jit(do_not_specialize=OF_STEPS)
def mla_decode_kernel(
    q_latent, q_rope, cache, block_table, query_start, seq_lens, tree, sinks, out, part_out,
    part_weight,
    latent_stride, latent_head_stride, rope_stride, rope_head_stride, table_stride, scale,
    first_sequence, above, most, programs, slab,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TREE: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """grid [programs * tiles, sequences]; arguments as in `attention_decode_kernel`"""
    DTYPE: tl.constexpr = q_latent.dtype.element_ty
    WIDTH: tl.constexpr = LATENT + ROPE
    program = tl.program_id(0) % programs
    tile = tl.program_id(0) // programs
    sequence = first_sequence + tl.program_id(1)
    start, queries, cached, _, keys, splits = sequence_of(
        query_start, seq_lens, None, sequence, 0, HEADS, 1, BLOCK_M, False
    )
    if (queries <= above) | (queries > most) | (tile * BLOCK_M >= queries * HEADS):
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // HEADS
    head = row % HEADS
    wanted = query < queries
    token = (start + query).to(tl.int64)
    d = tl.arange(0, BLOCK_LATENT)
    r = tl.arange(0, BLOCK_ROPE)
    store = wanted[:, None] & (d < LATENT)[None, :]
    # Projections of each head may have made the heads the outer dimension.
    at_latent = (token * latent_stride + head * latent_head_stride)[:, None] + d[None, :]
    at_rope = (token * rope_stride + head * rope_head_stride)[:, None] + r[None, :]
    rope = wanted[:, None] & (r < ROPE)[None, :]
    rows = operand(tl.load(q_latent + at_latent, mask=store, other=0.0), DTYPE)
    rope_rows = operand(tl.load(q_rope + at_rope, mask=rope, other=0.0), DTYPE)
    position = cached + query
    # after the last key that a row of the tile sees
    end = cached + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, queries - 1) + 1
    is_tree, words = False, query
    if TREE:
        tree += start
        is_tree = tl.load(tree) != 0
        words = tl.load(tree + query, mask=wanted, other=0)
        if is_tree:
            end = cached + queries
            position = cached + bits_set(words).to(tl.int32) - 1
    table = block_table + sequence.to(tl.int64) * table_stride
    if DIRECT:
        splits = tl.maximum(splits, 1)
    for part in range(program, splits, programs):
        sums, largest, total = begin(BLOCK_M, BLOCK_LATENT, BLOCK_N)
        ends = tl.minimum((part + 1) * keys, end)
        for at in range(part * keys, ends, BLOCK_N):
            place = at + tl.arange(0, BLOCK_N)
            inside = place < ends
            block, within = vectors_at(
                table, at, tl.minimum(place, ends - 1), 0, BLOCK_SIZE, 1, False
            )
            vectors = block * BLOCK_SIZE + within
            latent = load_part(cache, vectors, DTYPE, WIDTH, LATENT, BLOCK_LATENT)
            key = load_part(cache + LATENT, vectors, DTYPE, WIDTH, ROPE, BLOCK_ROPE)
            scores = product(rope_rows, tl.trans(key), None)
            scores = product(rows, tl.trans(latent), scores)
            _places, visible = keys_at(place, inside, tree, is_tree, cached, words, position, TREE)
            scores = tl.where(visible, scores, float("-inf"))
            weights, factor, largest, total = weigh(scores, largest, total, scale, None, True)
            sums = product(operand(weights, DTYPE), latent, sums * factor[:, None])
        sums, largest, total = ended((sums, largest, total))
        result, weight = finish(sums, total), log2_weight(largest, total, scale)
        if DIRECT:
            if sinks is not None:
                result = mean_of(join(nothing(result, weight), result, weight), sinks, head)
            target = out + ((token * HEADS + head) * LATENT)[:, None] + d[None, :]
            tl.store(target, result.to(DTYPE), mask=store)
        else:
            piece = tl.program_id(1) * slab + row * splits + part
            target = part_out + (piece.to(tl.int64) * LATENT)[:, None] + d[None, :]
            tl.store(target, result, mask=store)
            tl.store(part_weight + piece, weight, mask=wanted)


@triton.jit
def load_part(
    cache, vectors,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load [n, BLOCK] as operands: the first PART of WIDTH numbers, then zeros."""
    d = tl.arange(0, BLOCK)
    at = cache + (vectors.to(tl.int64) * WIDTH)[:, None] + d[None, :]
    x = tl.load(at) if PART == BLOCK else tl.load(at, mask=(d < PART)[None, :], other=0.0)
    return operand(x, DTYPE)


def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    step: PagedStep,
    scale: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Compute attention over latent vectors, which include those of this step.

    A sequence's own number of queries determines the height of its tiles and whether it is split.

    Args:
        q: [tokens, heads, latent], W_UK^T q. q_rope: [tokens, heads, rope]. The last dimension of
            both is contiguous.
        cache: [blocks, block_size, ..., latent + rope], c and the rotated key of each token;
            contiguous, of a float dtype.
        scale: > 0.
        sinks: see `AttentionSpec`.
        out: [tokens, heads, latent], contiguous; tokens of other sequences are left as they are.
    """
    heads, floor = q.shape[1], 0
    for max_queries in (SHORTEST // heads, UNSPLIT // heads, 1 << 31):
        runs = [run for run in step.runs if floor < run.queries <= max_queries]
        if runs:
            run = joined(runs)
            # A run alone in its step also takes fewer queries, so that a graph serves those too.
            only_run = len(runs) == len(step.runs) and max_queries * heads <= UNSPLIT
            _launch(q, q_rope, cache, step, scale, sinks, out, run, 0 if only_run else floor)
        floor = max(floor, max_queries)


def _launch(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    step: PagedStep,
    scale: float,
    sinks: Tensor | None,
    out: Tensor,
    run: SequenceRun,
    above: int,
) -> None:
    """Launch the kernels for the run's sequences of more than `above` queries."""
    heads, latent, rope = q.shape[1], q.shape[2], q_rope.shape[2]
    m = tile_rows(run.queries * heads)
    stacked = ceil_div(run.queries * heads, m)
    splits = max_splits(run.context, ceil_div((above + 1) * heads, m))
    slab = min(run.queries * heads * splits, max(m * SPREAD.value, run.queries * heads))
    at_once = run.last + 1 - run.first
    if splits > 1:
        at_once = min(at_once, max(1, WORKSPACE // (4 * slab * (latent + 1))))
    for first in range(run.first, run.last + 1, at_once):
        rest = min(at_once, run.last + 1 - first)
        programs = min(splits, ceil_div(LAUNCHED, rest * stacked))
        part_out = part_weight = None
        if splits > 1:
            part_out = q.new_empty(rest, slab, latent, dtype=torch.float32)
            part_weight = q.new_empty(rest, slab, dtype=torch.float32)
        strides = (q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1))
        blocks = (max(16, power_of_two(latent)), max(16, power_of_two(rope)))
        sequences = (step.block_table, step.query_start_loc, step.seq_lens, step.tree)
        numbers = (*strides, step.block_table.stride(0), scale * LOG2_E, first, above, run.queries)
        sizes = (heads, latent, rope, *blocks, m, KEYS, step.block_size)
        launch(
            mla_decode_kernel,
            (programs * stacked, rest),
            (q, q_rope, cache, *sequences, sinks, out, part_out, part_weight),
            (*numbers, programs, slab),
            (*sizes, step.tree is not None, splits == 1),
            num_warps=tile_warps(m),
            num_stages=STAGES if shared_memory(q.device) >= ROOMY else STAGES - 1,
        )
        if splits == 1:
            continue
        launch(
            attention_merge_kernel,
            (heads, run.queries, rest),
            (part_out, part_weight, step.query_start_loc, step.seq_lens, None, sinks, out),
            (0, first, above, run.queries, slab),
            (heads, 1, latent, blocks[0], m, 0),
        )


def tile_rows(rows: int) -> int:
    """Return the rows of a tile. 64 rows of 512 sums would spill."""
    return min(TALL, max(SHORTEST, power_of_two(rows)))


def tile_warps(m: int) -> int:
    """Return the warps of a tile: 32 rows of 512 sums take 64 registers of 256 threads."""
    return 8 if m == TALL else 4
