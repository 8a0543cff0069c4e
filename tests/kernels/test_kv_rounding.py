"""Keys and values in few bits: errors, and known pitfalls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels.kv_rounding import SCALES, round_vectors, unround_vectors

I8, FP8, I4 = torch.int8, torch.float8_e4m3fn, torch.uint8
name = "{0}".format
formats = pytest.mark.parametrize("dtype", SCALES, ids=name)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    return unround_vectors(*round_vectors(x, dtype))


@formats
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=name)
def test_shapes_and_types(dtype, given) -> None:
    numbers, scales = round_vectors(normal(5, 3, 32).to(given), dtype)
    assert numbers.dtype == dtype and scales.dtype == SCALES[dtype]
    assert numbers.shape == (5, 3, 16 if dtype == I4 else 32) and scales.shape == (5, 3)
    assert unround_vectors(numbers, scales).shape == (5, 3, 32)


def test_int8_is_off_by_half_a_step() -> None:
    x = normal(200, 64) * normal(200, 1, seed=1).exp()
    step = x.abs().amax(-1, keepdim=True) / 127
    # The scale is rounded to 8 bits, which may clamp the largest number.
    assert bool(((kept(x, I8) - x).abs() <= step * (0.5 + 127 * 2**-8)).all())
    assert bool(((kept(x, I8) - x).abs() <= step * 0.51).float().mean() > 0.98)


def test_fp8_is_off_by_a_sixteenth_of_a_number() -> None:
    x = normal(200, 64) * normal(200, 1, seed=1).exp()
    most = x.abs().amax(-1, keepdim=True)
    # Half of the last of 3 mantissa bits; below 2^-6 of 448, half a step of 2^-9.
    bound = (x.abs() / 16).maximum(most / 448 * 2**-10) * 1.01
    assert bool(((kept(x, FP8) - x).abs() <= bound).all())


@pytest.mark.parametrize("shift", [0.0, 1.0, 10.0, -10.0])
def test_int4_is_off_by_half_a_step_and_by_one_at_the_ends(shift: float) -> None:
    x = normal(200, 64) + shift
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = (high - low) / 15 * (1 + 2**-5)  # 5 bits of the scale are kept
    off = (kept(x, I4) - x).abs()
    assert bool((off <= step * 1.05).all())
    assert float((off <= step * 0.5).float().mean()) > 0.9


def test_each_vector_has_its_own_scale() -> None:
    """Rounding of a vector does not depend on the other vectors."""
    x = normal(7, 3, 32)
    for dtype in SCALES:
        numbers, scales = round_vectors(x, dtype)
        for i in range(7):
            alone = round_vectors(x[i : i + 1], dtype)
            assert torch.equal(alone[0].view(torch.uint8), numbers[i : i + 1].view(torch.uint8))
            assert torch.equal(alone[1], scales[i : i + 1])


def test_int8_does_not_wrap() -> None:
    """Pitfall: 128, or 0..255, cast to int8 becomes negative."""
    either = torch.linspace(-3, 3, 4096).view(-1, 1) * torch.linspace(1, 2, 16)
    for x in (either, either.abs()):
        assert bool((kept(x, I8) * x >= 0).all())
        assert int(round_vectors(x, I8)[0].min()) >= -127


def test_fp8_is_clamped_before_the_cast() -> None:
    """Pitfall: numbers above 448 become NaN or infinite in a plain cast, and a scale of 1 loses
    small ones."""
    x = normal(100, 32) * torch.logspace(-20, 20, 100)[:, None]
    found = kept(x, FP8)
    assert bool(found.isfinite().all())
    assert float(((found - x).norm(dim=-1) / x.norm(dim=-1)).max()) < 0.05


@formats
def test_equal_numbers_and_zeros(dtype) -> None:
    """Without a range to scale: max == min, and no division by zero."""
    x = torch.stack([torch.zeros(32), torch.full((32,), 2.5), torch.full((32,), -2.5)])
    found = kept(x, dtype)
    assert not found[0].any() and bool(found.isfinite().all())
    torch.testing.assert_close(found, x, rtol=0.04, atol=0)


@formats
def test_an_outlier_only_affects_its_vector(dtype) -> None:
    x = normal(3, 32)
    x[1, 5] = 1e30
    found, clean = kept(x, dtype), kept(normal(3, 32), dtype)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert bool(found.isfinite().all()) and float(found[1, 5]) == pytest.approx(1e30, rel=0.04)


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_so(dtype, bad: float) -> None:
    x = normal(3, 32)
    x[1, 5] = bad
    found = kept(x, dtype)
    assert not bool(found[1].isfinite().any()) and bool(found[[0, 2]].isfinite().all())


@formats
def test_the_ends_of_the_range(dtype) -> None:
    tiny, half = torch.full((32,), 1e-38), torch.full((16,), 3e38)
    large = torch.cat([half, -half])
    assert not kept(tiny[None], dtype).any()
    torch.testing.assert_close(kept(large[None], dtype)[0], large, rtol=0.07, atol=0)


def test_zero_stays_zero_in_four_bits() -> None:
    x = normal(50, 32) + 1
    x[:, 3] = 0
    assert not kept(x, I4)[:, 3].any()


def test_two_numbers_to_a_byte() -> None:
    """The first in the low bits."""
    x = torch.arange(16.0)[None]
    numbers, words = round_vectors(x, I4)
    assert numbers.tolist() == [[i | (i + 1) << 4 for i in range(0, 16, 2)]]
    assert words.tolist() == [0x7F00]  # 2^0, zero point 0
    assert torch.equal(kept(x - 4, I4), x - 4)
    assert round_vectors(x - 4, I4)[1].tolist() == [0x7F04]
