"""Group the rows of a step by expert: which (token, expert) pairs are multiplied together.

The host does not read the result, so the grid of the products has as many blocks as any choice of
experts may need; unneeded blocks have no expert.

Floor: two launches. The ids, eight bytes per pair, are read by a program per expert, from the L2
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.launch import ceil_div, launch, power_of_two

BLOCK = 1024  # pairs that a program reads at a time
COMPARED, LISTED = 4096, 256  # per program: most blocks times experts, and most blocks


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(ids, order, starts, pairs, BLOCK: tl.constexpr):
    """grid [experts]; ids [pairs] int64 -> order [pairs], by expert and then by pair, and starts
    [experts], where the pairs of an expert begin in it; int32."""
    expert = tl.program_id(0)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lower += (tl.load(ids + at, mask=at < pairs, other=1 << 30) < expert).to(tl.int32)
    begin = tl.sum(lower, 0)
    tl.store(starts + expert, begin)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + begin + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
        begin += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["pairs", "count"])
def blocks_kernel(
    starts, blocks, pairs, count, experts, BT: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [count / BLOCK]; starts [experts] -> blocks [3, count] int32: the expert of a block, -1
    for none, and where its pairs begin and end in the order."""
    e = tl.arange(0, EXPERTS)
    begins = tl.load(starts + e, mask=e < experts, other=pairs)
    ends = tl.load(starts + e + 1, mask=e + 1 < experts, other=pairs)
    last = tl.cumsum(tl.cdiv(ends - begins, BT), 0)[None, :]  # blocks of experts up to this
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = last <= b[:, None]
    expert = tl.sum(before.to(tl.int32), 1)
    nth = b - tl.max(tl.where(before, last, 0), 1)
    there = expert < experts
    begin = tl.load(starts + expert, mask=there, other=0) + nth * BT
    end = tl.load(starts + expert + 1, mask=expert + 1 < experts, other=pairs)
    inside = b < count
    tl.store(blocks + b, tl.where(there, expert, -1), mask=inside)
    tl.store(blocks + count + b, begin, mask=inside)
    tl.store(blocks + 2 * count + b, tl.minimum(end, begin + BT), mask=inside)


@triton.jit
def block_at(blocks, order, pairs, block, count, BT: tl.constexpr):
    """Return the expert of a block, -1 for none, and its pairs [BT]; `pairs` after the last."""
    expert = tl.load(blocks + block)
    at = tl.load(blocks + count + block) + tl.arange(0, BT)
    inside = (at < tl.load(blocks + 2 * count + block)) & (expert >= 0)
    return expert, tl.load(order + at, mask=inside, other=pairs)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Pairs grouped by expert."""

    order: Tensor  # [pairs] int32. Pair p is token p // active with the expert ids[p].
    blocks: Tensor  # [3, count] int32; see `blocks_kernel`


def max_blocks(pairs: int, experts: int, size: int) -> int:
    """Return how many blocks of `size` pairs of one expert there can be: experts that have one
    pair need a block each, and one more for every `size` pairs beyond those."""
    used = min(pairs, experts)
    return used + (pairs - used) // size


def by_expert(ids: Tensor, experts: int, size: int) -> ExpertRows:
    """Group pairs by expert.

    Args:
        ids: [tokens, active] int64, at least one, contiguous.
        size: pairs of a block.
    """
    pairs, device = ids.numel(), ids.device
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    starts = torch.empty(experts, dtype=torch.int32, device=device)
    launch(sort_kernel, (experts,), (ids, order, starts), (pairs,), (BLOCK,))
    count, filled = max_blocks(pairs, experts, size), power_of_two(experts)
    at_once = min(LISTED, max(1, COMPARED // filled))
    blocks = torch.empty(3, count, dtype=torch.int32, device=device)
    grid, numbers = (ceil_div(count, at_once),), (pairs, count, experts)
    launch(blocks_kernel, grid, (starts, blocks), numbers, (size, filled, at_once))
    return ExpertRows(order, blocks)
