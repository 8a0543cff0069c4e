"""Scores of an indexer, and the keys with the largest ones (attention/indexed.py).

The score of a key is the sum over the indexer's heads of weight * relu(q . k). A program scores
tiles of keys for one token, so a token's scores do not depend on other tokens. Then one program for
each token finds its k-th largest score, digit by digit of the scores' bits, and lists the places of
the chosen keys in ascending order. Of equal scores the first keys are chosen.

Everything is read on the device, so a step can be captured. Keys may also be those of entries that
sum up several tokens each (attention/compressed.py): the key of an entry is where its last token
would be, in the place of `ENTRY_TOKENS` narrow tokens.

Floor: with 64 heads of 128, 128 FLOPs for each byte of a bf16 key that a token reads, so tensor
cores for prompts, whose keys stay in the L2 cache, and memory for one token. The search reads a
token's scores five times, from L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.attention_shapes import LAUNCHED
from kvik.kernels.triton.draw import key_of
from kvik.kernels.triton.kv_load import operand, product
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two

KEYS = {2: 64, 4: 16}  # of a tile, by bytes of a number
TILE = 1024  # scores that the search reads at a time
BINS = tl.constexpr(256)  # values of a digit of the search
SEQUENCES = tl.constexpr(128)  # starts that are compared at once


@dataclass(frozen=True, slots=True)
class Places:
    """Where the keys, or entries, of the sequences of a step are."""

    query_start_loc: Tensor  # this and the next ones as in `StepLayout`
    seq_lens: Tensor
    block_table: Tensor
    first_keys: Tensor | None
    tree: Tensor | None
    block_size: int
    every: int = 1  # tokens of an entry; 1: keys of tokens
    entry_tokens: int = 1  # tokens whose places an entry takes

    @property
    def longest(self) -> int:
        """The most keys, or entries, that a sequence can have."""
        return self.block_table.shape[1] * self.block_size // self.every


@triton.jit
def sequence_of_token(query_start, sequences, token):
    """Return the sequence of a token; for tokens after the last sequence, `sequences`."""
    sequence = 0
    at = tl.arange(0, SEQUENCES)
    for first in range(0, sequences, SEQUENCES):
        ends = tl.load(query_start + 1 + first + at, mask=first + at < sequences, other=0x7FFFFFFF)
        sequence += tl.sum((ends <= token).to(tl.int32), 0)
    return sequence


@triton.jit
def seen_by_token(query_start, seq_lens, tree, sequences, token, TREE: tl.constexpr):
    """Return a token's sequence, how many tokens that has in this step, and keys before them; the
    end of the keys that the token may see; and its word in a tree (0: none).

    A token after the last sequence is one of the first that sees nothing.
    """
    sequence = sequence_of_token(query_start, sequences, token)
    inside = sequence < sequences
    sequence = tl.where(inside, sequence, 0)
    start = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - start
    context = tl.load(seq_lens + sequence)
    word = tl.full([], 0, tl.int64)
    if TREE:
        word = tl.load(tree + token, mask=inside, other=0)
    end = tl.where(word != 0, context, context - queries + (token - start).to(tl.int32) + 1)
    return sequence, queries, context - queries, tl.where(inside, end, 0), word


@triton.jit
def index_scores_kernel(
    q, weights, cache, table, query_start, seq_lens, first_keys, tree, scores,
    q_stride, weights_stride, cache_stride, table_stride, scale, sequences, first, width,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, EVERY: tl.constexpr,
    ENTRY_TOKENS: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """grid [tokens, programs]; q [.., HEADS * DIM], weights [.., HEADS], scores [tokens, width]
    fp32

    Scores from the last key on that a token sees are left as they are; in a tree, those of nodes
    that it does not see are -inf, as are those before the first key.

    Args:
        cache: rows of keys. first: token of the first row of scores.
    """
    DTYPE: tl.constexpr = cache.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    sequence, _, cached, end, word = seen_by_token(
        query_start, seq_lens, tree, sequences, token, TREE
    )
    end = end // EVERY
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = (h < HEADS)[:, None] & (d < DIM)[None, :]
    lane = (h * DIM)[:, None] + d[None, :]
    queries = operand(tl.load(q + token * q_stride + lane, mask=inside, other=0.0), DTYPE)
    weight = tl.load(weights + token * weights_stride + h, mask=h < HEADS, other=0.0)
    weight = (weight.to(tl.float32) * scale)[:, None]
    table += sequence.to(tl.int64) * table_stride
    for tile in range(tl.program_id(1), tl.cdiv(end, BLOCK_N), tl.num_programs(1)):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.minimum(key, end - 1) * EVERY + EVERY - 1
        block = tl.load(table + place // BLOCK_SIZE).to(tl.int64)
        at = (block * BLOCK_SIZE + place % BLOCK_SIZE) // ENTRY_TOKENS
        rows = cache + (at * cache_stride)[:, None] + d[None, :]
        keys = operand(tl.load(rows, mask=(d < DIM)[None, :], other=0.0), DTYPE)
        products = product(queries, tl.trans(keys), None)
        score = tl.sum(tl.maximum(products, 0.0) * weight, 0)
        if TREE:
            bit = tl.minimum(tl.maximum(key - cached, 0), 62)
            hidden = (word != 0) & (key >= cached) & (((word >> bit) & 1) == 0)
            score = tl.where(hidden, float("-inf"), score)
        if first_keys is not None:
            score = tl.where(key < tl.load(first_keys + sequence), float("-inf"), score)
        tl.store(scores + row * width + key, score, mask=key < end)


@triton.jit
def largest_places_kernel(
    scores, query_start, seq_lens, tree, places, counts, sequences, first, width,
    TOP: tl.constexpr, MOST: tl.constexpr, EVERY: tl.constexpr, POOLS: tl.constexpr,
    TREE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """grid [tokens]; scores [tokens, width], places [.., MOST], counts [..] int32

    Args:
        POOLS: TOP pools of EVERY keys are chosen, and the keys after the last whole one; the places
            are those of keys.
    """
    row = tl.program_id(0).to(tl.int64)
    token = first + row
    _, _, _, seen, _ = seen_by_token(query_start, seq_lens, tree, sequences, token, TREE)
    end = seen // EVERY
    scores += row * width
    places += token * MOST
    at, bins = tl.arange(0, TILE), tl.arange(0, BINS)
    cut = tl.full([], 0, tl.int64)  # the first digits of the last key that is chosen
    missing = tl.full([], TOP, tl.int32)  # keys with these digits that are still to be chosen
    if end > TOP:
        for digit in tl.static_range(4):
            shift = 24 - 8 * digit
            counted = tl.zeros([BINS], tl.int32)
            for begin in range(0, end, TILE):
                inside = begin + at < end
                key = key_of(tl.load(scores + begin + at, mask=inside, other=float("-inf")))
                of_cut = inside & ((key >> (shift + 8)) == cut)
                counted += tl.histogram(((key >> shift) & 255).to(tl.int32), BINS, mask=of_cut)
            reached = tl.cumsum(counted, 0, reverse=True)
            last = tl.max(tl.where(reached >= missing, bins, 0), 0)
            missing -= tl.sum(tl.where(bins > last, counted, 0), 0)
            cut = (cut << 8) | last.to(tl.int64)
    count = tl.full([], 0, tl.int32)
    equals = tl.full([], 0, tl.int32)
    for begin in range(0, end, TILE):
        inside = begin + at < end
        score = tl.load(scores + begin + at, mask=inside, other=float("-inf"))
        key = key_of(score)
        equal = ((key == cut) & inside).to(tl.int32)
        among = (equal > 0) & (tl.cumsum(equal, 0) + equals <= missing)
        chosen = ((key > cut) | among) & (score > float("-inf"))
        to = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
        chosen &= to < TOP
        if POOLS:
            for i in range(EVERY):
                tl.store(places + to * EVERY + i, (begin + at) * EVERY + i, mask=chosen)
        else:
            tl.store(places + to, begin + at, mask=chosen)
        equals += tl.sum(equal, 0)
        count += tl.sum(chosen.to(tl.int32), 0)
    if POOLS:
        count *= EVERY
        for key in range(end * EVERY, seen):
            tl.store(places + count, key)
            count += 1
    tl.store(counts + token, count)


def choose(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    at: Places,
    top: int,
    rows: int,
    *,
    pools: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the keys that each token reads.

    Args:
        q: [tokens, heads, dim], rotated, dense but for tokens. weights: [tokens, heads].
        cache: [rows, dim or more], keys, or those of entries or pools.
        rows: number of tokens whose scores are in memory at a time.
        pools: `at` is of pools of keys, of which `top` are chosen, and the last keys.

    Returns:
        places [tokens, most] and counts [tokens] int32: the places in a sequence, ascending, of the
        keys that each token reads, and their number.
    """
    tokens, heads, dim = q.shape
    most = (top + 1) * at.every - 1 if pools else top
    width, sequences = at.longest, len(at.seq_lens)
    rows = max(1, min(tokens, rows))
    scores = q.new_empty(rows, width, dtype=torch.float32)
    places = q.new_empty(tokens, most, dtype=torch.int32)
    counts = q.new_empty(tokens, dtype=torch.int32)
    blocks = (max(16, power_of_two(heads)), dim, max(16, power_of_two(dim)))
    tile = KEYS[cache.element_size()]
    lengths, is_tree = (at.query_start_loc, at.seq_lens), at.tree is not None
    for first in range(0, tokens, rows):
        some = min(rows, tokens - first)
        launch(
            index_scores_kernel,
            (some, min(ceil_div(width, tile), ceil_div(LAUNCHED, some))),
            (q, weights, cache, at.block_table, *lengths, at.first_keys, at.tree, scores),
            (
                *(q.stride(0), weights.stride(0), cache.stride(0), at.block_table.stride(0)),
                *((heads * dim) ** -0.5, sequences, first, width),
            ),
            (heads, *blocks, tile, at.block_size, at.every, at.entry_tokens, is_tree),
        )
        launch(
            largest_places_kernel,
            (some,),
            (scores, *lengths, at.tree, places, counts),
            (sequences, first, width),
            (top, most, at.every, pools, is_tree, TILE),
            num_warps=8,
        )
    return places, counts
