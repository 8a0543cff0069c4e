"""Rotation, rounding and the store in one launch, with the bits of separate steps."""

from __future__ import annotations

import pytest
import torch
from helpers.optional_triton import NO_TRITON, device
from torch import Tensor

pytest.importorskip("triton", reason=NO_TRITON)

from kvik.attention.base import keep_queries
from kvik.attention.layout import StepLayout
from kvik.kernels.kv_rounding import SCALES, movable, round_vectors
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.triton import rotary
from kvik.kernels.triton.rotary import rotate_and_store

TOKENS, HEADS, KV_HEADS, DIM, BLOCK = 6, 6, 3, 20, 4
SLOTS = torch.tensor([3, 7, 0, -1, 15, 8])
FORMATS = (torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinity


def heads_of_a_step() -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of one product, with vectors that are hard to round."""
    qkv = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
    hard = qkv[:, HEADS:]
    hard[0, 0], hard[0, 3] = 0.0, -hard[0, 3].abs()
    hard[1, 0, 4], hard[1, 3, 5] = torch.nan, torch.inf
    hard[2, 1] *= 1e-31
    hard[2, 3] *= 1e37
    hard[2, 4] = 3.3e38
    hard[4, 3, :] = torch.arange(DIM) - 7.5  # halves between steps
    return qkv.to(device()).split((HEADS, KV_HEADS, KV_HEADS), dim=1)


def empty_cache(dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    dim = DIM // 2 if dtype == torch.uint8 else DIM
    numbers = torch.zeros(4, BLOCK, KV_HEADS, dim, device=device()).to(dtype)
    if dtype not in SCALES:
        return numbers, None
    return numbers, torch.zeros(4, BLOCK, KV_HEADS, dtype=SCALES[dtype], device=device())


def stored_plainly(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    numbers, scales = empty_cache(dtype)
    kept = SLOTS >= 0
    rounded = round_vectors(x, dtype) if scales is not None else (x.to(dtype),)
    for cache, values in zip((numbers, scales), rounded, strict=False):
        movable(cache).flatten(0, 1)[SLOTS[kept]] = movable(values)[kept]
    return (numbers,) if scales is None else (numbers, scales)


def angles_of_tokens() -> Tensor:
    angles = torch.randn(TOKENS, DIM // 2, generator=torch.Generator().manual_seed(1))
    return torch.cat((angles.cos(), angles.sin()), -1).to(device())


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_cache_holds_the_same_bits(dtype: torch.dtype, rotated: bool) -> None:
    rotation = angles_of_tokens() if rotated else None
    q, k, v = heads_of_a_step()
    expected_q, expected_k = (q, k) if rotation is None else REFERENCE.rotary(q, k, rotation)
    expected_q = expected_q.clone()
    expected = [stored_plainly(x, dtype) for x in (expected_k, v)]
    (keys, key_scales), (values, value_scales) = empty_cache(dtype), empty_cache(dtype)
    scales = None
    if key_scales is not None and value_scales is not None:
        scales = key_scales, value_scales
    before = k.clone()
    found_q = rotate_and_store(q, k, v, rotation, (keys, values), scales, SLOTS.to(device()))
    torch.testing.assert_close(found_q, expected_q, rtol=0, atol=0)
    torch.testing.assert_close(k, before, rtol=0, atol=0, equal_nan=True)
    for found, wanted in zip(((keys, key_scales), (values, value_scales)), expected, strict=True):
        for a, b in zip(found, wanted, strict=False):
            assert a is not None
            torch.testing.assert_close(movable(a), movable(b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_heads_are_normalised_in_the_same_launch(dtype: torch.dtype, rotated: bool) -> None:
    """Like a separate norm before, except for the order of summed squares."""
    model = torch.float32 if dtype == torch.int8 else dtype
    draw = torch.Generator().manual_seed(2)
    shape = (TOKENS, HEADS + 2 * KV_HEADS, DIM)
    qkv = (torch.randn(shape, generator=draw) * 3).to(device(), model)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    weights = [(torch.rand(DIM, generator=draw) + 0.5).to(device(), model) for _ in range(2)]
    rotation = angles_of_tokens() if rotated else None
    normed = [
        REFERENCE.rms_norm(x, weight, 1e-5) for x, weight in zip((q, k), weights, strict=True)
    ]
    plain_q, plain_k = normed if rotation is None else REFERENCE.rotary(*normed, rotation)
    (keys, key_scales), (values, value_scales) = empty_cache(dtype), empty_cache(dtype)
    scales = None
    if key_scales is not None and value_scales is not None:
        scales = key_scales, value_scales
    expected_v = stored_plainly(v, dtype)[0]
    found = rotate_and_store(
        q, k, v, rotation, (keys, values), scales, SLOTS.to(device()), (*weights, 1e-5)
    )
    rounding = 4 * torch.finfo(model).eps
    torch.testing.assert_close(found, plain_q, rtol=rounding, atol=rounding)
    stored = stored_plainly(plain_k, dtype)[0]
    step = 1 if dtype == torch.int8 else rounding  # a code may be off by one
    torch.testing.assert_close(keys, stored, rtol=rounding, atol=step)
    assert not torch.equal(keys.float(), torch.zeros_like(keys).float())
    torch.testing.assert_close(values, expected_v, rtol=0, atol=0)  # v is not normalised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_queries_are_kept_as_by_separate_steps(dtype: torch.dtype) -> None:
    """Of sequences with fewer and with more queries than are kept; none of padding."""
    lengths, contexts, rows, last = (1, 7, 3, 1), (9, 7, 40, 0), (2, 0, 3, -1), 4
    g = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 7, DIM, generator=g).to(device(), dtype)[:, 1:]
    places = [torch.tensor(n, dtype=torch.int32, device=device()) for n in (contexts, rows)]
    starts = torch.tensor([0, *lengths], device=device()).cumsum(0).int()
    rings = [torch.full((5, last, 6, DIM), 7.0, device=device()) for _ in range(2)]
    layout = StepLayout(
        *(starts[:4], places[0][:3], starts, starts.long(), lengths[:3], contexts[:3], BLOCK),
        state_rows=places[1][:3],
    )
    keep_queries(q[:-1], rings[0], layout, 0.3)
    rotary.keep_queries(q, rings[1], starts, *places, 0.3, max(lengths))
    assert torch.equal(*rings)
    assert (rings[0] == 7.0).all(3).all(2).sum(1).tolist() == [0, last, last - 1, last - 3, last]
