"""Queries that see keys on both sides, in every backend that supports them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvik.attention.base import AttentionSpec
from kvik.attention.triton import TritonAttention
from kvik.errors import ConfigError

FAR = 1 << 20
LENGTHS = [(0, 1), (0, 70), (0, 16), (0, 200), (0, 33)]


@pytest.mark.parametrize("reach", [1, 5, 64, 100, FAR])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_queries_see_near_keys_on_both_sides(backend, make_step, heads, kv_heads, reach):
    step = make_step(LENGTHS, 16, heads, kv_heads)
    step = replace(step, spec=AttentionSpec(0.25, bidirectional=reach))
    step.check(step.run(backend))


@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("reach", [5, 70, FAR])
def test_heads_of_register_tiles(backend, make_step, dim, reach):
    """16 queries that see a whole tile of keys are multiplied at once, others are not."""
    step = make_step([*LENGTHS, (0, 600)], 16, 4, 2, dim=dim, dtype=torch.bfloat16)
    step = replace(step, spec=AttentionSpec(dim**-0.5, bidirectional=reach))
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(
        step.run(backend).double(), step.expected(), rtol=2 * eps, atol=2 * eps
    )


@pytest.mark.parametrize("reach", [5, FAR])
@pytest.mark.parametrize("table", [1, 20, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_depend_on_distances(backend, make_step, reach, table, dtype):
    step = make_step(LENGTHS, 16, 4, 2, dim=32, dtype=dtype)
    distances = torch.randn(4, 1 + 2 * table, generator=torch.Generator().manual_seed(table)) * 3
    step = replace(step, spec=AttentionSpec(0.25, bidirectional=reach, distances=distances))
    eps = torch.finfo(torch.bfloat16).eps if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        step.run(backend).double(), step.expected(), rtol=3 * eps, atol=3 * eps
    )


def test_triton_refuses_it():
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="'triton' has no bidirectional attention"):
        TritonAttention.caps.check(AttentionSpec(0.25, bidirectional=FAR))
