"""Queries that see keys on both sides, in every backend that supports them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_backends import make_backend
from helpers.optional_native import needs_native

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


@needs_native
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reach", [7, 300, FAR])
def test_native_results_have_the_same_bits_alone(make_step, reach, dtype, dim):
    """A sequence in a batch, and the same one alone."""
    backend, spec = make_backend("cpu"), AttentionSpec(0.25, bidirectional=reach)
    together = replace(make_step([(0, 90), (0, 600), (0, 5)], 16, dim=dim, dtype=dtype), spec=spec)
    alone = replace(make_step([(0, 600)], 16, dim=dim, dtype=dtype), spec=spec)
    for name in ("q", "k", "v"):
        getattr(alone, name).copy_(getattr(together, name)[90:690])
    assert torch.equal(together.run(backend)[90:690], alone.run(backend))


def test_triton_refuses_it():
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="'triton' has no bidirectional attention"):
        TritonAttention.caps.check(AttentionSpec(0.25, bidirectional=FAR))
