"""Kernels that move or add rows, and that find the largest number of each row.

Floor: memory. Rows are read and written once, as the largest integers that they consist of,
whatever their dtype. Many programs search a row of logits for the largest number: one SM reads
0.1 TB/s or less, and a row of 128k logits is 512 KiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.triton.launch import in_blocks, launch, power_of_two

PIECE = 1024  # elements of a row that a program moves
CHUNK = 4096  # logits of a program
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def gather_kernel(table, ids, out, dim, table_stride, BLOCK: tl.constexpr):
    """grid [n, blocks]; table [rows, dim], ids [n], out [n, dim]"""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + n).to(tl.int64)
    values = tl.load(table + row * table_stride + at, mask=at < dim)
    tl.store(out + n * dim + at, values, mask=at < dim)


@triton.jit
def store_rows_kernel(k, v, k_cache, v_cache, slots, k_stride, v_stride, dim, BLOCK: tl.constexpr):
    """grid [tokens, blocks]; k, v [tokens, dim], caches [positions, dim], slots [tokens]"""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    mask = (at < dim) & (slot >= 0)
    tl.store(k_cache + slot * dim + at, tl.load(k + token * k_stride + at, mask=mask), mask=mask)
    tl.store(v_cache + slot * dim + at, tl.load(v + token * v_stride + at, mask=mask), mask=mask)


@triton.jit
def scatter_kernel(rows, ids, out, dim, BLOCK: tl.constexpr):
    """grid [n, blocks]; rows [n, dim], out [.., dim]: out[ids[i]] = rows[i]"""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + n).to(tl.int64)
    tl.store(out + row * dim + at, tl.load(rows + n * dim + at, mask=at < dim), mask=at < dim)


@triton.jit
def weighted_sums_kernel(
    x, weights, residual, out, dim, x_stride, weights_stride, residual_stride,
    SUMS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [rows, blocks]; x [rows, PARTS dim], weights [rows, SUMS PARTS], residual (or None) and
    out [rows, SUMS dim]"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    for s in range(SUMS):
        total = tl.zeros([BLOCK], tl.float32)
        if residual is not None:
            first = residual + row * residual_stride + s * dim
            total += tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        for p in range(PARTS):
            weight = tl.load(weights + row * weights_stride + s * PARTS + p)
            part = tl.load(x + row * x_stride + p * dim + at, mask=inside, other=0.0)
            total += weight * part.to(tl.float32)
        to = out + (row * SUMS + s) * dim
        tl.store(to + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _largest(values, ids):
    """Return the largest number and the lowest id that has it; NaN if there is one."""
    nan = tl.max((values != values).to(tl.int32), 0)
    numbers = tl.where(values != values, float("-inf"), values)
    top = tl.max(numbers, 0)
    first = tl.min(tl.where(numbers == top, ids, 0x7FFFFFFF), 0)
    return tl.where(nan > 0, float("nan"), top), first


@triton.jit
def largest_of_chunks_kernel(logits, tops, firsts, vocab, stride, CHUNK: tl.constexpr):
    """grid [rows, chunks]; logits [rows, vocab], tops and firsts [rows, chunks]"""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    values = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top, first = _largest(values, tl.where(inside, ids, 0x7FFFFFFF))
    at = row * tl.num_programs(1) + chunk
    tl.store(tops + at, top)
    tl.store(firsts + at, first)


@triton.jit
def largest_of_rows_kernel(tops, firsts, top, ids, chunks, CHUNKS: tl.constexpr):
    """grid [rows]; tops and firsts [rows, chunks], top and ids [rows]"""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    values = tl.load(tops + row * chunks + at, mask=inside, other=float("-inf"))
    found = tl.load(firsts + row * chunks + at, mask=inside, other=0x7FFFFFFF)
    largest, first = _largest(values, found)
    tl.store(top + row, largest)
    tl.store(ids + row, first.to(tl.int64))


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """See `Ops`."""
    out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
    source, to = _as_integers(table, out)
    dim = source.shape[1]
    block, blocks = in_blocks(dim, PIECE)
    tensors, numbers = (source, ids.contiguous(), to), (dim, source.stride(0))
    launch(gather_kernel, (len(ids), blocks), tensors, numbers, (block,))
    return out


def weighted_sums(x: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
    """See `Ops`."""
    rows, sums, parts = weights.shape
    dim = x.shape[1] // parts
    out = torch.empty(rows, sums * dim, dtype=x.dtype, device=x.device)
    block, blocks = in_blocks(dim, PIECE)
    tensors, strides = (x, weights, residual, out), (x.stride(0), weights.stride(0))
    numbers = dim, *strides, 0 if residual is None else residual.stride(0)
    launch(weighted_sums_kernel, (rows, blocks), tensors, numbers, (sums, parts, block))
    return out


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops`; a token with slot -1 is not stored. Tokens may be strided."""
    k, v = (x if x.dim() == 2 and x.stride(1) == 1 else x.flatten(1) for x in (k, v))
    k_cache, v_cache = (cache.flatten(0, 1).flatten(1) for cache in (k_cache, v_cache))
    if not v.shape[1]:  # latent vectors, which are both K and V
        v, v_cache = k, k_cache
    k, v, k_cache, v_cache = _as_integers(k, v, k_cache, v_cache)
    dim = k.shape[1]
    block, blocks = in_blocks(dim, PIECE)
    tensors = (k, v, k_cache, v_cache, slot_mapping.contiguous())
    numbers = (k.stride(0), v.stride(0), dim)
    launch(store_rows_kernel, (len(k), blocks), tensors, numbers, (block,))


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """See `Ops`; rows are copied first, as a block may be both source and target."""
    flat = cache.flatten(1)
    rows, copies = _as_integers(flat, gather_rows(flat, source))
    dim = rows.shape[1]
    block, blocks = in_blocks(dim, PIECE)
    tensors = (copies, target.contiguous(), rows)
    launch(scatter_kernel, (len(source), blocks), tensors, (dim,), (block,))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops`."""
    rows, vocab = logits.shape
    device = logits.device
    chunk, chunks = in_blocks(vocab, CHUNK)
    tops = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    firsts = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    top = torch.empty(rows, dtype=torch.float32, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        launch(
            largest_of_chunks_kernel, (rows, chunks), (logits, tops, firsts),
            (vocab, logits.stride(0)), (chunk,), num_warps=8,
        )  # fmt: skip
        tensors = (tops, firsts, top, ids)
        launch(largest_of_rows_kernel, (rows,), tensors, (chunks,), (power_of_two(chunks),))
    return top, ids


def _as_integers(*rows: Tensor) -> list[Tensor]:
    """View rows [n, dim] of one type, with dense elements, as the largest integers that fit."""
    item = size = rows[0].element_size()
    numbers = [n for x in rows for n in (x.shape[1], x.stride(0), x.storage_offset())]
    while size < 8 and all(n * item % (2 * size) == 0 for n in numbers):
        size *= 2
    # First as integers of the same size: torch cannot view fp8 as wider numbers.
    return [x.view(_INTEGERS[item]).view(_INTEGERS[size]) for x in rows]
