"""What calibration gathers: the same whatever the batches, the merges and the interruptions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.quantize import statistics as module
from kvik.quantize.statistics import InputStatistics, relative_error


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gathered(*batches: Tensor, sample_size: int = 16, first: int = 0) -> InputStatistics:
    statistics = InputStatistics(batches[0].shape[1], sample_size=sample_size, first=first)
    for batch in batches:
        statistics.add(batch)
    return statistics


def assert_same(a: InputStatistics, b: InputStatistics) -> None:
    assert (a.tokens, a.first, a.inputs) == (b.tokens, b.first, b.inputs)
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
    """In fp32 a sum of very many small ones would stop growing."""
    x = normal(64, 8).abs() + 1
    statistics = InputStatistics(8)
    for _ in range(500):
        statistics.add(x)
    expected = 500 * 2 * x.double().t() @ x.double()
    torch.testing.assert_close(statistics.hessian().double(), expected, rtol=3e-6, atol=0)
    torch.testing.assert_close(statistics.mean_abs(), x.abs().mean(0), rtol=1e-6, atol=0)


def test_pieces_and_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(200, 12)
    whole = gathered(x)
    assert_same(whole, gathered(*x.split(7)))
    monkeypatch.setattr(module, "PIECE", 12 * 30)
    assert_same(whole, gathered(x))


def test_merged_parts_are_the_whole() -> None:
    x = normal(200, 12)
    merged = gathered(x[120:], first=120)
    merged.merge(gathered(x[:120]))
    assert_same(merged, gathered(x))
    empty = InputStatistics(12, sample_size=16)
    empty.merge(gathered(x))
    assert_same(empty, gathered(x))


def test_an_interruption_changes_nothing() -> None:
    x = normal(200, 12)
    state = {name: t.clone() for name, t in gathered(x[:90], first=5).state().items()}
    resumed = InputStatistics.of_state(state)
    resumed.add(x[90:])
    assert_same(resumed, gathered(x[:90], x[90:], first=5))
    assert resumed.sample_size == 16


def test_the_state_does_not_grow() -> None:
    def size(statistics: InputStatistics) -> int:
        return sum(t.numel() for t in statistics.state().values())

    one = gathered(normal(16, 12))
    assert size(one) == size(gathered(*normal(3000, 12).split(100)))
    assert size(one) < 12 * 12 + (16 + 4) * 12 + 16 + 3


def test_every_token_has_the_same_chance() -> None:
    """Tokens are numbered; 40 samples of 50 out of 2000 spread over the parts of the stream."""
    places = []
    for run in range(40):
        numbers = torch.arange(2000.0)[:, None]
        statistics = gathered(*numbers.split(300), sample_size=50, first=run * 2000)
        assert len(statistics.sample) == 50
        assert len(statistics.sample.unique()) == 50  # no token twice
        places.append(statistics.sample[:, 0])
    counts = torch.cat(places).histc(bins=10, min=0, max=2000)
    expected = 40 * 50 / 10
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # chi-square, 9 of freedom


def test_few_tokens_are_all_in_the_sample() -> None:
    x = normal(5, 4)
    sample = gathered(x).sample
    assert sample.shape == (5, 4)
    assert torch.equal(sample.sort(0).values, x.sort(0).values)
    none = gathered(x, x, sample_size=0)
    assert none.sample.shape == (0, 4) and none.tokens == 10


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_no_numbers_leave_no_trace(bad: float) -> None:
    x = normal(20, 4)
    statistics = gathered(x)
    broken = x.clone()
    broken[19, 2] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        statistics.add(broken)
    assert_same(statistics, gathered(x))


def test_nothing_seen() -> None:
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
