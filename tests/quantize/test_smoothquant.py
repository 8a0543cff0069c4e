"""SmoothQuant: the same outputs before rounding, smaller errors after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels.rounding import round_tokens
from kvik.quantize.factors import scale_inputs, smoothing_scales
from kvik.quantize.gptq import rtn
from kvik.quantize.quantised import ROW, Grid


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outliers(tokens: int, inputs: int, seed: int) -> Tensor:
    """[tokens, inputs], two inputs a hundred times as large: what SmoothQuant is for."""
    x = normal(tokens, inputs, seed=seed)
    x[:, [3, 40]] *= 100
    return x


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_formula(alpha: float) -> None:
    x, weights = outliers(50, 64, seed=0), [normal(8, 64, seed=1), normal(4, 64, seed=2) * 3]
    absmax = x.abs().amax(0)
    found = smoothing_scales(absmax, weights, alpha)
    for j in range(64):
        largest = max(float(w[:, j].abs().max()) for w in weights)
        expected = float(absmax[j]) ** alpha / largest ** (1 - alpha)
        assert found[j].item() == pytest.approx(expected, rel=1e-5)
    # at one half the inputs become as hard as the weights
    if alpha == 0.5:
        scaled = torch.cat([scale_inputs(w, found) for w in weights])
        torch.testing.assert_close(absmax / found, scaled.abs().amax(0))


def test_nothing_changes_in_exact_arithmetic() -> None:
    x, w = outliers(50, 64, seed=3).double(), normal(8, 64, seed=4).double()
    scales = smoothing_scales(x.abs().amax(0), [w]).double()
    assert float(scales.max() / scales.min()) > 10
    torch.testing.assert_close((x / scales) @ (w * scales).t(), x @ w.t(), rtol=1e-12, atol=1e-12)


def test_dead_inputs_keep_the_factor_one() -> None:
    x, w = normal(20, 8, seed=5), normal(4, 8, seed=6)
    x[:, 2], w[:, 5] = 0.0, 0.0
    scales = smoothing_scales(x.abs().amax(0), [w])
    assert scales[2] == 1.0 and scales[5] == 1.0
    assert scales.isfinite().all() and (scales > 0).all()


def test_eight_bits_by_eight_bits_with_outliers() -> None:
    x, w = outliers(200, 64, seed=7), normal(32, 64, seed=8)
    exact = x @ w.t()

    def off(smoothing: Tensor) -> float:
        weight = rtn(scale_inputs(w, smoothing), Grid(8, ROW, True)).dequantised()
        return float((round_tokens(x / smoothing) @ weight.t() - exact).norm() / exact.norm())

    assert off(smoothing_scales(x.abs().amax(0), [w])) < 0.5 * off(torch.ones(64))
