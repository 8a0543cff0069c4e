"""The normative backend: one sequence at a time, in fp32, as the definition reads.

Query at position p sees key j iff j <= p and, with a window, `Window.first` of p <= j; where
attention is bidirectional, iff they are not further apart than that allows. Positions of
a sequence's queries are the last ones of its context, so a chunk behind a cached prefix is aligned
bottom-right. KV head h serves the query heads h * group .. h * group + group - 1. In a tree a query
sees of this step's keys its ancestors and itself, and a node's position follows from its depth.
A learned sink takes its share of a head's weights (Agarwal et al. 2025, gpt-oss) and has no value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.attention.base import (
    Attend,
    AttendLatent,
    AttentionMetadata,
    AttentionSpec,
    BackendCaps,
    LayerKV,
    StepLayout,
    move,
    read_both,
)
from kvik.kernels.ops import Ops
from kvik.spec.kv import Window


class ReferenceAttention:
    caps = BackendCaps(
        name="reference",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def plan(self, layout: StepLayout, window: Window | None) -> AttentionMetadata:
        return AttentionMetadata(layout, window)

    def run(self, attend: Attend) -> Tensor:
        q, _, _ = attend.stored(self._ops)
        kv, layout, window = attend.kv, attend.metadata.layout, attend.metadata.window
        out = torch.empty_like(q)
        start = 0
        for i, (length, context) in enumerate(
            zip(layout.num_scheduled, layout.contexts, strict=True)
        ):
            blocks = layout.block_table[i]
            rows = slice(start, start + length)
            if attend.spec.bidirectional is not None:
                visible = near(attend.spec.bidirectional, length, context)
            else:
                visible = _visible(layout.nodes(start, length), length, context, window)
            out[rows] = _attend(q[rows], kv, blocks, visible.to(q.device), attend.spec)
            start += length
        return out

    def run_latent(self, attend: AttendLatent) -> Tensor:
        means = self.run(attend.joined(self._ops))[..., : attend.up.rank]
        return attend.up.to_values(self._ops, means)

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        move(kv, source, target)


def _visible(nodes: tuple[int, ...], length: int, context: int, window: Window | None) -> Tensor:
    """[length, context] bool: which keys of a sequence each of its queries sees.

    Args:
        nodes: see `StepLayout.nodes`.
    """
    cached = context - length
    position = torch.arange(context)
    if not nodes:
        visible = position <= position[cached:, None]
    else:
        words = torch.tensor(nodes)
        position[cached:] = cached + torch.tensor([word.bit_count() - 1 for word in nodes])
        among = (words[:, None] >> torch.arange(length) & 1).bool()  # [length, length]
        visible = torch.cat((torch.ones(length, cached, dtype=torch.bool), among), 1)
    if window is not None:
        visible &= position >= window.first(position[cached:, None])
    return visible


def near(reach: int, length: int, context: int) -> Tensor:
    """Return which keys queries see that see them on both sides, [length, context] bool."""
    position = torch.arange(context)
    return (position - position[context - length :, None]).abs() <= reach


def _attend(q: Tensor, kv: LayerKV, blocks: Tensor, visible: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of one sequence.

    Args:
        q: [length, heads, head_dim].
        blocks: [max_blocks], the sequence's block table.
        visible: [length, context].
    """
    heads = q.shape[1]
    block_size, kv_heads = kv.k.shape[1], kv.k.shape[2]
    # Keys no query sees are not read at all: their blocks may be unwritten or no longer ours.
    keys = visible.any(0).nonzero()[:, 0]
    at = blocks[keys // block_size].long() * block_size + keys % block_size
    # [keys, heads, head_dim]
    both = read_both(kv, at)
    k, v = (x.float().repeat_interleave(heads // kv_heads, dim=1) for x in both)

    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible[:, keys], -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks[:, None, None].expand(heads, len(q), 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
