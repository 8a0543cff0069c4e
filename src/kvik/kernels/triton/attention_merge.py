"""The results of the splits of attention_decode.py, joined.

Each split has a result and the logarithm of its total weight; the whole is their weighted mean,
relative to the largest. Splits are added in their order, in blocks of 16.

Floor: memory. Reads splits * head_dim * 4 bytes per query head; programs are many and small.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvik.kernels.triton.attention_decode import sequence_of
from kvik.kernels.triton.attention_shapes import SPREAD, block_d
from kvik.kernels.triton.launch import Resources

AT_ONCE = tl.constexpr(16)


@triton.jit
def merge(part_out, part_weight, piece, splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D] result of one query head; 0 where no split saw a key.

    Args:
        piece: of its first split.
    """
    every = tl.arange(0, SPREAD)
    weights = tl.load(part_weight + piece + every, mask=every < splits, other=float("-inf"))
    largest = tl.max(weights, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(weights - largest), 0)
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


# Numbers that change from step to step must not compile anew.
@triton.jit(do_not_specialize=["window", "first_sequence", "above", "most", "slab"])
def attention_merge_kernel(
    part_out,
    part_weight,
    query_start,
    seq_lens,
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
    """grid [heads, most, sequences]; arguments as of `attention_decode_kernel`"""
    HEADS: tl.constexpr = GROUP * KV_HEADS
    head = tl.program_id(0)
    query = tl.program_id(1)
    sequence = first_sequence + tl.program_id(2)
    start, queries, _, _, _, splits = sequence_of(
        query_start, seq_lens, sequence, window, GROUP, KV_HEADS, BLOCK_M, WINDOW
    )
    if (queries <= above) | (queries > most) | (query >= queries):
        return
    piece = tl.program_id(2) * slab + (query * HEADS + head) * splits
    result = merge(part_out, part_weight, piece, splits, HEAD_DIM, BLOCK_D)
    d = tl.arange(0, BLOCK_D)
    target = out + ((start + query).to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(target + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def _resources(head_dim: int) -> Resources:
    integers = ("window", "first_sequence", "above", "most", "slab")
    return Resources(
        kernel=attention_merge_kernel,
        what=f"head_dim {head_dim}, bf16",
        types={
            "part_out": "*fp32",
            "part_weight": "*fp32",
            "query_start": "*i32",
            "seq_lens": "*i32",
            "out": "*bf16",
            **dict.fromkeys(integers, "i32"),
        },
        constants={
            "GROUP": 4,
            "KV_HEADS": 8,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d(head_dim),
            "BLOCK_M": 16,
            "WINDOW": False,
        },
    )


RESOURCES = (_resources(128), _resources(512))
