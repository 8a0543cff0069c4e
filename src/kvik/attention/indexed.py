"""Indexers, which choose the keys that queries read (DeepSeek Sparse Attention, DeepSeek-AI 2025,
arXiv 2512.02556, section 2.1), or blocks of keys (MiniMax-M3).

Each token has a narrow key of its own for the indexer, in the same block as its latent vector, or
as its keys and values. A query that sees more keys than it may read scores all of them, and reads
those with the largest scores. Scores are fp32, and those of a query depend on no other query of the
step, so that its keys do not depend on how a prompt is divided into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.attention.layout import StepLayout
from kvik.kernels.ops import Ops
from kvik.spec.kv import IndexSpec

# What was chosen, in a form that depends on the backend.
Choice: TypeAlias = "Sequence[Sequence[Tensor] | Tensor]"


@dataclass(frozen=True, slots=True)
class Indexed:
    """What the indexer of a layer computes in one step.

    Attributes:
        q: [tokens, heads * dim]; k: [tokens, dim], which the cache stores; not rotated. With pools
            k is followed by its gates, [tokens, 2 * dim].
        weights: [tokens, heads]; None if blocks of keys are chosen.
        rotation: [tokens, rope] fp32, as in `Ops.rotary`; None: there is none.
        bias: [pool, dim] fp32, added to the gates of a pool; None: there are no pools.
    """

    spec: IndexSpec
    q: Tensor
    k: Tensor
    weights: Tensor | None
    rotation: Tensor | None
    bias: Tensor | None = None

    @property
    def queries(self) -> Tensor:
        """The queries, rotated, [tokens, heads, dim] fp32."""
        return self._turned(self.q.unflatten(1, (self.spec.heads, self.spec.dim)))

    @property
    def keys(self) -> Tensor:
        """What the cache stores, rotated, [tokens, 1, dim or 2 * dim] fp32."""
        return self._turned(self.k[:, None])

    def _turned(self, x: Tensor) -> Tensor:
        if self.rotation is None:
            return x.float()
        return rotated(x, self.rotation, interleaved=self.spec.interleaved)


def index_keys(ops: Ops, of: Indexed, cache: Tensor, layout: StepLayout) -> None:
    """Do what `store_keys` does, then write the keys of the pools that are complete."""
    store_keys(ops, of, cache, layout)
    if of.bias is not None:
        make_pools(of.bias, cache, layout)


def store_keys(ops: Ops, of: Indexed, cache: Tensor, layout: StepLayout) -> None:
    """Rotate the keys of a step and write them into the cache, `LayerKV.index`."""
    k = of.keys.to(cache.dtype)
    ops.store_kv(k, k[..., :0], cache, cache[..., :0], layout.slot_mapping)


def make_pools(bias: Tensor, cache: Tensor, layout: StepLayout) -> None:
    """Write the keys of the pools whose last keys are in the step, each in the place of its last
    key, which nothing else reads.

    Args:
        bias: of `Indexed`. cache: `LayerKV.index`.
    """
    (pool, dim), rows = bias.shape, cache.view(-1, cache.shape[3])
    for seq, length in enumerate(layout.num_scheduled):
        end = layout.contexts[seq] // pool * pool
        first = (layout.contexts[seq] - length) // pool * pool
        if first < end:
            slots = layout.slots_of(seq, range(first, end))
            k, gates = rows[slots].float().unflatten(0, (-1, pool)).chunk(2, 2)
            means = (k * (gates + bias).softmax(1)).sum(1)
            rows[slots[pool - 1 :: pool], :dim] = means.to(cache.dtype)


def choose_keys(of: Indexed, cache: Tensor, layout: StepLayout) -> list[list[Tensor]]:
    """Return for each token the places in its sequence of the keys that it reads, ascending: once,
    or for each KV head. Nothing if all tokens read all that they see."""
    spec = of.spec
    if max(layout.contexts, default=0) <= spec.top:
        return []
    q = of.queries.to(cache.dtype).float()
    lists = spec.heads if spec.span else 1  # of a token
    choice: list[list[Tensor]] = []
    start = 0
    for seq, length in enumerate(layout.num_scheduled):
        blocks = layout.block_table[seq, : -(-layout.contexts[seq] // layout.block_size)]
        keys = cache.index_select(0, blocks).flatten(0, 2)[: layout.contexts[seq]].float()
        first, is_tree = layout.first_key(seq), bool(layout.nodes(start, length))
        for seen in places_seen(layout, seq, start):
            token = len(choice)
            if len(seen) <= spec.top:
                choice.append([seen] * lists)
                continue
            rows = keys.index_select(0, seen) if is_tree else keys[first : first + len(seen)]
            if spec.pool:
                rows = rows[spec.pool - 1 :: spec.pool, : spec.dim]
            products = (rows @ q[token].t()).t()  # [heads, keys]
            if spec.span:
                choice.append([seen[in_blocks(of_head, spec)] for of_head in products])
                continue
            assert of.weights is not None
            weights = of.weights[token].float() * (spec.heads * spec.dim) ** -0.5
            scores = weights @ products.relu_()
            if spec.pool:
                choice.append([seen[in_pools(scores, len(seen), spec)]])
            else:
                choice.append([seen[largest(scores, spec.top)]])
        start += length
    return choice


def in_blocks(products: Tensor, spec: IndexSpec) -> Tensor:
    """Return which keys are in the chosen blocks, bool [keys], by their products with a query
    [keys]."""
    keys, blocks = len(products), -(-len(products) // spec.span)
    padded = products.new_full((blocks * spec.span,), -torch.inf)
    padded[:keys] = products
    scores = padded.view(blocks, spec.span).amax(1)
    scores[max(0, blocks - spec.local) :] = torch.inf
    return largest(scores, spec.top // spec.span).repeat_interleave(spec.span)[:keys]


def in_pools(scores: Tensor, keys: int, spec: IndexSpec) -> Tensor:
    """Return which keys are in the chosen pools, or after the last whole one, bool [keys], by the
    scores of whole pools."""
    chosen = largest(scores, spec.top // spec.pool).repeat_interleave(spec.pool)
    return F.pad(chosen, (0, keys - len(chosen)), value=True)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return which of the scores [n] are the `count` largest ones, the first ones of equals, bool
    [n]."""
    cut = scores.topk(min(count, len(scores))).values[-1]
    above, equals = scores > cut, scores == cut
    return above | equals & (equals.cumsum(0) <= count - above.sum())


def rotated(x: Tensor, rotation: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first channels of each head, in fp32.

    Args:
        x: [tokens, heads, dim]. rotation: [tokens, rope], as in `Ops.rotary`.
        interleaved: neighbours together. They are returned as two halves: another order of
            channels, which is the same for queries and keys.
    """
    turned, rest = x.float().split((rotation.shape[1], x.shape[2] - rotation.shape[1]), 2)
    cos, sin = rotation[:, None].chunk(2, 2)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), 2)


def places_seen(layout: StepLayout, seq: int, start: int) -> Iterator[Tensor]:
    """Yield the places in a sequence of the keys that each of its tokens sees, [keys] int64.

    Args:
        start: first token of the sequence in the step.
    """
    length, context = layout.num_scheduled[seq], layout.contexts[seq]
    every = torch.arange(layout.first_key(seq), context, device=layout.slot_mapping.device)
    cached, nodes = context - length, layout.nodes(start, length)
    for token in range(length):
        if not nodes:
            yield every[: len(every) - length + token + 1]
            continue
        path = [cached + node for node in range(length) if nodes[token] >> node & 1]
        yield torch.cat((every[: len(every) - length], every.new_tensor(path)))
