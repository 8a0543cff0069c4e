"""Layers in eight-bit floats, with the scales that a checkpoint can hold."""

from __future__ import annotations

import pytest
import torch

from kvik.kernels.fp8 import ROW, SQUARE, WHOLE, Block
from kvik.quantize.quantised import E4M3, E5M2, float8


@pytest.mark.parametrize("block", [ROW, WHOLE, SQUARE, (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("number", "digits"), [(E4M3, 3), (E5M2, 2)])
def test_digits(block: Block, dtype: torch.dtype, number: torch.dtype, digits: int) -> None:
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    found = float8(w, block, dtype, dtype=number)
    assert found.values.dtype == number and found.input_scale is None
    assert torch.equal(found.scales, found.scales.to(dtype).float())
    # digits behind the first, but for the smallest numbers
    off = (found.dequantised() - w).abs()
    assert bool((off <= w.abs() * 2.0 ** -(digits + 1) + found.scales.max() * 2**-10 + 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_static_scale_reaches_the_largest_input(dtype: torch.dtype) -> None:
    x = torch.randn(50, 24, generator=torch.Generator().manual_seed(1))
    found = float8(torch.ones(8, 24), ROW, dtype, input_absmax=x.abs().amax(0))
    assert found.input_scale is not None and found.input_scale.shape == (1,)
    expected = (x.abs().max() / 448).to(dtype)
    assert float(found.input_scale) == float(expected)
    met = found.given(3 * x)  # three times what was seen: cut
    assert float(met.abs().max()) == pytest.approx(448 * float(expected), rel=1e-6)
    assert float((found.given(x) - x).norm() / x.norm()) < 0.04


def test_e5m2_meets_inputs_as_they_are() -> None:
    x = torch.randn(5, 24)
    assert torch.equal(float8(torch.ones(8, 24), WHOLE, dtype=E5M2).given(x), x)


def test_weights_that_are_no_numbers() -> None:
    w = torch.ones(4, 8)
    w[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        float8(w, ROW)
