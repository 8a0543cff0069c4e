"""Entries that each sum up several tokens (attention/compressed.py): how they are made and stored.

A program makes the entry of one token, if the token is the last of an entry; so nothing about
sequences is needed on the host, and a step can be captured. Each channel has a softmax over the
gates of the entry's tokens, kept as it goes: tokens are read in tiles, in their order, so an entry
does not depend on the other tokens of the step.

Floor: memory. What entries are made of is read once, and twice if they overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.indexer import Places, seen_by_token
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two

TOKENS = 8  # of a tile
TURNED = 1024  # pairs of channels that a program rotates


@triton.jit
def make_entries_kernel(
    cache, bias, weight, high, low, entries, table, entry_table, query_start, seq_lens,
    width, entries_stride, table_stride, entry_stride, eps, last, low_rows, sequences,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr, EVERY: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRY_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """grid [tokens]; cache [slots, width], entries [places, DIM]

    Args:
        cache: from the channels on of which these entries are made: PARTS vectors of DIM, then
            PARTS of gates.
        bias: [EVERY, PARTS * DIM] fp32. weight: [DIM]; None: entries are not normalised.
        entries: maybe `cache`, as an entry is written after its tokens were read.
        high, low, last, low_rows: tables of rotations, as in `rotations_kernel`, unless ROPE is 0.
    """
    DTYPE: tl.constexpr = cache.dtype.element_ty
    token = tl.program_id(0)
    sequence, _, _, end, _ = seen_by_token(query_start, seq_lens, None, sequences, token, False)
    if (end == 0) | (end % EVERY != 0):
        return
    start = end - EVERY  # the first token of the entry
    table += sequence.to(tl.int64) * table_stride
    d, i = tl.arange(0, BLOCK_D), tl.arange(0, TOKENS)
    largest = tl.full([BLOCK_D], float("-inf"), tl.float32)
    total, sums = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        # The first vectors of the tokens before; there are none before the first entry.
        first = start - (PARTS - 1 - part) * EVERY
        for begin in range(tl.where(first < 0, EVERY, 0), EVERY, TOKENS):
            number = begin + i
            inside = number < EVERY
            place = tl.where(inside, first + number, 0)
            block = tl.load(table + place // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + place % BLOCK_SIZE
            mask = inside[:, None] & (d < DIM)[None, :]
            at = cache + (slot * width)[:, None] + part * DIM + d[None, :]
            added = bias + (number * PARTS * DIM)[:, None] + part * DIM + d[None, :]
            x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(at + PARTS * DIM, mask=mask, other=0.0).to(tl.float32)
            gate += tl.load(added, mask=mask, other=0.0)
            gate = tl.where(inside[:, None], gate, float("-inf"))
            new = tl.maximum(largest, tl.max(gate, 0))
            share, fall = tl.exp(gate - new[None, :]), tl.exp(largest - new)
            total = total * fall + tl.sum(share, 0)
            sums = sums * fall + tl.sum(share * x, 0)
            largest = new
    mean = tl.where(d < DIM, (sums / total).to(DTYPE).to(tl.float32), 0.0)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(mean * mean, 0) / DIM + eps)
        gain = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        mean = (mean * scale * gain).to(DTYPE).to(tl.float32)
    entry_table += sequence.to(tl.int64) * entry_stride
    block = tl.load(entry_table + (end - 1) // BLOCK_SIZE).to(tl.int64)
    place = (block * BLOCK_SIZE + (end - 1) % BLOCK_SIZE) // ENTRY_TOKENS
    entries += place * entries_stride
    if ROPE == 0:
        tl.store(entries + d, mean.to(DTYPE), mask=d < DIM)
    else:
        even, odd = tl.split(tl.reshape(mean, [BLOCK_D // 2, 2]))
        # The last ROPE channels are rotated by the position of the first token.
        pair = tl.arange(0, BLOCK_D // 2)
        angle = pair - (DIM - ROPE) // 2
        turned = (angle >= 0) & (pair < DIM // 2)
        position = tl.minimum(start, last)
        high += position // low_rows * ROPE + angle
        low += position % low_rows * ROPE + angle
        a = tl.load(high, mask=turned, other=1.0)
        b = tl.load(high + ROPE // 2, mask=turned, other=0.0)
        e = tl.load(low, mask=turned, other=1.0)
        f = tl.load(low + ROPE // 2, mask=turned, other=0.0)
        cos, sin = a * e - b * f, a * f + b * e
        entries += 2 * pair
        tl.store(entries, (even * cos - odd * sin).to(DTYPE), mask=pair < DIM // 2)
        tl.store(entries + 1, (odd * cos + even * sin).to(DTYPE), mask=pair < DIM // 2)


@triton.jit
def turn_last_kernel(
    x, rotation, stride, head_stride, sign,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """grid [tokens, tiles of heads]; x [tokens, HEADS, DIM] in place, rotation [tokens, ROPE]"""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_P)
    inside = pair < ROPE // 2
    cos = tl.load(rotation + token * ROPE + pair, mask=inside, other=1.0)
    sin = tl.load(rotation + token * ROPE + ROPE // 2 + pair, mask=inside, other=0.0) * sign
    mask = (head < HEADS)[:, None] & inside[None, :]
    at = x + token * stride + (head * head_stride)[:, None] + (DIM - ROPE) + 2 * pair[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = x.dtype.element_ty
    tl.store(at, (a * cos[None, :] - b * sin[None, :]).to(DTYPE), mask=mask)
    tl.store(at + 1, (b * cos[None, :] + a * sin[None, :]).to(DTYPE), mask=mask)


def make_entries(
    cache: Tensor,
    table: Tensor,
    entries: Tensor,
    at: Places,
    tokens: int,
    bias: Tensor,
    norm: tuple[Tensor | None, float] = (None, 0.0),
    rotations: tuple[Tensor | None, Tensor | None, int] = (None, None, 0),
) -> None:
    """Make the entries whose last tokens are in the step; see `compressed.EntryMaker`.

    Args:
        cache: [slots, channels], from the channels on of which they are made.
        table: the block table of `cache`.
        entries, at: [places, dim], and where they are.
        tokens: of the step.
        norm: weight and eps. rotations: high, low and last, as in `Ops.rotations`.
    """
    (weight, eps), (high, low, last) = norm, rotations
    dim, places, rope, low_rows = entries.shape[1], at.block_table, 0, 1
    if low is not None:
        low_rows, rope = low.shape
    numbers = last, low_rows, len(at.seq_lens)
    strides = [tensor.stride(0) for tensor in (cache, entries, table, places)]
    launch(
        make_entries_kernel,
        (tokens,),
        (
            *(cache, bias, weight, high, low, entries, table, places),
            *(at.query_start_loc, at.seq_lens),
        ),
        (*strides, eps, *numbers),
        (
            *(dim, power_of_two(dim), rope, at.every, bias.shape[1] // dim, at.block_size),
            *(at.entry_tokens, min(TOKENS, power_of_two(at.every))),
        ),
    )


def turn_last(x: Tensor, rotation: Tensor, *, back: bool = False) -> Tensor:
    """Rotate neighbours among the last channels of each head in place; see
    `compressed.turned_last`. back: by the negative angles."""
    tokens, heads, dim = x.shape
    pairs = power_of_two(rotation.shape[1] // 2)
    block = min(power_of_two(heads), max(1, TURNED // pairs))
    launch(
        turn_last_kernel,
        (tokens, ceil_div(heads, block)),
        (x, rotation),
        (x.stride(0), x.stride(1), -1.0 if back else 1.0),
        (heads, dim, rotation.shape[1], block, pairs),
    )
    return x
