"""GPTQ compared with its definition in float64, and with rounding to nearest."""

from __future__ import annotations

import pytest
import torch
from helpers.calibrated import normal, relative_error
from torch import Tensor

from kvik.quantize import gptq as module
from kvik.quantize.gptq import gptq, rtn
from kvik.quantize.quantised import Grid, Quantised
from kvik.quantize.recipe import ROW, TENSOR

DAMPING = 0.01


def correlated(tokens: int, inputs: int, seed: int) -> Tensor:
    """Return [tokens, inputs], each input a mixture of as many sources."""
    return normal(tokens, inputs, seed=seed) @ normal(inputs, inputs, seed=seed + 1) / inputs**0.5


def second_moment(x: Tensor) -> Tensor:
    return 2 * x.t() @ x


def definition(
    w: Tensor, hessian: Tensor, grid: Grid, order: list[int], fixed: bool
) -> tuple[Tensor, Tensor]:
    """Run optimal brain surgery column by column in float64: the best change of the remaining
    columns F, by the inverse of H over F, computed anew each time.

    Returns:
        Dequantised weights and scales, both in the order of the layer.
    """
    rest, h = w.double().clone(), hessian.double().clone()
    live = h.diagonal() != 0
    extra = DAMPING * h.diagonal()[live].mean()
    h.diagonal().add_(extra)
    h.diagonal()[~live] = 1.0
    width = grid.width(w.shape[1])
    first_fit = grid.fit(w)
    out, used = torch.empty_like(rest), torch.empty_like(rest)
    for place, i in enumerate(order):
        if fixed:
            group = i // width if grid.group != TENSOR else 0
            scale = first_fit.scales[:, group]
            zero = None if first_fit.zeros is None else first_fit.zeros[:, group]
        elif place % width == 0:
            fit = grid.fit(rest[:, order[place : place + width]])
            scale = fit.scales[:, 0]
            zero = None if fit.zeros is None else fit.zeros[:, 0]
        middle = zero.double() if zero is not None else float(2 ** (grid.bits - 1))
        low = 1 if grid.symmetric else 0
        q = ((rest[:, i] / scale.double()).round() + middle).clamp(low, 2**grid.bits - 1)
        out[:, i] = (q - middle) * scale
        used[:, i] = scale
        left = order[place:]
        inverse = torch.linalg.inv(h[left][:, left])
        change = (rest[:, i] - out[:, i]) / inverse[0, 0]
        rest[:, left] -= change[:, None] * inverse[0]
    return out.float(), used.float()


def scale_of_input(found: Quantised) -> Tensor:
    """Return the scale of each weight, [outputs, inputs]."""
    inputs = found.q.shape[1]
    order = found.order
    if order is None:
        order = torch.arange(inputs) // found.grid.width(inputs)
    return found.scales.scales.expand(len(found.q), -1)[:, order]


@pytest.mark.parametrize(("block", "bits"), [(1, 3), (5, 2), (8, 4), (128, 3), (128, 8)])
@pytest.mark.parametrize("group", [4, 12, ROW, TENSOR])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_definition(group: int, symmetric: bool, block: int, bits: int) -> None:
    w, hessian = normal(6, 24, seed=0), second_moment(correlated(64, 24, seed=1))
    grid = Grid(bits, group, symmetric)
    expected, scales = definition(w, hessian, grid, list(range(24)), fixed=group == TENSOR)
    found = gptq(w, hessian, grid, damping=DAMPING, block=block)
    torch.testing.assert_close(found.dequantised(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale_of_input(found), scales, rtol=1e-6, atol=0)
    assert found.order is None


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("group", [6, ROW])
@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_ordered_by_inputs_are_restored(group: int, symmetric: bool, static: bool) -> None:
    mixed = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    x = correlated(64, 24, seed=3) * torch.linspace(0.2, 3, 24)[mixed]
    w, hessian = normal(6, 24, seed=4), second_moment(x)
    order = hessian.diagonal().argsort(descending=True).tolist()
    assert order != sorted(order)
    grid = Grid(3, group, symmetric)
    expected, scales = definition(w, hessian, grid, order, fixed=static)
    found = gptq(w, hessian, grid, damping=DAMPING, act_order=True, static_groups=static)
    torch.testing.assert_close(found.dequantised(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale_of_input(found), scales, rtol=1e-6, atol=0)
    if static or group == ROW:
        assert found.order is None  # adjacent inputs share a scale, as in any checkpoint
    else:
        assert torch.equal(found.order[order], torch.arange(24) // group)


def full_inverse(hessian: Tensor, order: Tensor, damping: float) -> Tensor:
    """The common mistake: rows of the whole inverse, which still contain the finished columns."""
    damped = hessian.double() + damping * hessian.diagonal().mean() * torch.eye(len(order))
    return torch.linalg.inv(damped).float()


@pytest.mark.parametrize("symmetric", [True, False])
def test_three_bits_on_correlated_inputs(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = normal(128, 256, seed=0), correlated(2048, 256, seed=1)
    hessian, grid = second_moment(x), Grid(3, 128, symmetric)

    def off(found: Quantised) -> float:
        error = relative_error(w, found.dequantised(), hessian)
        direct = ((w - found.dequantised()) @ x.t()).norm() / (w @ x.t()).norm()
        assert error == pytest.approx(float(direct), rel=1e-3)
        return error

    nearest, good = off(rtn(w, grid)), off(gptq(w, hessian, grid))
    bound = 0.78 * nearest
    assert good < bound
    if symmetric:
        assert 0.26 < nearest < 0.30 and 0.18 < good < 0.22
    assert off(gptq(w, hessian, grid, act_order=True)) < good
    assert off(gptq(w, hessian, grid, act_order=True, static_groups=True)) < good
    assert off(gptq(w, hessian, grid, static_groups=True)) < bound
    monkeypatch.setattr(module, "inverse_factor", full_inverse)
    assert off(gptq(w, hessian, grid)) > bound


@pytest.mark.parametrize("act_order", [True, False])
def test_dead_columns_are_rounded_to_nearest_and_affect_no_other(act_order: bool) -> None:
    x = correlated(64, 24, seed=10)
    x[:, [3, 17]] = 0.0
    w, hessian, grid = normal(6, 24, seed=11), second_moment(x), Grid(4, ROW, True)
    w[:, [3, 17]] /= 4  # their weights do not determine the scales
    found = gptq(w, hessian, grid, damping=DAMPING, act_order=act_order)
    assert torch.equal(found.q[:, [3, 17]], rtn(w, grid).q[:, [3, 17]])
    alive = [i for i in range(24) if i not in (3, 17)]
    without = gptq(w[:, alive], hessian[alive][:, alive], grid, act_order=act_order)
    assert torch.equal(found.q[:, alive], without.q)
    nothing = gptq(w, torch.zeros(24, 24), grid, act_order=act_order)
    assert torch.equal(nothing.q, rtn(w, grid).q)


def test_fewer_tokens_than_inputs() -> None:
    """H has no inverse without damping."""
    w, hessian = normal(16, 64, seed=12), second_moment(correlated(8, 64, seed=13))
    grid = Grid(4, 32, True)
    error = relative_error(w, gptq(w, hessian, grid).dequantised(), hessian)
    assert error < 0.5 * relative_error(w, rtn(w, grid).dequantised(), hessian)


def test_one_input_dominates_the_others() -> None:
    """Nearly singular even after damping: up to 1e7 between the energies of inputs."""
    x = correlated(256, 64, seed=14)
    x[:, 5] *= 3e3
    found = gptq(normal(16, 64, seed=15), second_moment(x), Grid(4, 32, True))
    assert found.dequantised().isfinite().all()


def test_invalid_second_moments_are_refused() -> None:
    w, grid = normal(4, 8, seed=17), Grid(4, ROW, True)
    with pytest.raises(ValueError, match="NaN or infinity"):
        gptq(w, torch.full((8, 8), torch.nan), grid)
    with pytest.raises(ValueError, match="not positive"):
        gptq(w, torch.ones(8, 8) - 2 * torch.eye(8), grid)
    w[2, 3] = torch.nan
    with pytest.raises(ValueError, match="weights hold NaN"):
        gptq(w, torch.eye(8), grid)


def test_the_arguments_are_not_changed() -> None:
    w, hessian = normal(4, 8, seed=18), second_moment(correlated(32, 8, seed=19))
    before = w.clone(), hessian.clone()
    gptq(w, hessian, Grid(4, 4, True))
    assert torch.equal(w, before[0]) and torch.equal(hessian, before[1])
