"""Storing to and loading from the native cache."""

from __future__ import annotations

import pytest
import torch
from helpers.native import FLOATS, normal, runtimes
from helpers.native_cache import NativeCache
from torch import Tensor

from kvik.kernels.kv_rounding import SCALES, round_vectors, unround_vectors

KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8)
name = "{0}".format


def places(block_size: int, kv_heads: int, head_dim: int, pair: int) -> tuple[Tensor, Tensor]:
    """Return where keys and values of a block are in the documented layout: indices into one block,
    each [kv_heads, block_size, head_dim]."""
    index = torch.arange(kv_heads * block_size * head_dim)
    strips = (kv_heads, block_size // 16)
    keys = index.view(*strips, head_dim // pair, 16, pair).transpose(2, 3)
    values = index.view(*strips, 16 // pair, head_dim, pair).transpose(3, 4)
    return keys.reshape(kv_heads, block_size, head_dim), values.reshape(
        kv_heads, block_size, head_dim
    )


def bytes_of_int4(block_size: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the byte of each pair of columns in four-bit caches, [kv_heads, block_size, head_dim /
    2]. Keys have columns 2i and 2i + 1 in a byte; values 16i + j and 16i + 8 + j."""
    index = torch.arange(kv_heads * block_size * head_dim // 2)
    strips = (kv_heads, block_size // 16)
    keys = index.view(*strips, head_dim // 2, 16).transpose(2, 3)
    values = index.view(*strips, 8, head_dim // 16, 8, 2).permute(0, 1, 2, 5, 3, 4)
    shape = (kv_heads, block_size, head_dim // 2)
    return keys.reshape(shape), values.reshape(shape)


def halves_of_16(numbers: Tensor) -> Tensor:
    """Reorder two numbers per byte, from columns 2i and 2i + 1 to columns 16i + j and 16i + 8 +
    j."""
    q = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2).unflatten(-1, (-1, 2, 8))
    return (q[..., 0, :] | q[..., 1, :] << 4).flatten(-2)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(16, 3, 16), (48, 1, 112)])
@pytest.mark.parametrize("runtime", runtimes())
def test_stores_in_the_documented_layout(
    runtime, block_size, kv_heads, head_dim, dtype, kv_dtype
) -> None:
    rows, blocks = 37, 5
    cache = NativeCache(blocks, kv_heads, block_size, head_dim, kv_dtype)
    wide = normal(rows, 2, kv_heads + 1, head_dim, dtype=dtype)
    k, v = wide[:, 0, :kv_heads], wide[:, 1, 1:]  # rows far apart
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:rows]
    cache.store(runtime, k, v, slots)

    expected = NativeCache(blocks, kv_heads, block_size, head_dim, kv_dtype)
    if kv_dtype == torch.uint8:
        key_places, value_places = bytes_of_int4(block_size, kv_heads, head_dim)
    else:
        pair = 1 if kv_dtype == torch.float32 else 2
        key_places, value_places = places(block_size, kv_heads, head_dim, pair)
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for x, to, scales, at in (
            (k[row], expected.k, expected.k_scales, key_places),
            (v[row], expected.v, expected.v_scales, value_places),
        ):
            stored = x.to(kv_dtype) if scales is None else None
            if scales is not None:
                stored, scales[block, :, offset] = round_vectors(x, kv_dtype)
                if kv_dtype == torch.uint8 and at is value_places:
                    stored = halves_of_16(stored)
            to[block].view(-1)[at[:, offset]] = stored
    for field in ("k", "v", "k_scales", "v_scales"):
        found, wanted = getattr(cache, field), getattr(expected, field)
        if wanted is not None:
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_load_is_the_inverse(runtime, dtype, kv_dtype) -> None:
    cache = NativeCache(4, 2, 32, 48, kv_dtype)
    k, v = normal(50, 2, 48, dtype=dtype), normal(50, 2, 48, seed=1, dtype=dtype)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:50]
    cache.store(runtime, k, v, slots)
    for found, x in zip(cache.load(runtime, slots, dtype), (k, v), strict=True):
        kept = (
            unround_vectors(*round_vectors(x, kv_dtype)) if kv_dtype in SCALES else x.to(kv_dtype)
        )
        assert torch.equal(found, kept.to(dtype))


@pytest.mark.parametrize("runtime", runtimes((1, 2)))
def test_rows_without_a_slot_and_no_rows(runtime) -> None:
    cache = NativeCache(1, 1, 16, 16, torch.bfloat16)
    x = normal(3, 1, 16)
    cache.store(runtime, x[:0], x[:0], torch.zeros(0, dtype=torch.int64))
    cache.store(runtime, x, x, torch.full((3,), -1))
    assert bool(cache.k.isnan().all()) and bool(cache.v.isnan().all())
    cache.store(runtime, x, x, torch.tensor([-1, 9, -1]))
    assert int(cache.k.isnan().sum()) == int(cache.v.isnan().sum()) == 15 * 16


def extreme_vectors() -> Tensor:
    """Return extreme values, [vectors, 16]."""
    head = normal(16)
    tiny, large, far, near = torch.full((16,), 1e-40), head * 1e37, head.clone(), head.clone()
    nan, infinite, minus = head.clone(), head.clone(), head.clone()
    nan[3], infinite[5], minus[5] = float("nan"), float("inf"), -float("inf")
    far[7], near[9] = 1e4, -6e4
    most = torch.full((16,), 3.4e38)
    zeros, equal = torch.zeros(16), torch.full((16,), 1.7)
    both = torch.cat([most[:8], -most[:8]])
    usual = (head, zeros, tiny, large, nan, infinite, minus, far, near, equal, -equal)
    return torch.stack([*usual, most, both, head.abs(), -head.abs(), head])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=name)
@pytest.mark.parametrize("runtime", runtimes((2,)))
def test_extreme_values_stay_with_their_token(runtime, kv_dtype) -> None:
    rows = extreme_vectors()[:, None]
    slots = torch.arange(len(rows))
    cache = NativeCache(1, 1, 16, 16, kv_dtype)
    cache.store(runtime, rows, rows, slots)
    if kv_dtype in SCALES:
        kept, atol = unround_vectors(*round_vectors(rows, kv_dtype)), 0.0
    else:
        kept, atol = rows.to(kv_dtype).float(), 1e-38  # denormal numbers may become zero
    for found in cache.load(runtime, slots, torch.float32):
        torch.testing.assert_close(found, kept, rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("runtime", runtimes((5,)))
def test_neighbours_of_four_bits_do_not_disturb_each_other(runtime) -> None:
    """Tokens are stored one by one, and by many threads at once."""
    cache, whole = (NativeCache(1, 3, 64, 48, torch.uint8) for _ in range(2))
    k, v = normal(64, 3, 48), normal(64, 3, 48, seed=1)
    for token in torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist():
        one = slice(token, token + 1)
        cache.store(runtime, k[one], v[one], torch.tensor([token]))
    whole.store(runtime, k, v, torch.arange(64))
    assert torch.equal(cache.k, whole.k) and torch.equal(cache.v, whole.v)
