"""Calibration statistics are the same for any batches."""

from __future__ import annotations

import pytest
import torch
from helpers.calibrated import normal, relative_error
from torch import Tensor

from kvik.quantize import factors as module
from kvik.quantize.factors import InputStatistics


def gathered(*batches: Tensor, sample_size: int = 16) -> InputStatistics:
    statistics = InputStatistics(batches[0].shape[1], sample_size=sample_size)
    for batch in batches:
        statistics.add(batch)
    return statistics


def assert_same(a: InputStatistics, b: InputStatistics) -> None:
    assert (a.tokens, a.inputs) == (b.tokens, b.inputs)
    assert torch.equal(a.absmax, b.absmax)
    assert torch.equal(a.sample, b.sample)
    torch.testing.assert_close(a.mean_abs(), b.mean_abs(), rtol=1e-6, atol=0)
    torch.testing.assert_close(a.hessian(), b.hessian(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [7, 1024])
def test_against_float64(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    x = (normal(300, 40) * torch.linspace(0.01, 30, 40)).to(dtype)
    statistics = gathered(x[:100], x[100:101], x[101:101], x[101:])
    exact = x.double()
    assert statistics.tokens == 300
    expected = 2 * exact.t() @ exact
    scale = expected.diagonal().outer(expected.diagonal()).sqrt()
    assert float(((statistics.hessian() - expected).abs() / scale).max()) < 1e-6
    assert torch.equal(statistics.hessian(), statistics.hessian().t())
    torch.testing.assert_close(
        statistics.mean_abs().double(), exact.abs().mean(0), rtol=1e-6, atol=0
    )
    assert torch.equal(statistics.absmax.double(), exact.abs().amax(0))


def test_many_batches_lose_nothing() -> None:
    """In fp32, a sum of very many small terms would stop growing."""
    x = normal(64, 8).abs() + 1
    statistics = InputStatistics(8)
    for _ in range(500):
        statistics.add(x)
    expected = 500 * 2 * x.double().t() @ x.double()
    torch.testing.assert_close(statistics.hessian().double(), expected, rtol=3e-6, atol=0)
    torch.testing.assert_close(statistics.mean_abs(), x.abs().mean(0), rtol=1e-6, atol=0)


def test_statistics_do_not_depend_on_parts_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(200, 12)
    whole = gathered(x)
    assert_same(whole, gathered(*x.split(7)))
    monkeypatch.setattr(module, "INPUTS_AT_ONCE", 12 * 30)
    assert_same(whole, gathered(x))


def test_the_memory_of_statistics_does_not_grow_with_tokens() -> None:
    def size(statistics: InputStatistics) -> int:
        kept = (getattr(statistics, name) for name in vars(statistics))
        return sum(value.numel() for value in kept if isinstance(value, Tensor))

    one = gathered(normal(16, 12))
    assert size(one) == size(gathered(*normal(3000, 12).split(100)))
    assert size(one) == 12 * 12 + (16 + 2) * 12 + 16


def test_every_token_has_the_same_chance() -> None:
    """Tokens are numbered; 2000 of 80,000 are spread over the stream."""
    numbers = torch.arange(80_000.0)[:, None]
    sample = gathered(*numbers.split(300), sample_size=2000).sample[:, 0]
    assert len(sample.unique()) == 2000  # no token twice
    counts = sample.histc(bins=10, min=0, max=80_000)
    assert float(((counts - 200) ** 2 / 200).sum()) < 27.9  # chi-square with 9 degrees of freedom


def test_few_tokens_are_all_in_the_sample() -> None:
    x = normal(5, 4)
    sample = gathered(x).sample
    assert sample.shape == (5, 4)
    assert torch.equal(sample.sort(0).values, x.sort(0).values)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_not_finite_leave_no_trace(bad: float) -> None:
    x = normal(20, 4)
    statistics = gathered(x)
    broken = x.clone()
    broken[19, 2] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        statistics.add(broken)
    assert_same(statistics, gathered(x))


def test_without_inputs() -> None:
    statistics = InputStatistics(4)
    assert not statistics.mean_abs().any() and not statistics.hessian().any()
    assert statistics.sample.shape == (0, 4)


def test_relative_error() -> None:
    w, x = normal(6, 8, seed=1), normal(100, 8, seed=2)
    rounded = w + 0.1 * normal(6, 8, seed=3)
    expected = ((w - rounded) @ x.t()).norm() / (w @ x.t()).norm()
    hessian = gathered(x).hessian()
    assert relative_error(w, rounded, hessian) == pytest.approx(float(expected), rel=1e-4)
    assert relative_error(w, w, hessian) == 0.0
    assert relative_error(w, rounded, torch.zeros(8, 8)) == 0.0


def test_without_the_second_moment() -> None:
    x = normal(50, 6)
    statistics, whole = InputStatistics(6, moment=False, sample_size=16), gathered(x)
    statistics.add(x)
    assert torch.equal(statistics.sample, whole.sample)
    assert torch.equal(statistics.absmax, whole.absmax)
    with pytest.raises(ValueError, match="no second moment"):
        statistics.hessian()


def test_the_matmul_precision_setting_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    gathered(normal(50, 6).bfloat16())
    assert torch.get_float32_matmul_precision() == before
