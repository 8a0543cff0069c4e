"""Quantised numbers from the cache as operands are exact in every dtype."""

from __future__ import annotations

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
import triton
import triton.language as tl
from helpers.optional_triton import device

from kvik.kernels.triton.kv_load import load_vectors, query_factors, stored

N = 16
VECTORS = tl.constexpr(4)  # per block


@triton.jit
def load_kernel(
    cache,
    zeros,
    out,
    N: tl.constexpr,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.arange(0, N)
    block, within = (n // VECTORS).to(tl.uint32), (n % VECTORS).to(tl.uint32)
    zero = tl.load(zeros + n)
    x = load_vectors(cache, block, within, zero, DTYPE, KIND, VECTORS, DIM, BLOCK_D)
    at = n[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(out + at, x.to(tl.float32))


@pytest.mark.parametrize("dtype", [tl.bfloat16, tl.float16, tl.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 24])
@pytest.mark.parametrize("kind", ["int4", "fp8", "fp8 bits", "int8"])
def test_numbers_are_exact(kind: str, dim: int, dtype: tl.dtype) -> None:
    if kind == "int4":
        codes = torch.arange(N * dim // 2).mul(7).to(torch.uint8).view(N, dim // 2)
        numbers = torch.stack((codes & 15, codes >> 4), 2).flatten(1).float()
        zeros = torch.arange(16).to(torch.int8)
        numbers -= zeros[:, None].float()
        cache = codes
    elif kind == "int8":
        cache = (torch.arange(N * dim) % 255 - 127).to(torch.int8).view(N, dim)
        numbers, zeros = cache.float(), torch.zeros(N, dtype=torch.int8)
    else:
        bits = torch.arange(N * dim).to(torch.uint8).view(N, dim)
        cache = bits.where((bits & 0x7F) != 0x7F, 0).view(torch.float8_e4m3fn)
        numbers, zeros = cache.float(), torch.zeros(N, dtype=torch.int8)
        numbers = numbers / 256 if kind == "fp8 bits" else numbers
    out = torch.empty(N, 32, device=device())
    load_kernel[(1,)](stored(cache.to(device())), zeros.to(device()), out, N, dtype, kind, dim, 32)
    assert torch.equal(out[:, :dim].cpu(), numbers) and not out[:, dim:].any()


@triton.jit
def factors_kernel(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, query_factors(tl.load(x + n), "fp8").to(tl.float32))


def test_factors_of_queries_are_limited_and_keep_nan() -> None:
    x = torch.tensor([1.5, 1e30, -torch.inf, torch.nan], dtype=torch.bfloat16, device=device())
    out = torch.empty(4, device=device())
    factors_kernel[(1,)](x, out, 4)
    assert out[:3].tolist() == [1.5, 65504.0, -65504.0] and out[3].isnan()
