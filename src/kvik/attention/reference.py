"""The normative backend: one sequence at a time, in fp32, as the definition reads.

Query at position p sees key j iff j <= p and, with a window of w keys, p - w < j. Positions of a
sequence's queries are the last ones of its context, so a chunk behind a cached prefix is aligned
bottom-right. KV head h serves the query heads h * group .. h * group + group - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.attention.base import AttentionMetadata, BackendCaps, LayerKV, StepLayout
from kvik.attention.stored import read, store
from kvik.kernels.ops import Ops


class ReferenceAttention:
    caps = BackendCaps(
        name="reference",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def plan(self, layout: StepLayout, window: int | None) -> AttentionMetadata:
        return AttentionMetadata(layout, window)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        layout = metadata.layout
        store(self._ops, k, v, kv, layout.slot_mapping)
        out = torch.empty_like(q)
        start = 0
        for i, (length, context) in enumerate(
            zip(layout.num_scheduled, layout.contexts, strict=True)
        ):
            blocks = layout.block_table[i]
            rows = slice(start, start + length)
            out[rows] = _attend(q[rows], kv, blocks, context, metadata.window, scale)
            start += length
        return out


def _attend(
    q: Tensor, kv: LayerKV, blocks: Tensor, context: int, window: int | None, scale: float
) -> Tensor:
    """Attention of one sequence.

    Args:
        q: [length, heads, head_dim], the last `length` of `context` positions.
        blocks: [max_blocks], the sequence's block table.
    """
    length, heads, _ = q.shape
    block_size, kv_heads = kv.k.shape[1], kv.k.shape[2]
    # Keys no query sees are not read at all: their blocks may be unwritten or no longer ours.
    first = 0 if window is None else max(0, context - length - window + 1)
    keys = torch.arange(first, context, device=q.device)
    queries = torch.arange(context - length, context, device=q.device)
    at = blocks[keys // block_size].long() * block_size + keys % block_size
    # [keys, heads, head_dim]
    k = read(kv.k, kv.k_scales, at).float().repeat_interleave(heads // kv_heads, dim=1)
    v = read(kv.v, kv.v_scales, at).float().repeat_interleave(heads // kv_heads, dim=1)

    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    visible = keys <= queries[:, None]  # [queries, keys]
    if window is not None:
        visible &= keys > queries[:, None] - window
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
