"""Layers of one matrix that AWQ clips, and those it does not."""

from __future__ import annotations

import pytest
import torch

from kvik.quantize.factors import InputStatistics
from kvik.quantize.gptq import rtn
from kvik.quantize.methods import MatrixInputs, quantise_layers
from kvik.quantize.quantised import recipe_grid
from kvik.quantize.recipe import Recipe


@pytest.mark.parametrize("whole", [0, 4, 6])
def test_rows_of_queries_and_keys_are_not_clipped(whole: int) -> None:
    """Others are: each group has one large weight, for an input near zero."""
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(6, 64, generator=generator), torch.randn(90, 64, generator=generator)
    w[:, ::32], x[:, ::32] = 5.0, x[:, ::32] / 1000
    statistics = InputStatistics(64, moment=False)
    statistics.add(x)
    recipe = Recipe("awq", 3, 32)
    given = MatrixInputs(statistics.sample, statistics)
    ((_, found),) = quantise_layers(recipe, {"qkv": w}, given, {"qkv": whole}, torch.float32)
    steps, uncut = (
        found.scales.scales,
        rtn(w, recipe_grid(recipe, "qkv", torch.float32)).scales.scales,
    )
    assert torch.equal(steps[:whole], uncut[:whole])
    assert bool((steps[whole:] < 0.8 * uncut[whole:]).all())
