"""Weights for the engine equal the quantiser's results."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.calibrated import normal
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvik.kernels.fp8 import ROW as FP8_ROW
from kvik.kernels.fp8 import SQUARE, WHOLE, Block
from kvik.quantize.gptq import rtn
from kvik.quantize.quantised import (
    E4M3,
    E5M2,
    Grid,
    Quantised,
    Scales,
    dequantise,
    float8,
    quantise,
)
from kvik.quantize.recipe import ROW, TENSOR


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_by_order(symmetric: bool) -> None:
    found = rtn(normal(4, 64), Grid(4, 32, symmetric))
    order = torch.arange(64) // 32
    same = Quantised(found.q, found.scales, found.grid, order)
    assert torch.equal(same.dequantised(), found.dequantised())
    back = torch.arange(63, -1, -1)
    turned = Quantised(found.q[:, back], found.scales, found.grid, order[back])
    assert torch.equal(turned.dequantised()[:, back], found.dequantised())


# The quantiser of all methods: ranges, scales and zero points by group.

BITS = range(2, 9)
FP32: tuple[torch.dtype, ...] = ()


def small(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return normal(*shape, seed=seed) * scale


def steps_of(scales: Scales, width: int) -> Tensor:
    """Return the step of each weight, [outputs, inputs]."""
    return scales.scales.repeat_interleave(width, dim=1)


def naive(row: list[float], bits: int, symmetric: bool) -> tuple[list[int], float, int]:
    """Return codes, scale and zero point of one group, element by element."""
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = max(abs(w) for w in row) / most or 1.0
        zero = 2 ** (bits - 1)
        return [zero + max(-most, min(most, round(w / scale))) for w in row], scale, zero
    most = 2**bits - 1
    low, high = min(0.0, *row), max(0.0, *row)
    scale = (high - low) / most or 1.0
    zero = max(0, min(most, round(-low / scale)))
    return [max(0, min(most, round(w / scale) + zero)) for w in row], scale, zero


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [4, 12, ROW, TENSOR])
def test_against_a_double_loop(bits: int, symmetric: bool, group: int) -> None:
    w = small(5, 24, seed=bits)
    w[2], w[3] = -w[2].abs(), w[3].abs()  # ranges that must be extended to 0
    w[1, 7], w[3, 4] = -1.0, 0.9  # far from the others of their group
    found = rtn(w, Grid(bits, group, symmetric, FP32))
    columns = {ROW: 24, TENSOR: 24}.get(group, group)
    rows = 5 if group == TENSOR else 1
    assert found.scales.scales.shape == (5 // rows, 24 // columns)
    assert (found.scales.zeros is None) == symmetric
    for o, g in itertools.product(range(5 // rows), range(24 // columns)):
        own = slice(o * rows, (o + 1) * rows), slice(g * columns, (g + 1) * columns)
        codes, scale, zero = naive(w[own].flatten().tolist(), bits, symmetric)
        assert found.q[own].flatten().tolist() == codes
        assert found.scales.scales[o, g].item() == pytest.approx(scale, rel=1e-6)
        if found.scales.zeros is not None:
            assert found.scales.zeros.dtype == torch.uint8
            assert found.scales.zeros[o, g].item() == zero
        expected = [(q - zero) * scale for q in codes]
        assert found.dequantised()[own].flatten().tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "dtypes", [(torch.float16,), (torch.bfloat16,), (torch.bfloat16, torch.float16)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_are_rounded_by_the_scale_that_is_stored(
    dtypes: tuple[torch.dtype, ...], symmetric: bool
) -> None:
    w = small(256, 128)
    found = rtn(w, Grid(4, 32, symmetric, dtypes))
    for dtype in dtypes:
        assert torch.equal(found.scales.scales, found.scales.scales.to(dtype).float())
    steps = steps_of(found.scales, 32)
    zeros = 8 if found.scales.zeros is None else found.scales.zeros.repeat_interleave(32, dim=1)
    best = ((w / steps).round() + zeros).clamp(1 if symmetric else 0, 15)
    assert torch.equal(found.q.float(), best)
    finer = rtn(w, Grid(4, 32, symmetric, FP32))
    assert not torch.equal(finer.scales.scales, found.scales.scales)
    assert not torch.equal(finer.q, found.q)  # the unrounded scale would give other codes


def test_scales_that_two_formats_hold_even_when_tiny() -> None:
    """fp16 has few digits there, and bfloat16 has few everywhere."""
    w = small(512, 32) * torch.logspace(-7, 3, 512)[:, None]
    scales = Grid(4, 32, True, (torch.bfloat16, torch.float16)).fit(w).scales
    assert torch.equal(scales, scales.half().float())
    assert torch.equal(scales, scales.bfloat16().float())


@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_to_scale(symmetric: bool) -> None:
    w = torch.zeros(3, 32)
    w[1] = 1e-12  # a scale too small for fp16
    w[2] = 1.0
    found = rtn(w, Grid(4, 16, symmetric))
    assert torch.equal(found.scales.scales[:2], torch.ones(2, 2))
    assert not found.dequantised()[:2].any()
    torch.testing.assert_close(found.dequantised()[2], w[2], rtol=2**-10, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_steps_too_small_for_their_digits_stay_in_range(symmetric: bool) -> None:
    w = torch.full((1, 32), 7e-7)
    w[0, ::2] *= -1
    grid = Grid(4, 32, symmetric)
    found = rtn(w, grid)
    assert grid.lowest <= int(found.q.min()) and int(found.q.max()) <= grid.highest
    assert torch.equal(found.dequantised().sign(), w.sign())


@pytest.mark.parametrize("sign", [1, -1])
def test_zero_points_stay_in_range_when_their_scale_lost_its_digits(sign: int) -> None:
    """A scale of 1.4 of the smallest fp16 steps becomes one step: 0 would have code 21."""
    w = torch.full((1, 8), sign * 15 * 1.4 * 2.0**-24)
    found = rtn(w, Grid(4, ROW, False))
    assert found.scales.zeros.item() == (0 if sign > 0 else 15)
    assert found.dequantised()[0, 0] == sign * 15 * 2.0**-24


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_beyond_the_grid_get_its_last_codes(symmetric: bool) -> None:
    """As in GPTQ, which moves weights after their scales are fixed."""
    w, grid = small(4, 32), Grid(4, ROW, symmetric)
    q = quantise(w * 100, grid.fit(w), grid)
    assert q.unique()[[0, -1]].tolist() == [1 if symmetric else 0, 15]


@pytest.mark.parametrize("group", [16, ROW, TENSOR])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite(bad: float, symmetric: bool, group: int) -> None:
    w = small(3, 32)
    w[2, 31] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        rtn(w, Grid(4, group, symmetric))


def test_a_weight_too_large_for_its_scale() -> None:
    w = torch.full((1, 4), 1e7)
    with pytest.raises(ValueError, match="too large for scales"):
        rtn(w, Grid(4, ROW, True))
    assert rtn(w, Grid(4, ROW, True, FP32)).dequantised().isfinite().all()
    most = torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]])
    for symmetric in (True, False):
        assert rtn(most, Grid(4, ROW, symmetric, FP32)).scales.scales.isfinite().all()


@pytest.mark.parametrize("bits", [0, 1, 9, -4])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ValueError, match="2 to 8 bits"):
        Grid(bits, 32, True)


def test_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not divide 48"):
        rtn(small(2, 48), Grid(4, 32, True))
    with pytest.raises(ValueError, match="a group is"):
        Grid(4, -2, True)


@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    group=st.sampled_from([1, 2, 8, ROW, TENSOR]),
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-6, 4),
)
@settings(max_examples=examples(60))
def test_codes_stay_in_range_and_values_are_their_own_nearest(
    bits: int, symmetric: bool, group: int, seed: int, power: int
) -> None:
    w = small(4, 16, seed=seed, scale=10.0**power)
    grid = Grid(bits, group, symmetric, FP32)
    scales = grid.fit(w)
    q = quantise(w, scales, grid)
    assert grid.lowest <= int(q.min()) and int(q.max()) <= grid.highest
    assert torch.equal(quantise(dequantise(q, scales, grid), scales, grid), q)


def test_the_argument_is_not_changed() -> None:
    w = small(4, 32).bfloat16()
    before = w.clone()
    assert rtn(w, Grid(4, 16, False)).dequantised().dtype == torch.float32
    assert torch.equal(w, before)


# Layers in eight-bit floats, with scales that fit a checkpoint.


@pytest.mark.parametrize("block", [FP8_ROW, WHOLE, SQUARE, (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("number", "digits"), [(E4M3, 3), (E5M2, 2)])
def test_digits(block: Block, dtype: torch.dtype, number: torch.dtype, digits: int) -> None:
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    found = float8(w, block, dtype, dtype=number)
    assert found.values.dtype == number and found.input_scale is None
    assert torch.equal(found.scales, found.scales.to(dtype).float())
    # Digits after the first, except for the smallest numbers.
    off = (found.dequantised() - w).abs()
    assert bool((off <= w.abs() * 2.0 ** -(digits + 1) + found.scales.max() * 2**-10 + 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_static_scale_reaches_the_largest_input(dtype: torch.dtype) -> None:
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    found = float8(torch.ones(8, 24), FP8_ROW, dtype, input_absmax=x.abs().amax(0))
    assert found.input_scale.shape == (1,)
    expected = (x.abs().max() / 448).to(dtype)
    assert float(found.input_scale) == float(expected)
    met = found.kernel_inputs(3 * x)  # three times the largest seen: clamped
    assert float(met.abs().max()) == pytest.approx(448 * float(expected), rel=1e-6)
    assert float((found.kernel_inputs(x) - x).norm() / x.norm()) < 0.04


def test_inputs_of_e5m2_weights_are_not_rounded() -> None:
    x = torch.randn(5, 24)
    assert torch.equal(float8(torch.ones(8, 24), WHOLE, dtype=E5M2).kernel_inputs(x), x)


def test_float8_weights_that_are_not_finite() -> None:
    w = torch.ones(4, 8)
    w[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        float8(w, FP8_ROW)
