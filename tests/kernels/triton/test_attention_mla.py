"""Decoding in latent space: the reference compared with attention over keys and values of every
head, and the kernel compared with the reference."""

from __future__ import annotations

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
from helpers.optional_triton import device

from kvik.kernels.reference import mla
from kvik.kernels.triton import attention_mla
from kvik.kernels.triton.attention_mla import mla_decode

SCALE = 0.2


def make(contexts, queries, heads=4, latent=32, rope=8, block_size=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    blocks = [-(-context // block_size) for context in contexts]
    table = torch.zeros(len(contexts), max(blocks) + 1, dtype=torch.int32)
    free = (torch.randperm(sum(blocks), generator=g) + 1).tolist()
    cache = torch.full((sum(blocks) + 1, block_size, latent + rope), torch.nan)
    for i, context in enumerate(contexts):
        table[i, : blocks[i]] = torch.tensor([free.pop() for _ in range(blocks[i])])
        place = torch.arange(context)
        at = table[i][place // block_size], place % block_size
        cache[at] = torch.randn(context, latent + rope, generator=g)
    tokens = sum(queries)
    q = torch.randn(tokens, heads, latent + rope, generator=g).to(device(), dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lens = torch.tensor(contexts, dtype=torch.int32)
    rest = (t.to(device()) for t in (cache.to(dtype), table, starts, lens))
    return (*q.split((latent, rope), 2), *rest)


def test_absorbed_projections_change_nothing():
    step = [t.cpu() for t in make([21], [1], heads=4, latent=32)]
    q_rope, cache, table, starts, lens = step[1:]
    g = torch.Generator().manual_seed(1)
    up_keys, up_values = torch.randn(2, 4, 24, 32, generator=g)  # [heads, head_dim, latent]
    q = torch.randn(1, 4, 24, generator=g)
    place = torch.arange(21)
    c, k_rope = cache[table[0][place // 16].long(), place % 16].split((32, 8), 1)
    keys = torch.einsum("hdl,kl->khd", up_keys, c)
    values = torch.einsum("hdl,kl->khd", up_values, c)
    scores = torch.einsum("qhd,khd->hqk", q, keys) + torch.einsum("qhr,kr->hqk", q_rope, k_rope)
    expected = torch.einsum("hqk,khd->qhd", (scores * SCALE).softmax(2), values)

    absorbed = torch.einsum("hdl,qhd->qhl", up_keys, q)
    found = mla.mla_decode(absorbed, q_rope, cache, table, starts, lens, SCALE)
    found = torch.einsum("hdl,qhl->qhd", up_values, found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("contexts", "queries", "heads", "latent"),
    [
        ([1, 40, 300], [1, 1, 1], 4, 32),  # three splits
        ([33, 20], [3, 1], 6, 48),  # drafts; a latent dimension that is not a power of two
        ([50], [1], 40, 32),  # two tiles of heads
    ],
)
def test_matches_the_reference(contexts, queries, heads, latent):
    step = make(contexts, queries, heads, latent)
    found = mla_decode(*step, SCALE, most_queries=max(queries), longest=max(contexts))
    torch.testing.assert_close(found, mla.mla_decode(*step, SCALE), rtol=1e-4, atol=2e-6)


def test_half_precision():
    step = make([150], [1], dtype=torch.bfloat16)
    found = mla_decode(*step, SCALE, longest=150)
    expected = mla.mla_decode(*step, SCALE)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.full
def test_results_of_splits_have_bounded_memory(monkeypatch):
    """With little memory, in several launches, with the same bits."""
    step = make([300, 7, 200, 290], [1, 1, 1, 1])
    expected = mla_decode(*step, SCALE, longest=300)
    shapes, empty = [], torch.Tensor.new_empty

    def new_empty(self, *shape, **how):
        shapes.append(shape)
        return empty(self, *shape, **how)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    slab = 3 * 4  # splits and heads of the longest sequence
    monkeypatch.setattr(attention_mla, "WORKSPACE", 3 * 4 * slab * (32 + 1) + 1)
    assert torch.equal(mla_decode(*step, SCALE, longest=300), expected)
    assert [shape for shape in shapes if shape[2:] == (32,)] == [(3, slab, 32), (1, slab, 32)]


def test_a_row_of_padding_is_zero():
    q_latent, q_rope, cache, table, starts, lens = make([40, 7], [1, 1])
    lens[1] = 0
    found = mla_decode(q_latent, q_rope, cache, table, starts, lens, SCALE, longest=300)
    assert found[0].any() and not found[1].any()
