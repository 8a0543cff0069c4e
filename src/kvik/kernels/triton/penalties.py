"""Penalties for tokens seen before.

Floor: memory. The tables' 5 bytes of each token are read; logits only where a block of a row has
tokens that were seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.ops import Penalties
from kvik.kernels.triton.launch import ceil_div, power_of_two

PIECE = 1024  # tokens of a program


@triton.jit
def penalize_kernel(
    logits,
    rows,
    seen,
    repetitions,
    frequencies,
    presences,
    in_prompt,
    counts,
    vocab,
    stride,
    seen_stride,
    BLOCK: tl.constexpr,
):
    """grid [n, blocks]; logits [.., vocab] fp32, in_prompt [.., vocab] uint8, counts [.., vocab]"""
    n = tl.program_id(0).to(tl.int64)
    row, table = tl.load(rows + n).to(tl.int64), tl.load(seen + n).to(tl.int64)
    repetition, frequency = tl.load(repetitions + n), tl.load(frequencies + n)
    presence = tl.load(presences + n)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    count = tl.load(counts + table * seen_stride + ids, mask=inside, other=0)
    prompt = tl.load(in_prompt + table * seen_stride + ids, mask=inside, other=0)
    known = (count > 0) | (prompt != 0)
    x = tl.load(logits + row * stride + ids, mask=known, other=0.0)
    y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    y = tl.where(count > 0, y - frequency * count.to(tl.float32) - presence, y)
    tl.store(logits + row * stride + ids, y, mask=known)


def penalize(logits: Tensor, penalties: Penalties) -> None:
    """See `Ops`."""
    vocab = logits.shape[1]
    block = min(PIECE, power_of_two(vocab))
    penalize_kernel[len(penalties.rows), ceil_div(vocab, block)](
        logits,
        penalties.rows,
        penalties.seen,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        penalties.in_prompt.view(torch.uint8),
        penalties.counts,
        vocab,
        logits.stride(0),
        penalties.counts.stride(0),
        block,
        enable_fp_fusion=False,  # each step rounded by itself, as on a CPU
    )
