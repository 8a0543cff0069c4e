"""Decoding in latent space compared with its definition; `tests/attention/test_latent.py` compares
whole steps with attention over keys and values of every head."""

from __future__ import annotations

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
from helpers.optional_triton import device

from kvik.kernels.triton import attention_mla
from kvik.kernels.triton.attention_mla import latent_attention
from kvik.kernels.triton.attention_paged import PagedStep, runs_of

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


def decode(q, q_rope, cache, table, starts, lens, contexts, sinks=None):
    """Run the kernels, with the longest contexts as known on the host."""
    runs = runs_of(starts.diff().tolist(), contexts)
    step = PagedStep(starts, lens, table, None, None, cache.shape[1], None, runs)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    latent_attention(q, q_rope, cache, step, SCALE, sinks, out)
    return out


def definition(q, q_rope, cache, table, starts, lens, sinks=None):
    out = torch.empty_like(q)
    for i, context in enumerate(lens.tolist()):
        rows, place = slice(starts[i], starts[i + 1]), torch.arange(context, device=q.device)
        keys = cache[table[i][place // cache.shape[1]], place % cache.shape[1]].float()
        queries = torch.cat((q[rows], q_rope[rows]), 2).float()
        scores = torch.einsum("qhd,kd->hqk", queries, keys) * SCALE
        position = context - len(queries) + torch.arange(len(queries), device=q.device)
        scores = scores.masked_fill(place > position[:, None], -torch.inf)
        if sinks is not None:
            more = sinks[:, None, None].expand(-1, len(queries), 1)
            scores = torch.cat((scores, more), 2)
        weights = scores.softmax(2)[..., :context]
        out[rows] = torch.einsum("hqk,kd->qhd", weights, keys[:, : q.shape[2]]).to(q.dtype)
    return out


@pytest.mark.parametrize(
    ("contexts", "queries", "heads", "latent"),
    [
        ([1, 40, 300], [1, 1, 1], 4, 32),  # three splits
        ([33, 20], [3, 1], 6, 48),  # drafts; a latent dimension that is not a power of two
        ([50], [1], 40, 32),  # two tiles of heads
    ],
)
def test_matches_the_definition(contexts, queries, heads, latent):
    step = make(contexts, queries, heads, latent)
    for sinks in (None, torch.linspace(-2, 3, heads, device=device())):
        found, expected = decode(*step, contexts, sinks), definition(*step, sinks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


def test_half_precision():
    step = make([150], [1], dtype=torch.bfloat16)
    torch.testing.assert_close(decode(*step, [150]), definition(*step), rtol=0.02, atol=0.02)


@pytest.mark.full
def test_results_of_splits_have_bounded_memory(monkeypatch):
    """With little memory, in several launches, with the same bits."""
    contexts = [300, 7, 200, 290]
    step = make(contexts, [1, 1, 1, 1])
    expected = decode(*step, contexts)
    shapes, empty = [], torch.Tensor.new_empty

    def new_empty(self, *shape, **how):
        shapes.append(shape)
        return empty(self, *shape, **how)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    slab = 3 * 4  # splits and heads of the longest sequence
    monkeypatch.setattr(attention_mla, "WORKSPACE", 3 * 4 * slab * (32 + 1) + 1)
    assert torch.equal(decode(*step, contexts), expected)
    assert [shape for shape in shapes if shape[2:] == (32,)] == [(3, slab, 32), (1, slab, 32)]


def test_a_row_of_padding_is_zero():
    q_latent, q_rope, cache, table, starts, lens = make([40, 7], [1, 1])
    lens[1] = 0
    found = decode(q_latent, q_rope, cache, table, starts, lens, [300, 300])
    assert found[0].any() and not found[1].any()
