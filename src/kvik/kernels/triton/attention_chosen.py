"""Attention over chosen keys: each token reads the keys that an indexer has listed for it
(attention/indexed.py), or its last keys and entries that sum up earlier tokens
(attention/compressed.py).

A row of the cache is the key of all heads, and its first channels are their value. So a program
processes a tile of the heads of one token: it gathers rows by their places, multiplies them twice
(attention_mla.py), and keeps the softmax as it goes. The rows of a token are numbered: the last
keys first, then those of the list, or all entries.

The rows of a token of a short sequence are divided into splits, as one token would leave a GPU
idle. A program has one split, and a second kernel merges the results (attention_decode.py); or, if
a step has many tokens, all splits, which it merges itself with the same operations, so to the same
bits. Longer sequences have taller tiles and no splits. Which it is depends only on a sequence's own
number of queries.

Floor: as in attention_mla.py, for the rows that are read. Rows are read by each tile of heads, from
L2 after the first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.attention_decode import join, mean_of, nothing
from kvik.kernels.triton.attention_mla import KEYS, SHORTEST, TALL
from kvik.kernels.triton.attention_shapes import ENOUGH, STAGES, WORKSPACE
from kvik.kernels.triton.attention_tile import LOG2_E, begin, finish, log2_weight, weigh
from kvik.kernels.triton.indexer import Places, seen_by_token
from kvik.kernels.triton.kv_load import operand, product
from kvik.kernels.triton.launch import ROOMY, ceil_div, launch, power_of_two, shared_memory

FEW = 16  # queries of a sequence whose rows are divided
SPLIT = 256  # rows of a split
ALL = 1 << 30  # more rows, or queries, than there are
CHANGING = ["table_stride", "near_stride", "sequences", "first", "splits", "programs"]


# Tensors, numbers and constants of the kernel.
Arguments: TypeAlias = tuple[tuple[Tensor | None, ...], tuple[int, ...], tuple[int, ...]]
NO_ROWS: Arguments = (None,) * 4, (0, 0), (0, 1, 1)
NO_LAST: Arguments = (None,) * 2, (0, 0, 0), ()


@dataclass(frozen=True, slots=True)
class ListedRows:
    """Keys, or entries, that tokens read: those listed for each, or all."""

    cache: Tensor  # [rows, channels]
    at: Places
    # places, counts: [tokens, top] and [tokens] int32, as `indexer.choose` returns them; None: all.
    places: Tensor | None = None
    counts: Tensor | None = None

    @property
    def most(self) -> int:
        """The most rows that a token reads."""
        return self.at.longest if self.places is None else self.places.shape[1]

    @property
    def arguments(self) -> Arguments:
        tensors = self.cache, self.at.block_table, self.places, self.counts
        numbers = self.cache.stride(0), self.at.block_table.stride(0)
        top = 0 if self.places is None else self.most
        return tensors, numbers, (top, self.at.every, self.at.entry_tokens)


@dataclass(frozen=True, slots=True)
class LastKeys:
    """The last `window` keys of each token, which are the first channels of rows."""

    cache: Tensor  # [rows, channels]
    at: Places
    window: int

    @property
    def arguments(self) -> Arguments:
        tensors, table = (self.cache, self.at.block_table), self.at.block_table
        return tensors, (self.cache.stride(0), table.stride(0), self.window), ()


@triton.jit(do_not_specialize=CHANGING)
def attention_chosen_kernel(  # noqa: PLR0915
    q, q_rest, cache, table, places, counts, near, near_table, query_start, seq_lens, tree, sinks,
    out, part_out, part_weight,
    width, table_stride, near_width, near_stride, window, q_stride, q_head_stride, rest_stride,
    rest_head_stride, scale, sequences, first, above, most, keys, splits, programs,
    TOP: tl.constexpr, EVERY: tl.constexpr, ENTRY_TOKENS: tl.constexpr, HEADS: tl.constexpr,
    VALUE: tl.constexpr, REST: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, TREE: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """grid [tokens, programs * tiles of heads]

    q, out [.., HEADS, VALUE], q_rest [.., HEADS, REST]; cache [rows, width], near [rows,
    near_width]; part_out [tokens, splits, HEADS, VALUE] and part_weight [tokens, splits, HEADS]
    fp32.

    Args:
        cache, near: of listed or all rows, and of the last `window` keys; one may be None.
        first: token of the first row of the grid.
        above, most: only sequences of above + 1 .. most queries are computed.
        keys: rows of a split.
        TOP: most places of a token; 0: it reads all entries, of EVERY tokens each.
        MERGE: as in `attention_decode_kernel`.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    token = first + tl.program_id(0).to(tl.int64)
    program = tl.program_id(1) % programs
    head = tl.program_id(1) // programs * BLOCK_M + tl.arange(0, BLOCK_M)
    sequence, queries, _, end, _ = seen_by_token(
        query_start, seq_lens, tree, sequences, token, TREE
    )
    if (queries <= above) | (queries > most):
        return
    last = 0  # number of last keys
    if near is not None:
        last = tl.minimum(end, window)
        near_table += sequence.to(tl.int64) * near_stride
    rows = last
    if cache is not None:
        rows += tl.load(counts + token) if TOP else end // EVERY
        table += sequence.to(tl.int64) * table_stride
    d, r = tl.arange(0, BLOCK_VALUE), tl.arange(0, BLOCK_REST)
    in_value, in_rest = (d < VALUE)[None, :], (r < REST)[None, :]
    wanted = (head < HEADS)[:, None]
    at_q = q + (token * q_stride + head * q_head_stride)[:, None] + d[None, :]
    of_value = operand(tl.load(at_q, mask=wanted & in_value, other=0.0), DTYPE)
    if REST:
        at_q = q_rest + (token * rest_stride + head * rest_head_stride)[:, None] + r[None, :]
        of_rest = operand(tl.load(at_q, mask=wanted & in_rest, other=0.0), DTYPE)
    base = cache if near is None else near
    zeros = tl.zeros([BLOCK_M], tl.float32)
    whole = nothing(tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32), zeros)
    for lap in range(tl.cdiv(splits - program, programs) if MERGE != 1 else 1):
        part = program + lap * programs
        sums, largest, total = begin(BLOCK_M, BLOCK_VALUE, 0)
        ends = tl.minimum((part + 1) * keys, rows)
        for begins in range(part * keys, ends, BLOCK_N):
            row = begins + tl.arange(0, BLOCK_N)
            inside = row < ends
            at = tl.zeros([BLOCK_N], tl.int64)
            if cache is not None:
                number, far = row - last, inside & (row >= last)
                if TOP:
                    number = tl.load(places + token * TOP + number, mask=far, other=0)
                place = tl.where(far, number * EVERY + EVERY - 1, 0)
                block = tl.load(table + place // BLOCK_SIZE, mask=far, other=0).to(tl.int64)
                at = (block * BLOCK_SIZE + place % BLOCK_SIZE) // ENTRY_TOKENS * width
                if near is not None:
                    # A multiple of 16 bytes, in numbers, such that the compiler sees that it is.
                    apart = (cache.to(tl.int64) - near.to(tl.int64)) // 16
                    at += apart * (128 // DTYPE.primitive_bitwidth)
            if near is not None:
                close = inside & (row < last)
                place = tl.where(close, end - last + row, 0)
                block = tl.load(near_table + place // BLOCK_SIZE, mask=close, other=0).to(tl.int64)
                slot = block * BLOCK_SIZE + place % BLOCK_SIZE
                at = tl.where(close, slot * near_width, at)
            at_row, here = base + at[:, None], inside[:, None]
            value = operand(tl.load(at_row + d[None, :], mask=here & in_value, other=0.0), DTYPE)
            scores = None
            if REST:
                at_row += VALUE + r[None, :]
                rest = operand(tl.load(at_row, mask=here & in_rest, other=0.0), DTYPE)
                scores = product(of_rest, tl.trans(rest), None)
            scores = product(of_value, tl.trans(value), scores)
            scores = tl.where(inside[None, :], scores, float("-inf"))
            weights, factor, largest, total = weigh(scores, largest, total, scale, None, True)
            sums = product(operand(weights, DTYPE), value, sums * factor[:, None])
        result, weight = finish(sums, total), log2_weight(largest, total, scale)
        if MERGE:
            whole = join(whole, result, weight)
        else:
            piece = ((token - first) * splits + part) * HEADS + head
            target = part_out + (piece * VALUE)[:, None] + d[None, :]
            tl.store(target, result, mask=wanted & in_value)
            tl.store(part_weight + piece, weight, mask=head < HEADS)
    if MERGE:
        target = out + ((token * HEADS + head) * VALUE)[:, None] + d[None, :]
        result = mean_of(whole, sinks, tl.minimum(head, HEADS - 1))
        tl.store(target, result.to(DTYPE), mask=wanted & in_value)


@triton.jit(do_not_specialize=CHANGING)
def merge_chosen_kernel(
    part_out, part_weight, query_start, seq_lens, sinks, out,
    sequences, first, above, most, splits,
    HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """grid [tokens, HEADS]; arguments as in `attention_chosen_kernel`"""
    token = first + tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, queries, _, _, _ = seen_by_token(query_start, seq_lens, None, sequences, token, False)
    if (queries <= above) | (queries > most):
        return
    d, lane = tl.arange(0, BLOCK_VALUE), tl.arange(0, 1)
    whole = nothing(tl.zeros([BLOCK_VALUE], tl.float32), tl.zeros([1], tl.float32))
    for part in range(splits):
        piece = ((token - first) * splits + part) * HEADS + head
        weight = tl.load(part_weight + piece + lane)
        result = tl.load(part_out + piece * VALUE + d, mask=d < VALUE, other=0.0)
        whole = join(whole, result, weight)
    result = mean_of(whole, sinks, head + lane)
    target = out + (token * HEADS + head) * VALUE + d
    tl.store(target, result.to(out.dtype.element_ty), mask=d < VALUE)


def attend_rows(
    q: Tensor,
    q_rest: Tensor | None,
    rows: ListedRows | None,
    last: LastKeys | None,
    scale: float,
    sinks: Tensor | None,
    queries: Collection[int],
) -> Tensor:
    """Attend over rows of a cache, over the last keys, or over both.

    Args:
        q: [tokens, heads, value], for the first channels of rows, those of values.
        q_rest: [tokens, heads, rest], for the next ones; None: there are none.
        sinks: [heads] fp32, as in `AttentionSpec`.
        queries: how many each sequence has at most.

    Returns:
        [tokens, heads, value].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    of_rows, numbers, constants = NO_ROWS if rows is None else rows.arguments
    of_last, numbers_of_last, _ = NO_LAST if last is None else last.arguments
    if of_rows[0] is not None and of_last[0] is not None:
        apart = of_rows[0].data_ptr() - of_last[0].data_ptr()
        if apart % 16:
            raise ValueError(f"the caches must be a multiple of 16 bytes apart, not {apart}")
    at = (rows or last).at  # type: ignore[union-attr]
    most = (rows.most if rows else 0) + (last.window if last else 0)
    value, rest = q.shape[2], 0 if q_rest is None else q_rest.shape[2]
    strides = [x.stride(dim) if x is not None else 0 for x in (q, q_rest) for dim in (0, 1)]
    arguments = (
        (q, q_rest, *of_rows, *of_last, at.query_start_loc, at.seq_lens, at.tree, sinks, out),
        (*numbers, *numbers_of_last, *strides, scale * LOG2_E, len(at.seq_lens)),
        (*constants, value, rest, max(16, power_of_two(value)), max(16, power_of_two(rest))),
    )
    for above, to in ((0, FEW), (FEW, ALL)):
        if any(above < count <= to for count in queries):
            _launch(q, arguments, at, most, above, to)
    return out


def _launch(q: Tensor, arguments: Any, at: Places, most: int, above: int, to: int) -> None:
    """Launch the kernels for sequences of above + 1 .. `to` queries.

    Args:
        arguments: tensors, numbers and constants of the kernel that do not depend on these.
        most: rows that a token reads.
    """
    tensors, numbers, (*constants, value, rest, block, block_rest) = arguments
    tokens, heads, _ = q.shape
    wide = q.element_size() == 4  # no tensor cores: all factors are in registers
    short = to == FEW
    m = SHORTEST if short or wide else min(TALL, max(SHORTEST, power_of_two(heads)))
    tiles, keys, n = ceil_div(heads, m), SPLIT if short else ALL, KEYS // 2 if wide else KEYS
    splits = max(1, ceil_div(most, keys))
    programs = splits if tokens * tiles < ENOUGH else 1
    merge = 1 if splits == 1 else 2 * (programs == 1)
    at_once, part_out, part_weight = tokens, None, None
    if not merge:
        at_once = max(1, min(tokens, WORKSPACE // (4 * splits * heads * (value + 1))))
        part_out = q.new_empty(at_once, splits, heads, value, dtype=torch.float32)
        part_weight = q.new_empty(at_once, splits, heads, dtype=torch.float32)
    # Places, then block ids, are loaded before the rows; a GPU with little shared memory has one
    # tile of these in flight.
    stages = STAGES - 1
    if shared_memory(q.device) >= ROOMY and not wide:
        stages = STAGES + 2 if constants[0] else STAGES
    sizes = (heads, value, rest, block, block_rest, m, n, at.block_size, at.tree is not None)
    for first in range(0, tokens, at_once):
        some, of_step = min(at_once, tokens - first), (first, above, to)
        launch(
            attention_chosen_kernel,
            (some, programs * tiles),
            (*tensors, part_out, part_weight),
            (*numbers, *of_step, keys, splits, programs),
            (*constants, *sizes, merge),
            num_warps=8,
            num_stages=stages,
        )
        if not merge:
            launch(
                merge_chosen_kernel,
                (some, heads),
                (part_out, part_weight, at.query_start_loc, at.seq_lens, *tensors[-2:]),
                (len(at.seq_lens), *of_step, splits),
                (heads, value, block),
            )
