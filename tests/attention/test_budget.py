"""The weights by which layers with budgets choose what they keep, by their definition."""

from __future__ import annotations

import math

import pytest
import torch

from kvik.attention.budget import weights_of

LAST, KEYS, HEADS, KV_HEADS, DIM = 5, 23, 6, 2, 8


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sinks", [False, True])
def test_weights_are_those_of_the_last_queries(softcap: float | None, sinks: bool) -> None:
    """Capped scores and learned sinks count as they do in the layer."""
    rng = torch.Generator().manual_seed(0)
    queries = torch.randn(LAST, HEADS, DIM, generator=rng)
    k = torch.randn(KEYS, KV_HEADS, DIM, generator=rng)
    learned = torch.randn(HEADS, generator=rng) if sinks else None
    found = weights_of(queries, k, softcap, learned)
    for head in range(HEADS):
        total = [0.0] * KEYS
        for i in range(LAST):
            seen = KEYS - LAST + i + 1
            scores = [float(queries[i, head] @ key) for key in k[:seen, head // 3]]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score) for score in scores]
            rest = 0.0 if learned is None else math.exp(float(learned[head]))
            for place, weight in enumerate(weights):
                total[place] += weight / (sum(weights) + rest)
        assert found[head].tolist() == pytest.approx(total, rel=1e-5)


def test_heads_do_not_depend_on_which_others_are_computed() -> None:
    """To the bit: processes divide them."""
    rng = torch.Generator().manual_seed(1)
    queries = torch.randn(32, 8, 64, generator=rng)
    k = torch.randn(777, 2, 64, generator=rng)
    every = weights_of(queries, k)
    for first, end in ((0, 4), (4, 8), (0, 1), (5, 7)):
        kv = k[:, first // 4 : first // 4 + 1]
        some = weights_of(queries[:, first:end], kv)
        assert torch.equal(some, every[first:end])
