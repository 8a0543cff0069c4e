"""Choices of an indexer, and attention over a window and over entries, by Triton's kernels;
tests/attention/test_latent.py compares attention over chosen latent vectors with its definition."""

from __future__ import annotations

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
from helpers.attention_backends import make_backend
from helpers.entries import SPECS, Texts, run
from helpers.indexed import SPECS as INDEXES
from helpers.indexed import check_choice

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("case", "spec", "dtype"),
    [
        ("mixed", "halves", FP32),
        ("tree", "neighbours", FP32),
        ("decode batch", "halves", BF16),
        ("mixed", "pools", FP32),
        ("decode", "odd pools", FP32),
        pytest.param("long", "neighbours", FP32, marks=pytest.mark.full),
    ],
)
def test_the_largest_scores_are_chosen(case: str, spec: str, dtype: torch.dtype) -> None:
    before = make_backend("reference")
    check_choice(case, make_backend("triton"), dtype, INDEXES[spec], before)


@pytest.mark.parametrize("step", ["mixed", "decode"])
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [*((spec, FP32) for spec in SPECS), ("window", BF16), ("overlapping", BF16)],
)
def test_entries_as_defined(spec: str, step: str, dtype: torch.dtype) -> None:
    reference = make_backend("reference")
    expected = run(reference, spec, step, dtype)
    found = run(make_backend("triton"), spec, step, dtype, reference)
    error = 2e-5 if dtype == FP32 else 2e-2
    torch.testing.assert_close(found, expected, atol=error, rtol=error)


def test_of_equal_scores_the_first_entries_are_read() -> None:
    results = []
    for name in ("reference", "triton"):
        texts = Texts(SPECS["chosen"], [64], 16, FP32)
        texts.parts[0][4].zero_()[:, 0] = 1  # weights of the indexer's heads: many scores are 0
        texts.step(make_backend("reference"), [(0, 56)])
        results.append(texts.step(make_backend(name), [(56, 8)]))
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)
