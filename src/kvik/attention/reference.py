"""The normative backend: one sequence at a time, in fp32, following the definition.

The query at position p sees key j iff j <= p and, with a window, either `Window.first` of p <= j or
j is one of its sinks, whose scores use a query rotated for sinks. If attention is bidirectional, it
sees key j iff the distance is within the limit. It sees no key before `StepLayout.first_keys`.
Positions of a sequence's queries are the last ones of its context, so the mask of a chunk after a
cached prefix is aligned bottom-right. KV head h serves the query heads h * group .. h * group +
group - 1. In a tree a query sees, of this step's keys, its ancestors and itself, and a node's
position follows from its depth. A learned sink takes its share of a head's weights (Agarwal et al.
2025, gpt-oss) and has no value. With slopes (ALiBi), a score depends on the distance from query to
key; a query's distance to sinks is that without the keys between them and the window (Xiao et al.
2023, section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.attention.base import (
    Attend,
    AttentionBackend,
    AttentionSpec,
    BackendCaps,
    LayerKV,
    keep_queries,
    read_both,
)
from kvik.spec.visible_keys import Window, first_visible


class ReferenceAttention(AttentionBackend):
    caps = BackendCaps(
        name="reference",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )

    def run(self, attend: Attend) -> Tensor:
        for_sinks = attend.for_sinks(self._ops)
        q, _, _ = attend.stored(self._ops)
        kv, layout, window = attend.kv, attend.metadata.layout, attend.metadata.window
        if kv.queries is not None:
            keep_queries(q, kv.queries, layout, attend.spec.scale)
        out = torch.empty_like(q)
        start = 0
        for i, (length, context) in enumerate(
            zip(layout.num_scheduled, layout.contexts, strict=True)
        ):
            blocks = layout.block_table[i]
            rows = slice(start, start + length)
            nodes, reach = layout.nodes(start, length), attend.spec.bidirectional
            seen = _visible(nodes, length, context, window, reach, layout.first_key(i))
            keys, visible, sinks, distance = (tensor.to(q.device) for tensor in seen)
            of = kv, blocks, keys, visible, sinks, distance, attend.spec
            out[rows] = self._attend(q[rows], None if for_sinks is None else for_sinks[rows], *of)
            start += length
        return attend.narrowed(out)

    def _attend(
        self,
        q: Tensor,
        for_sinks: Tensor | None,
        kv: LayerKV,
        blocks: Tensor,
        keys: Tensor,
        visible: Tensor,
        sinks: Tensor,
        distance: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """Attend in one sequence.

        Args:
            q, for_sinks: [length, heads, head_dim], for keys, and for sinks if these differ.
            blocks: [max_blocks], the sequence's block table.
            keys, visible, sinks, distance: see `_visible`.
        """
        heads = q.shape[1]
        block_size, kv_heads = kv.k.shape[1], kv.k.shape[2]
        at = blocks[keys // block_size].long() * block_size + keys % block_size
        # [keys, heads, head_dim]
        stored = read_both(kv, at)
        k, v = (x.float().repeat_interleave(heads // kv_heads, dim=1) for x in stored)

        scores = torch.einsum("qhd,khd->hqk", q.float(), k)
        if for_sinks is not None:
            scores[..., sinks] = torch.einsum("qhd,khd->hqk", for_sinks.float(), k[sinks])
        scores *= spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.slopes is not None:
            scores = scores + spec.slopes[:, None, None] * distance
        if spec.distances is not None:
            scores = scores + distance_biases(spec.distances, distance)
        scores = scores.masked_fill(~visible, -torch.inf)
        if spec.sinks is not None:
            learned = spec.sinks[:, None, None].expand(heads, len(q), 1)
            scores = torch.cat((scores, learned), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        self.see(kv, weights, visible)
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    def see(self, kv: LayerKV, weights: Tensor, visible: Tensor) -> None:
        """Observe the weights of a sequence in a layer; overridden by measurements.

        Args:
            weights: [heads, queries, keys]. visible: [queries, keys] bool.
        """


def distance_biases(table: Tensor, distance: Tensor) -> Tensor:
    """Return what is added to scores, [heads, queries, keys], by `AttentionSpec.distances`.

    Args:
        distance: from query to key, [queries, keys].
    """
    reach = table.shape[1] // 2
    return table[:, distance.clamp(-reach, reach) + reach]


def within_reach(reach: int, length: int, context: int) -> Tensor:
    """Return which keys bidirectional queries see, [length, context] bool."""
    position = torch.arange(context)
    return (position - position[context - length :, None]).abs() <= reach


def _visible(
    nodes: tuple[int, ...],
    length: int,
    context: int,
    window: Window | None,
    reach: int | None,
    first_key: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which keys of a sequence any of its queries sees, [keys], which of these each query
    sees, bool [length, keys], which are sinks, bool [keys], and their positions relative to each
    query, [length, keys].

    Args:
        nodes: see `StepLayout.nodes`.
        reach: see `AttentionSpec.bidirectional`.
        first_key: the first key that is seen, apart from windows.
    """
    if reach is not None:
        keys = torch.arange(context)
        visible, none = within_reach(reach, length, context), torch.zeros(context, dtype=torch.bool)
        return keys, visible, none, keys - keys[context - length :, None]
    cached = context - length
    first = max(first_key, first_visible(cached, window))
    sinks = 0 if window is None else window.sinks
    keys = torch.cat((torch.arange(min(sinks, first)), torch.arange(first, context)))
    position, queries = keys.clone(), torch.arange(cached, context)[:, None]
    if not nodes:
        visible = position <= queries
    else:
        words, new = torch.tensor(nodes), len(keys) - length
        position[new:] = cached + torch.tensor([word.bit_count() - 1 for word in nodes])
        queries = position[new:, None]
        among = (words[:, None] >> torch.arange(length) & 1).bool()  # [length, length]
        visible = torch.cat((torch.ones(length, new, dtype=torch.bool), among), 1)
    if window is not None:
        visible &= (position >= window.first(queries)) | (position < sinks)
    # Keys that no query sees are not read: their blocks may be unwritten, or another request's.
    seen = visible.any(0)
    position = position[seen]
    distance = position - queries
    if window is not None and sinks:
        near = position - queries.clamp(max=window.max_keys - 1)
        distance = torch.where(position < sinks, near, distance)
    return keys[seen], visible[:, seen], position < sinks, distance
