"""The low-rank products of a few tokens, each with an adapter of its own: experts of a small inner
size, one for each token, whose matrices are floats (Chen et al. 2023, "Punica", arXiv 2310.18547).

The inputs of A are split among programs, since its few rows would occupy only one. The second
launch adds the partial sums, so two launches do what five do for experts (sorting, two products,
and a sum).

Floor: the bytes of A and B of each token, from the L2 cache if tokens share an adapter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.experts import VALUES, Tables, TritonExperts, part_of_table
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two
from kvik.kernels.weights import ExpertSet

TILE = 8192  # numbers of a matrix that a program reads
MAX_RANK = 128
# More tokens share what they read in the products of experts. Not measured on a GPU yet.
MAX_TOKENS = 64


@triton.jit
def shrink_kernel(
    x, table, ids, partial, experts, rank, inputs, x_stride, RANK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """grid [tokens, parts]; x [tokens, inputs] -> partial [tokens, parts, RANK] fp32: the sums of A
    x over SPAN inputs each."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + token)
    if expert < 0:
        return
    values = part_of_table(table, VALUES, expert, experts, x.dtype.element_ty)
    r = tl.arange(0, RANK)
    k = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = k < inputs
    xs = tl.load(x + token * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    at = values + r.to(tl.int64)[:, None] * inputs + k[None, :]
    a = tl.load(at, mask=(r < rank)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    place = token * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + place * RANK + r, tl.sum(a * xs[None, :], 1))


@triton.jit
def expand_kernel(
    partial, table, ids, y, experts, rank, outputs, parts, RANK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [tokens, blocks of outputs]; y [tokens, outputs] += B times the sum of `partial`."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + token)
    if expert < 0:
        return
    dtype: tl.constexpr = y.dtype.element_ty
    values = part_of_table(table, VALUES, expert, experts, dtype)
    r = tl.arange(0, RANK)
    sums = tl.zeros((RANK,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = partial + (token * parts + part)[:, None] * RANK + r[None, :]
        sums += tl.sum(tl.load(at, mask=(part < parts)[:, None], other=0.0), 0)
    inner = sums.to(dtype).to(tl.float32)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < outputs
    lines = values + o.to(tl.int64)[:, None] * rank + r[None, :]
    b = tl.load(lines, mask=inside[:, None] & (r < rank)[None, :], other=0.0).to(tl.float32)
    near = y + token * outputs + o
    total = tl.load(near, mask=inside, other=0.0).to(tl.float32) + tl.sum(b * inner[None, :], 1)
    tl.store(near, total.to(dtype), mask=inside)


def with_low_rank(experts: TritonExperts) -> Callable[..., Tensor]:
    """Return an `Ops.experts` that computes few tokens with adapters by these kernels."""

    def run(
        x: Tensor, ids: Tensor, weights: Tensor | None, chosen: ExpertSet, residual: Tensor | None
    ) -> Tensor:
        few = ids.shape[1] == 1 and 0 < len(ids) <= MAX_TOKENS and weights is None
        if not few or residual is None or not _low_rank(chosen) or not residual.is_contiguous():
            return experts.experts(x, ids, weights, chosen, residual)
        _add(x, ids, chosen, residual)
        return residual

    return run


def _low_rank(chosen: ExpertSet) -> bool:
    up, down = chosen.up[0].spec, chosen.down[0].spec
    plain = up.kind.floats and down.kind.floats and up.activation is None
    return plain and not up.bias and not down.bias and up.rows <= MAX_RANK


def _add(x: Tensor, ids: Tensor, chosen: ExpertSet, y: Tensor) -> None:
    """Add the products to y, [tokens, outputs]."""
    tables, (tokens, inputs) = chosen.data, x.shape
    assert isinstance(tables, Tables)
    count, rank, outputs = len(chosen.up), chosen.up[0].spec.rows, chosen.outputs
    filled = max(16, power_of_two(rank))
    wide = TILE // filled
    parts = ceil_div(inputs, wide)
    partial = torch.empty(tokens, parts, filled, dtype=torch.float32, device=x.device)
    tensors = (x, tables.up, ids, partial)
    launch(
        shrink_kernel, (tokens, parts), tensors, (count, rank, inputs, x.stride(0)), (filled, wide)
    )
    launch(
        expand_kernel,
        (tokens, ceil_div(outputs, wide)),
        (partial, tables.down, ids, y),
        (count, rank, outputs, parts),
        (filled, min(wide, power_of_two(parts)), wide),
    )
