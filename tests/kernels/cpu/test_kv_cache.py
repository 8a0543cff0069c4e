"""Keys and values into the native cache and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.native import FLOATS, normal, runtimes
from tests.helpers.native_cache import NativeCache

KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
name = "{0}".format


def places(block_size: int, kv_heads: int, head_dim: int, pair: int) -> tuple[Tensor, Tensor]:
    """Where keys and values of a block stand, as the layout is written down: indices into one
    block, each [kv_heads, block_size, head_dim]."""
    index = torch.arange(kv_heads * block_size * head_dim)
    strips = (kv_heads, block_size // 16)
    keys = index.view(*strips, head_dim // pair, 16, pair).transpose(2, 3)
    values = index.view(*strips, 16 // pair, head_dim, pair).transpose(3, 4)
    return keys.reshape(kv_heads, block_size, head_dim), values.reshape(
        kv_heads, block_size, head_dim
    )


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 over the last dimension: values and scales."""
    x = x.float()
    most, limit = x.abs().amax(-1), torch.tensor(127.0)  # a tensor, so that torch truly divides
    return (x * (limit / most)[..., None]).round(), most / limit


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize(("block_size", "kv_heads", "head_dim"), [(16, 3, 16), (48, 1, 112)])
@pytest.mark.parametrize("runtime", runtimes())
def test_stores_where_the_layout_says(
    runtime, block_size, kv_heads, head_dim, dtype, kv_dtype
) -> None:
    rows, blocks = 37, 5
    cache = NativeCache(blocks, kv_heads, block_size, head_dim, kv_dtype)
    wide = normal(rows, 2, kv_heads + 1, head_dim, dtype=dtype)
    k, v = wide[:, 0, :kv_heads], wide[:, 1, 1:]  # rows far apart
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(1))[:rows]
    cache.store(runtime, k, v, slots)

    expected = NativeCache(blocks, kv_heads, block_size, head_dim, kv_dtype)
    key_places, value_places = places(
        block_size, kv_heads, head_dim, 1 if kv_dtype == torch.float32 else 2
    )
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for x, to, scales, at in (
            (k[row], expected.k, expected.k_scales, key_places),
            (v[row], expected.v, expected.v_scales, value_places),
        ):
            stored = x
            if scales is not None:
                stored, scales[block, :, offset] = quantised(x)
            to[block].view(-1)[at[:, offset]] = stored.to(kv_dtype)
    for field in ("k", "v"):
        found, wanted = getattr(cache, field), getattr(expected, field)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        if kv_dtype == torch.int8:
            found, wanted = getattr(cache, f"{field}_scales"), getattr(expected, f"{field}_scales")
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=name)
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("runtime", runtimes((1, 5)))
def test_load_is_the_inverse(runtime, dtype, kv_dtype) -> None:
    cache = NativeCache(4, 2, 32, 48, kv_dtype)
    k, v = normal(50, 2, 48, dtype=dtype), normal(50, 2, 48, seed=1, dtype=dtype)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:50]
    cache.store(runtime, k, v, slots)
    for found, x in zip(cache.load(runtime, slots, dtype), (k, v), strict=True):
        if kv_dtype == torch.int8:
            half_step = x.float().abs().amax(-1, keepdim=True) / 254
            rounding = x.float().abs() * (2**-8 if dtype == torch.bfloat16 else 2**-23)
            assert bool(((found - x).abs() <= half_step * 1.0001 + rounding).all())
        else:
            assert torch.equal(found, x.to(kv_dtype).to(dtype))


@pytest.mark.parametrize("runtime", runtimes((1, 2)))
def test_rows_without_a_place_and_no_rows(runtime) -> None:
    cache = NativeCache(1, 1, 16, 16, torch.bfloat16)
    x = normal(3, 1, 16)
    cache.store(runtime, x[:0], x[:0], torch.zeros(0, dtype=torch.int64))
    cache.store(runtime, x, x, torch.full((3,), -1))
    assert bool(cache.k.isnan().all()) and bool(cache.v.isnan().all())
    cache.store(runtime, x, x, torch.tensor([-1, 9, -1]))
    assert int(cache.k.isnan().sum()) == int(cache.v.isnan().sum()) == 15 * 16


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=name)
@pytest.mark.parametrize("runtime", runtimes((2,)))
def test_extreme_values_stay_with_their_token(runtime, kv_dtype) -> None:
    head = normal(16)
    tiny, large = torch.full((16,), 1e-40), head * 1e37
    nan, infinite = head.clone(), head.clone()
    nan[3], infinite[5] = float("nan"), float("inf")
    rows = torch.stack([head, torch.zeros(16), tiny, large, nan, infinite, head])[:, None]
    slots = torch.arange(len(rows))
    cache = NativeCache(1, 1, 16, 16, kv_dtype)
    cache.store(runtime, rows, rows, slots)
    for loaded in cache.load(runtime, slots, torch.float32):
        found = loaded[:, 0]
        rtol = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.int8: 0.0}[kv_dtype]
        atol = float(head.abs().max()) / 253 if kv_dtype == torch.int8 else 0.0
        for row in (0, 6):
            torch.testing.assert_close(found[row], head, rtol=rtol, atol=atol)
        assert not bool(found[1].any())
        torch.testing.assert_close(found[2], tiny, rtol=0, atol=1e-39)
        torch.testing.assert_close(found[3] / 1e37, head, rtol=rtol + 1e-6, atol=atol)
        assert bool(found[4, 3].isnan())
        assert not bool(found[5, 5].isfinite())


def test_every_instruction_set_writes_the_same() -> None:
    x = normal(16, 2, 32)
    found = []
    for parameter in runtimes((1,)):
        cache = NativeCache(1, 2, 16, 32, torch.int8)
        cache.store(parameter.values[0], x, x, torch.arange(16))
        found.append((cache.k, cache.v, cache.k_scales, cache.v_scales))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
