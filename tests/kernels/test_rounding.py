"""Rounding to few bits: bounds of the error, and pitfalls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels import rounding
from kvik.kernels.rounding import round_int4, round_int8, round_mxfp4, round_tokens
from kvik.kernels.weights import E2M1, Weight


def normal(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def nibbles(weight: Weight) -> Tensor:
    """Return the codes, [outputs, inputs]."""
    return torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(1)


def kept(scales: Tensor) -> Tensor:
    """Round to eleven binary digits, half to even."""
    digits, exponent = torch.frexp(scales.double())
    return torch.ldexp((digits * 2**11).round() / 2**11, exponent).float()


def int4_error(weight: Weight, values: Tensor) -> Tensor:
    """Return the error in steps, [outputs, inputs]."""
    steps = weight.scales.repeat_interleave(weight.kind.group, dim=1)
    return (weight.dequantized() - values.float()).abs() / steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_off_by_half_a_step(dtype: torch.dtype) -> None:
    values = normal(33, 70).to(dtype)
    weight = round_int8(values, quantize_activations=True)
    assert weight.values.dtype == torch.int8 and weight.scales.dtype == torch.float32
    assert weight.kind.activations == "token"
    assert torch.equal(weight.scales, values.float().abs().amax(1) / 127)
    error = (weight.dequantized() - values.float()).abs() / weight.scales[:, None]
    assert 0.4 < float(error.max()) <= 0.5 + 1e-4
    assert weight.values.abs().amax(1).tolist() == [127] * 33


@pytest.mark.parametrize("size", [2.0**-60, 2.0**-20, 1.0, 2.0**60])
def test_scales_keep_their_digits_at_every_magnitude(size: float) -> None:
    values = normal(8, 64)
    small, large = (round_int4(v, 32) for v in (values, values * size))
    assert torch.equal(large.scales, small.scales * size)
    assert torch.equal(large.values, small.values)


@pytest.mark.parametrize("group", [32, 64])
def test_int4_values_are_rounded_by_the_stored_scale(group: int) -> None:
    """By the unrounded scale, some values would get a worse step."""
    values = normal(512, 128)
    values[1, 40] = 1e3  # affects its own group alone
    weight = round_int4(values, group)
    shape = 512, 128 // group, group
    grouped, zeros = values.view(shape), weight.zeros[:, :, None]
    best = (grouped / weight.scales[:, :, None]).round()
    assert torch.equal(nibbles(weight).view(shape).float(), (best + zeros).clamp(0, 15))
    assert torch.equal(weight.scales, weight.scales.half().float())
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    torch.testing.assert_close(weight.scales, kept(scales), rtol=1e-6, atol=0)
    assert torch.equal(zeros[:, :, 0].float(), (-low / weight.scales).round().clamp(0, 15))
    assert not torch.equal((grouped / scales[:, :, None]).round(), best)


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.9), (-0.9, -0.3), (-0.1, 0.9), (0.0, 1.0)])
def test_zero_stays_zero_in_every_range(low: float, high: float) -> None:
    values = torch.linspace(low, high, 32).repeat(2, 1)
    values[0, 5] = 0.0
    weight = round_int4(values, 32)
    assert weight.dequantized()[0, 5] == 0.0
    spread = torch.tensor([[max(high, 0) - min(low, 0)]] * 2)  # zero is in every range
    torch.testing.assert_close(weight.scales, spread / 15, rtol=2**-11, atol=0)
    assert float(int4_error(weight, values).max()) <= 0.5 + 15 / 2048


def test_zeros_are_rounded_exactly() -> None:
    values = torch.zeros(2, 32)
    values[1] = 1.0
    assert torch.equal(round_int8(values, quantize_activations=False).dequantized(), values)
    weight = round_int4(values, 32)
    assert weight.scales[0].item() == 1.0
    torch.testing.assert_close(weight.dequantized(), values, rtol=2**-8, atol=0)
    assert torch.equal(round_tokens(values), values)


def test_steps_too_small_for_a_float() -> None:
    """An inexact scale must not exceed the range, where int8 wraps around."""
    values = torch.full((1, 32), 2e-43)
    values[0, ::2] *= -1
    weight = round_int8(values, quantize_activations=False)
    assert weight.values.abs().max() == 127
    assert torch.equal(weight.values.sign().float(), values.sign())
    # With eleven digits, the smallest step is larger: 2 ** -136.
    assert not round_int4(values, 32).dequantized().any()
    larger = round_int4(values * 2**12, 32)
    assert torch.equal(larger.dequantized().sign(), values.sign())


def test_the_largest_floats() -> None:
    most = torch.finfo(torch.float32).max
    values = torch.tensor([[most, -most, 0.0, 1.0] * 8])
    for weight in (
        round_int8(values, quantize_activations=False),
        round_int4(values, 32),
    ):
        assert weight.scales.isfinite().all()
        assert weight.rows(slice(0, 1)).dequantized()[0, 2] == 0.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    values = normal(3, 64)
    values[2, 63] = bad
    for run in (
        lambda: round_int8(values, quantize_activations=True),
        lambda: round_int4(values, 32),
        lambda: round_mxfp4(values),
    ):
        with pytest.raises(ValueError, match="NaN or infinity"):
            run()


def test_rounding_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(11, 64)
    int8, int4 = round_int8(values, True), round_int4(values, 32)
    monkeypatch.setattr(rounding, "PIECE", 3 * 64)
    again8, again4 = round_int8(values, True), round_int4(values, 32)
    assert torch.equal(int8.values, again8.values) and torch.equal(int8.scales, again8.scales)
    assert torch.equal(int4.values, again4.values) and torch.equal(int4.scales, again4.scales)
    assert torch.equal(int4.zeros, again4.zeros)


@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**60])
def test_mxfp4_is_the_nearest_number_by_the_scale_of_the_largest(size: float) -> None:
    values = normal(9, 96) * size
    weight = round_mxfp4(values)
    grouped = values.view(9, 3, 32).double()
    power = 2.0 ** (grouped.abs().amax(-1, keepdim=True).log2().floor() - 2)
    assert torch.equal(2.0 ** (weight.scales.double() - 127), power[:, :, 0])
    numbers = torch.tensor(E2M1, dtype=torch.float64)
    nearest = numbers[((grouped / power)[..., None] - numbers).abs().argmin(-1)]
    assert torch.equal(weight.dequantized(), (nearest * power).float().view(9, 96))


def test_mxfp4_rounds_half_to_the_even_code_and_cuts_at_six() -> None:
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.99])
    kept = torch.tensor([0.0, 1, 1, 2, 2, 4, 4, 6])
    values = torch.cat((halves, -halves, halves * 0, kept))[None]
    expected = torch.cat((kept, -kept, kept * 0, kept))[None]
    assert torch.equal(round_mxfp4(values).dequantized(), expected)


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-127, torch.finfo(torch.float32).max])
def test_mxfp4_of_the_smallest_and_the_largest_floats(largest: float) -> None:
    values = torch.zeros(2, 64)
    values[1, 40], values[1, 41] = largest, -largest
    weight = round_mxfp4(values)
    assert int(weight.scales.max()) <= 252
    # 6 times 2^125 is the largest, half of 2^-127 the smallest.
    assert weight.dequantized()[1, 40:42].tolist() == {
        0.0: [0, 0],
        2.0**-149: [0, 0],
        2.0**-127: [2.0**-127, -(2.0**-127)],
    }.get(largest, [6 * 2.0**125, -6 * 2.0**125])
    assert not weight.dequantized()[0].any()


def test_groups_of_tokens_are_rounded_separately() -> None:
    x = normal(3, 70)
    expected = [round_tokens(part) for part in x.split(32, dim=1)]
    assert torch.equal(round_tokens(x, 32), torch.cat(expected, 1))


def test_tokens_are_rounded_separately_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [254.0, 1.0, 3.0, -5.0], [1e-3, 0, 0, -1e-3]])
    expected = torch.tensor([[127.0, 0, 2, -2], [254.0, 0, 4, -4], [1e-3, 0, 0, -1e-3]])
    torch.testing.assert_close(round_tokens(x), expected)
    assert round_tokens(x.bfloat16()).dtype == torch.float32
    assert x[0, 1] == 0.5  # the argument is unchanged
