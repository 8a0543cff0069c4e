"""The choice of keys by an indexer, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_backends import make_backend
from helpers.indexed import SPECS, Texts, check_choice
from helpers.native import FLOATS, Runtime, runtimes

LONG = pytest.param("long", marks=pytest.mark.full)
BLOCKS = {
    "mixed": "pairs",
    "tree": "blocks",
    "prefill batch": "strips",
    "long": "large blocks",
}
POOLS = {"mixed": "odd pools", "prefill batch": "pools", "long": "pools"}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", ["mixed", "tree", "prefill batch", LONG])
@pytest.mark.parametrize("runtime", runtimes())
def test_the_largest_scores_are_chosen(runtime: Runtime, case: str, dtype: torch.dtype) -> None:
    backend = make_backend("cpu", runtime.threads, runtime.isa)
    for spec in ("neighbours" if case == "mixed" else "halves", BLOCKS[case]):
        check_choice(case, backend, dtype, SPECS[spec])
    if case in POOLS:
        check_choice(case, backend, dtype, SPECS[POOLS[case]])


@pytest.mark.parametrize("runtime", runtimes((1,)))
def test_of_equal_scores_the_first_are_chosen(runtime: Runtime) -> None:
    texts = Texts([70], backend=make_backend("cpu", 1, runtime.isa))
    texts.weights = [torch.zeros_like(texts.weights[0])]
    assert all(torch.equal(x, torch.arange(len(x))) for (x,) in texts.step([(0, 70)]))
