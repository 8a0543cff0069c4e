"""`largest` compared with torch, including ties and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.native import Poisoned, Runtime, call, normal, runtimes
from torch import Tensor

each_runtime = pytest.mark.parametrize("runtime", runtimes())

# None, one, whole vectors and pieces with a remainder, and enough to divide a row among threads.
SIZES = [(0, 5), (1, 1), (4, 7), (3, 64), (2, 1025), (37, 300), (1, 50_001), (3, 20_000)]


def largest(runtime: Runtime, logits: Tensor, gap: int = 0) -> tuple[Tensor, Tensor]:
    """Return values and ids, [rows], of logits with rows `gap` numbers apart."""
    rows, vocab = logits.shape
    source = Poisoned(rows, vocab, gap=gap)
    source.view.copy_(logits)
    values, ids = Poisoned(rows), Poisoned(rows, dtype=torch.int64)
    call(
        runtime, "largest", logits=source.view, logits_stride=source.stride, rows=rows, vocab=vocab,
        top=values.view, ids=ids.view,
    )  # fmt: skip
    values.assert_rest_untouched()
    ids.assert_rest_untouched()
    return values.view, ids.view


def expected_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A stable sort puts the lower of equal ids first, and NaN before all numbers."""
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, 0], ids[:, 0]


def assert_same(values: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(values, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@each_runtime
def test_largest(runtime: Runtime) -> None:
    for rows, vocab in SIZES:
        for logits in (normal(rows, vocab, seed=vocab), ties(rows, vocab)):
            for gap in (0, 3):
                assert_same(largest(runtime, logits, gap), expected_largest(logits))


def ties(rows: int, vocab: int) -> Tensor:
    """Return few different numbers, with 0 and -0 among the largest."""
    few = (normal(rows, vocab, seed=vocab + 1) * 1.5).round().clamp(max=0)
    return torch.where(normal(rows, vocab) > 0, few, few.neg().clamp(max=0))


@each_runtime
def test_largest_anywhere(runtime: Runtime) -> None:
    """At each boundary of vectors, pieces and threads."""
    for vocab in (67, 20_011):
        places = [0, 1, 15, 16, 63, 64, 65, vocab // 5, vocab // 2 - 1, vocab // 2, vocab - 2]
        places += [vocab - 1, *range(1020, 1030), *range(9990, 10_020, 7)]
        places = [place for place in places if place < vocab]
        logits = normal(len(places), vocab).clamp(max=3)
        logits[range(len(places)), places] = 4.0
        top, ids = largest(runtime, logits)
        assert ids.tolist() == places and (top == 4).all()
        for row in (0, len(places) - 1):  # one row, whose vocabulary is divided among the threads
            assert largest(runtime, logits[row : row + 1])[1].tolist() == [places[row]]


@each_runtime
def test_nan_is_the_largest_only_in_its_row(runtime: Runtime) -> None:
    for vocab in (70, 20_011):
        logits = normal(5, vocab)
        logits[1, vocab - 1] = math.nan
        logits[3, [5, 60]] = math.nan
        logits[3, 6] = math.inf
        for rows in (slice(0, 5), slice(1, 2), slice(3, 4)):
            assert_same(largest(runtime, logits[rows]), expected_largest(logits[rows]))


@each_runtime
def test_infinities(runtime: Runtime) -> None:
    for vocab in (50, 20_000):
        logits = torch.full((4, vocab), -math.inf)
        logits[1, 30] = math.inf
        logits[2, 40:] = math.inf
        logits[3, vocab - 3] = -1e38
        top, ids = largest(runtime, logits)
        assert top.tolist() == [-math.inf, math.inf, math.inf, pytest.approx(-1e38)]
        assert ids.tolist() == [0, 30, 40, vocab - 3]
        for row in range(4):
            assert largest(runtime, logits[row : row + 1])[1].tolist() == [ids[row]]
