"""Calls of torch on devices other than the CPU, recorded with tensors without memory."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.attention.base import Attend, AttentionSpec, LayerKV
from kvik.attention.layout import StepLayout
from kvik.attention.sdpa import MAX_KEYS, MAX_PADDING, DecodeRow, SdpaAttention, split
from kvik.kernels.torch_ops import TORCH

META = torch.device("meta")
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize(
    ("queries", "contexts"), [((5,), (5,)), ((5,), (12,)), ((1, 1), (7, 12)), ((1, 3), (9, 8))]
)
def test_heads_share_no_memory_and_shapes_are_reused(queries, contexts, monkeypatch) -> None:
    """A GPU kernel misreads strides of 0; cuDNN plans each shape anew."""
    attend, calls = F.scaled_dot_product_attention, 0

    def watched(q: Tensor, k: Tensor, v: Tensor, *rest: object, **how: object) -> Tensor:
        nonlocal calls
        calls += 1
        for x in (k, v):
            assert all(
                size == 1 or stride for size, stride in zip(x.shape, x.stride(), strict=True)
            )
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        return attend(q, k, v, *rest, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    tokens, count = sum(queries), len(queries)
    layout = StepLayout(
        empty(count + 1, dtype=torch.int32),
        empty(count, dtype=torch.int32),
        empty(count, 3, dtype=torch.int32),
        empty(tokens, dtype=torch.int64),
        queries,
        contexts,
        BLOCK,
    )
    backend, cache = SdpaAttention(TORCH), empty(8, BLOCK, KV_HEADS, DIM)
    q, k, v = (empty(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    kv = LayerKV(cache, empty(*cache.shape))
    out = backend.run(Attend(q, k, v, kv, backend.plan(layout, None), AttentionSpec(DIM**-0.5)))
    assert out.shape == q.shape and calls == (2 if queries == (1, 3) else 1)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def rows(widths: list[int]) -> list[DecodeRow]:
    return [DecodeRow(i, i, 0, width) for i, width in enumerate(widths)]


def test_similar_rows_share_a_batch_in_order() -> None:
    like = rows([100, 120, 110, 128])
    assert split(like) == [like]


def test_a_long_row_does_not_pad_many_short_ones() -> None:
    batches = split(rows([50] * 20 + [4000]))
    assert [len(batch) for batch in batches] == [1, 20]


def test_every_row_is_in_one_batch_and_limits_hold() -> None:
    rng = random.Random(0)
    for _ in range(200):
        given = rows([rng.choice([rng.randint(1, 300), rng.randint(1, 20000)]) for _ in range(40)])
        batches = split(given)
        assert sorted(row.seq for batch in batches for row in batch) == list(range(40))
        for batch in batches:
            width = max(row.padded_width for row in batch)
            assert sum(width - row.padded_width for row in batch) <= MAX_PADDING
            assert len(batch) == 1 or len(batch) * width <= MAX_KEYS


def test_nothing_to_decode() -> None:
    assert split([]) == []
