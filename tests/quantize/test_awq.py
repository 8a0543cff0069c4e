"""AWQ: the search minimises what it says, with the quantiser that is used in the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.quantize import factors as module
from kvik.quantize.factors import awq, clip, search_clip, search_scaling
from kvik.quantize.gptq import rtn
from kvik.quantize.quantised import ROW, TENSOR, Grid, dequantise, quantise

INT4 = Grid(4, 32, False)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def salient(tokens: int, inputs: int, seed: int) -> Tensor:
    """[tokens, inputs], one input in sixteen ten times as large."""
    sizes = torch.ones(inputs)
    sizes[::16] = 10.0
    return normal(tokens, inputs, seed=seed) * sizes


def output_error(w: Tensor, rounded: Tensor, x: Tensor) -> float:
    return float(((rounded - w).double() @ x.double().t()).square().sum())


def scaled_error(w: Tensor, scales: Tensor, x: Tensor, grid: Grid) -> float:
    return output_error(w, awq(w, scales, None, grid).dequantised() / scales, x)


@pytest.mark.parametrize("group", [32, ROW, TENSOR])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_losses_are_those_of_the_definition(symmetric: bool, group: int) -> None:
    """|| Q(W diag(s)) diag(s)^-1 X - W X ||^2 for s = mean |x|^alpha, in float64."""
    w, x, grid = normal(24, 64, seed=0), salient(200, 64, seed=1), Grid(3, group, symmetric)
    mean_abs = x.abs().mean(0)
    found = search_scaling([w], x, mean_abs, grid, steps=5)
    assert len(found.losses) == 6
    for step, loss in enumerate(found.losses):
        s = mean_abs ** (step / 5)
        s = s / (s.max() * s.min()).sqrt()
        fit = grid.fit(w * s)
        rounded = dequantise(quantise(w * s, fit, grid), fit, grid).double() / s.double()
        assert loss == pytest.approx(output_error(w, rounded, x), rel=1e-4)
    best = min(found.losses)
    assert found.losses[round(found.alpha * 5)] == best
    assert scaled_error(w, found.scales, x, grid) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("bits", [3, 4])
def test_much_better_than_nearest_where_few_inputs_matter(bits: int) -> None:
    w, x, grid = normal(64, 128, seed=2), salient(400, 128, seed=3), Grid(bits, 32, False)
    found = search_scaling([w], x, x.abs().mean(0), grid)
    assert 0 < found.alpha < 1
    nearest = output_error(w, rtn(w, grid).dequantised(), x)
    assert found.losses[0] == pytest.approx(nearest, rel=1e-4)  # alpha 0 is rounding to nearest
    assert min(found.losses) < 0.5 * nearest
    # larger weights for larger inputs, not the other way round
    assert found.scales[::16].min() > found.scales[1::16].max()
    assert scaled_error(w, 1 / found.scales, x, grid) > nearest


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_nearest(seed: int) -> None:
    w, x = normal(16, 64, seed=seed), normal(100, 64, seed=seed + 50)
    found = search_scaling([w], x, x.abs().mean(0), INT4, steps=4)
    nearest = output_error(w, rtn(w, INT4).dequantised(), x)
    assert scaled_error(w, found.scales, x, INT4) <= nearest * (1 + 1e-5)


def test_no_weight_stays_in_higher_precision() -> None:
    w, x = normal(16, 64, seed=4), salient(100, 64, seed=5)
    scales = search_scaling([w], x, x.abs().mean(0), INT4).scales
    found = awq(w, scales, None, INT4)
    assert found.q.shape == w.shape and int(found.q.max()) <= 15
    assert not bool((found.dequantised()[:, ::16] / scales[::16] == w[:, ::16]).any())


def test_layers_that_share_inputs_are_searched_together() -> None:
    """What is best for the two is not what is best for either alone."""
    x = salient(200, 64, seed=6)
    mean_abs = x.abs().mean(0)
    first, second = normal(8, 64, seed=7), normal(40, 64, seed=8)
    second[:, ::16] *= 8  # large where the inputs are: scaling costs the others
    alone = [search_scaling([w], x, mean_abs, INT4) for w in (first, second)]
    both = search_scaling([first, second], x, mean_abs, INT4)
    for step, loss in enumerate(both.losses):
        assert loss == pytest.approx(sum(a.losses[step] for a in alone), rel=1e-6)
    assert alone[0].alpha != alone[1].alpha


def test_scales_are_normalised_and_dead_inputs_harmless() -> None:
    w, x = normal(16, 64, seed=9), salient(100, 64, seed=10)
    x[:, 5] = 0.0
    mean_abs = x.abs().mean(0)
    found = search_scaling([w], x, mean_abs, INT4)
    assert found.alpha > 0
    assert found.scales.isfinite().all() and (found.scales > 0).all()
    assert float(found.scales.max() * found.scales.min()) == pytest.approx(1.0, rel=1e-5)
    assert found.scales[5] == found.scales.min()
    nothing = search_scaling([w], torch.zeros(3, 64), torch.zeros(64), INT4)
    assert nothing.alpha == 0 and torch.equal(nothing.scales, torch.ones(64))
    tied = search_scaling([w], torch.zeros(3, 64), mean_abs, INT4)
    assert tied.alpha == 0 and torch.equal(tied.scales, torch.ones(64))


def test_inputs_that_are_nearly_dead() -> None:
    """Factors stay small enough for what they are folded into."""
    w, x = normal(16, 64, seed=9), salient(100, 64, seed=10)
    x[:, 5] *= 1e-18
    found = search_scaling([w], x, x.abs().mean(0), INT4)
    assert found.alpha > 0 and float(found.scales.max() / found.scales.min()) <= 1.001e6


def test_the_second_moments_root_stands_for_all_tokens() -> None:
    w, x = normal(16, 64, seed=11), salient(500, 64, seed=12)
    mean_abs = x.abs().mean(0)
    root = torch.linalg.cholesky(x.t() @ x).t()
    whole = search_scaling([w], x, mean_abs, INT4, steps=4)
    again = search_scaling([w], root, mean_abs, INT4, steps=4)
    assert again.losses == pytest.approx(whole.losses, rel=1e-4)
    torch.testing.assert_close(
        search_clip(w, root, INT4), search_clip(w, x, INT4), rtol=1e-6, atol=0
    )


def test_rows_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w, x = normal(17, 64, seed=13), normal(100, 64, seed=14)
    whole = search_scaling([w], x, x.abs().mean(0), INT4, steps=2)
    monkeypatch.setattr(module, "PIECE", 300)
    again = search_scaling([w], x, x.abs().mean(0), INT4, steps=2)
    assert again.losses == pytest.approx(whole.losses, rel=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, ROW, TENSOR])
def test_the_clip_is_the_best_of_those_tried(group: int, symmetric: bool) -> None:
    """Group by group, each with the inputs that are its own."""
    w, x, grid = normal(6, 64, seed=15), salient(80, 64, seed=16), Grid(3, group, symmetric)
    limits = search_clip(w, x, grid, steps=5, smallest=0.5)
    width = grid.width(64)
    assert limits.shape == ((1, 1) if group == TENSOR else (6, 64 // width))
    rows = [slice(0, 6)] if group == TENSOR else [slice(o, o + 1) for o in range(6)]
    shares = [1 - 0.1 * step for step in range(6)]
    chosen = set()
    for r, row in enumerate(rows):
        for g in range(64 // width):
            columns = slice(g * width, (g + 1) * width)
            part, own = w[row, columns], x[:, columns]
            most = float(part.abs().max())
            losses = []
            for share in shares:
                cut = part.clamp(-share * most, share * most)
                rounded = rtn(cut, Grid(3, group, symmetric)).dequantised()
                losses.append(output_error(part, rounded, own))
            best = shares[losses.index(min(losses))]
            assert limits[r, g].item() == pytest.approx(best * most, rel=1e-5)
            chosen.add(best)
    assert len(chosen) > 1 or group == TENSOR


def test_clipping_helps_and_never_hurts_its_group() -> None:
    w, x = normal(32, 128, seed=17), normal(300, 128, seed=18)
    w[:, 7] *= 4
    for grid in (Grid(3, 32, True), Grid(3, 32, False)):
        limits = search_clip(w, x, grid)
        whole, cut = (awq(w, torch.ones(128), limit, grid) for limit in (None, limits))
        errors = [output_error(w, found.dequantised(), x) for found in (whole, cut)]
        assert errors[1] < 0.9 * errors[0]


def test_clip() -> None:
    w = torch.tensor([[1.0, -2.0, 3.0, -4.0], [0.1, 0.2, 0.3, 0.4]]).bfloat16()
    limits = torch.tensor([[1.5, 3.5], [9.0, 0.35]])
    expected = torch.tensor([[1.0, -1.5, 3.0, -3.5], [0.1, 0.2, 0.3, 0.35]])
    torch.testing.assert_close(clip(w, limits), expected, rtol=3e-3, atol=0)
    assert clip(w, torch.tensor([[2.5]])).tolist()[0] == [1.0, -2.0, 2.5, -2.5]
