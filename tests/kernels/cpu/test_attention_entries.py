"""Attention over a window and over entries, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_backends import make_backend
from helpers.entries import SPECS, STEPS, Texts, run
from helpers.native import FLOATS, Runtime, runtimes


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("runtime", runtimes())
def test_as_defined(runtime: Runtime, spec: str, step: str, dtype: torch.dtype) -> None:
    expected = run(make_backend("reference"), spec, step, dtype)
    found = run(make_backend("cpu", runtime.threads, runtime.isa), spec, step, dtype)
    error = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("runtime", runtimes((2,)))
def test_results_have_the_same_bits_in_any_step(runtime: Runtime, dtype: torch.dtype) -> None:
    whole, one = (
        make_backend("cpu", 1, runtime.isa),
        make_backend("cpu", runtime.threads, runtime.isa),
    )
    for spec in SPECS.values():
        texts = Texts(spec, [150], 16, dtype)
        expected = texts.step(whole, [(0, 150)])
        ends = [*range(7, 120, 7), *range(120, 150), 150]
        spans = zip([0, *ends], ends, strict=False)
        found = [texts.step(one, [(begin, end - begin)]) for begin, end in spans]
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("runtime", runtimes((1,)))
def test_of_equal_scores_the_first_entries_are_read(runtime: Runtime) -> None:
    results = []
    for backend in (make_backend("reference"), make_backend("cpu", 1, runtime.isa)):
        texts = Texts(SPECS["chosen"], [150], 16, torch.float32)
        texts.parts[0][4].zero_()  # weights of the indexer's heads
        results.append(texts.step(backend, [(0, 150)]))
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)
