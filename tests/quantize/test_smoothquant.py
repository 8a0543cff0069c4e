"""SmoothQuant: the same outputs before rounding, smaller errors after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.kernels.rounding import round_tokens
from kvik.quantize.folding import scale_inputs
from kvik.quantize.grid import ROW, Grid
from kvik.quantize.rtn import rtn
from kvik.quantize.smoothquant import (
    round_activations,
    smoothing_scales,
    static_scale,
    token_scales,
)


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


@pytest.mark.parametrize("static", [True, False])
def test_eight_bits_by_eight_bits_with_outliers(static: bool) -> None:
    x, w = outliers(200, 64, seed=7), normal(32, 64, seed=8)
    absmax, exact = x.abs().amax(0), x @ w.t()

    def off(smoothing: Tensor) -> float:
        weight = rtn(scale_inputs(w, smoothing), Grid(8, ROW, True)).dequantised()
        smooth = x / smoothing
        scale = static_scale(absmax, smoothing) if static else token_scales(smooth)
        q = round_activations(smooth, scale)
        return float(((q * scale) @ weight.t() - exact).norm() / exact.norm())

    assert off(smoothing_scales(absmax, [w])) < 0.5 * off(torch.ones(64))


def test_a_static_scale_reaches_what_calibration_saw_and_cuts_the_rest() -> None:
    x = outliers(50, 64, seed=9)
    smoothing = smoothing_scales(x.abs().amax(0), [normal(8, 64, seed=10)])
    scale = static_scale(x.abs().amax(0), smoothing)
    assert scale.shape == ()
    assert scale.item() == pytest.approx(float((x / smoothing).abs().max()) / 127, rel=1e-6)
    q = round_activations(x / smoothing, scale)
    assert q.dtype == torch.int8 and int(q.abs().max()) == 127
    error = (q * scale - x / smoothing).abs()
    assert float(error.max()) <= float(scale) * 0.5001
    beyond = round_activations(torch.tensor([[300.0, -300.0]]), torch.tensor(1.0))
    assert beyond.tolist() == [[127, -127]]  # a cast alone would wrap


def test_scales_of_tokens_are_those_of_the_engine() -> None:
    x = torch.cat((outliers(20, 64, seed=11), torch.zeros(1, 64)))
    scales = token_scales(x)
    assert scales.shape == (21, 1) and scales[20] == 1.0
    assert torch.equal(round_activations(x, scales) * scales, round_tokens(x))
    assert token_scales(x.bfloat16()).dtype == torch.float32
    assert static_scale(torch.zeros(4), torch.ones(4)) == 1.0
