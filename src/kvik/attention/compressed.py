"""Attention over the last keys, and over entries that each sum up several tokens (DeepSeek-V4).

A token has one vector, which is its key and its value for all heads, and what entries are made of:
one or two vectors with a gate for each channel. An entry is a mean over its tokens, weighed by the
softmax of each channel's gates; with two vectors, the first ones of the tokens before take part
too. It is made when its last token is computed, whose query is the first to see it.

A cache has these vectors of the tokens in the window, others have the entries. An entry is where
its last token would be, in the place of `ENTRY_TOKENS` narrow tokens. So it depends only on tokens
up to the end of its block, and a token that replaces a rejected draft makes the entry again.

Here all of this is defined in torch, one token at a time over the keys that it reads: the result of
a token does not depend on the rest of the step. A CPU has native kernels for it
(csrc/attention_entries.hpp), and a GPU Triton's (kernels/triton/entries.py, attention_chosen.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvik.attention.indexed import largest
from kvik.attention.layout import StepLayout
from kvik.frozen import frozen
from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix
from kvik.spec.kv import ENTRY_TOKENS, CompressedSpec


@dataclass(frozen=True, slots=True)
class EntryMaker:
    """Makes the entries of a layer, or the keys of its indexer."""

    bias: Tensor  # [every, channels of all vectors] fp32, added to the gates of an entry's tokens
    weight: Tensor  # [dim], of RMSNorm
    eps: float
    # high, low, last: tables of rotary positions, as in `Ops.rotations`.
    high: Tensor
    low: Tensor
    last: int

    def __call__(self, ops: Ops, inputs: Tensor, first: int, spec: CompressedSpec) -> Tensor:
        """Make entries from number `first` on.

        Args:
            inputs: [tokens, vectors, then as many gates]; with two vectors from the tokens of the
                entry before on, if there is one.

        Returns:
            [entries, dim] fp32, normalised and rotated by the position of their first token.
        """
        x, gates = inputs.float().unflatten(0, (-1, spec.every)).chunk(2, 2)
        gates = gates + self.bias
        if spec.overlap:
            if not first:
                x, gates = F.pad(x, PADDED), F.pad(gates, PADDED, value=-torch.inf)
            x, gates = (torch.cat(_of_neighbours(part), 1) for part in (x, gates))
        means = (x * gates.softmax(1)).sum(1).to(inputs.dtype)
        positions = (first + torch.arange(len(means), device=x.device)) * spec.every
        rotation = ops.rotations(self.high, self.low, positions, self.last)
        return turned_last(ops.rms_norm(means, self.weight, self.eps)[:, None], rotation)[:, 0]


PADDED = (0, 0, 0, 0, 1, 0)  # one more entry before the others


def _of_neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [entries + 1, every, 2 dim] -> the first vectors of each entry's tokens and the second ones
    of the next entry's, [entries, every, dim]."""
    first, second = x.chunk(2, 2)
    return first[:-1], second[1:]


@frozen
class AttendCompressed:
    """The inputs of attention in one layer and step (`CompressedSpec`)."""

    q: Tensor  # [tokens, heads, dim], normalised
    k: Tensor  # [tokens, dim], normalised, key and value
    inputs: Tensor | None  # [tokens, channels], of which entries are made; None: there are none
    # Of the indexer: queries [tokens, heads * dim] and weights [tokens, heads]; None: none.
    indexed: tuple[Tensor, Tensor] | None
    rotation: Tensor  # [tokens, rope] fp32, of the last channels of q and k
    spec: CompressedSpec
    makers: tuple[EntryMaker, ...]  # of entries, and of the keys of the indexer
    # The caches of tokens, of entries and of keys of the indexer, each with the layout of its
    # blocks: [blocks, block_size, 1, channels].
    caches: tuple[Tensor, ...]
    layouts: tuple[StepLayout, ...]
    window: int  # most keys of single tokens that a query sees
    scale: float
    sinks: Tensor  # [heads] fp32, as in `AttentionSpec`
    # For `Ops.linear_each`, maps the results of a group of heads to [group_rank].
    down: Matrix
    local_heads: bool  # as in `AttentionSpec`, of the groups

    def of_groups(self, first: int, end: int) -> AttendCompressed:
        """Return attention of some groups of heads; the caches are those of all."""
        size = self.q.shape[1] // self.spec.groups
        heads = slice(first * size, end * size)
        return replace(self, q=self.q[:, heads], sinks=self.sinks[heads])

    def grouped(self, ops: Ops, attended: Tensor) -> Tensor:
        """Map results [tokens, heads, dim] to those of groups, [tokens, groups, group_rank]."""
        results = attended.flatten(1).unflatten(1, (-1, self.down.spec.inputs))
        return ops.linear_each(results, self.down, self.spec.group_rank)

    @property
    def tokens(self) -> Tensor:
        """The vectors of single tokens, [slots, channels]."""
        return self.caches[0].view(-1, self.caches[0].shape[3])

    @property
    def entries(self) -> list[Tensor]:
        """The entries and their keys for the indexer, as far as there are any, [places, dim]."""
        return [each.view(-1, each.shape[3] * ENTRY_TOKENS) for each in self.caches[1:]]


def store_compressed(ops: Ops, of: AttendCompressed) -> None:
    """Write what the step's tokens add to the caches."""
    cache, layout = of.caches[0], of.layouts[0]
    k = turned_last(of.k[:, None], of.rotation).to(cache.dtype)
    rows = k if of.inputs is None else torch.cat((k, of.inputs.to(k.dtype)[:, None]), 2)
    ops.store_kv(rows, rows[..., :0], cache, cache[..., :0], layout.slot_mapping)
    if of.spec.every:
        for seq, length in enumerate(layout.num_scheduled):
            _make_entries(ops, of, seq, layout.contexts[seq] - length)


def attend_compressed(of: AttendCompressed) -> Tensor:
    """Attend over what `store_compressed` has written. Returns [tokens, heads, dim], rotated
    back."""
    layout, dim, stored, entries = of.layouts[0], of.k.shape[1], of.tokens, of.entries
    q, out = turned_last(of.q, of.rotation), torch.empty_like(of.q, dtype=torch.float32)
    chooser = _Chooser(of) if of.indexed is not None else None
    start = 0
    for seq, (length, context) in enumerate(
        zip(layout.num_scheduled, layout.contexts, strict=True)
    ):
        cached, every = context - length, of.spec.every
        begin = max(0, cached - of.window + 1)  # the first token that is read
        recent = stored[layout.slots_of(seq, range(begin, context)), :dim]
        if entries:
            lasts = range(every - 1, context, every)  # tokens
            at = [each.slots_of(seq, lasts) // ENTRY_TOKENS for each in of.layouts[1:]]
            if chooser is not None:
                chooser.keys = entries[1][at[1]].float()
        for token in range(length):
            end = cached + token + 1
            seen = recent[max(0, end - of.window - begin) : end - begin]
            if entries and end >= every:
                places = at[0][: end // every]
                if chooser is not None and len(places) > chooser.top:
                    places = places[chooser(start + token, len(places))]
                seen = torch.cat((seen, entries[0][places]))
            keys = seen.float()
            scores = torch.cat((q[start + token] @ keys.t() * of.scale, of.sinks[:, None]), 1)
            out[start + token] = scores.softmax(1)[:, :-1] @ keys
        start += length
    cos, sin = of.rotation.chunk(2, 1)
    return turned_last(out, torch.cat((cos, -sin), 1)).to(of.q.dtype)


def _make_entries(ops: Ops, of: AttendCompressed, seq: int, cached: int) -> None:
    """Make the entries whose last tokens are after the first `cached` ones of a sequence."""
    layout, spec, first = of.layouts[0], of.spec, cached // of.spec.every
    end = layout.contexts[seq] // spec.every
    if first == end:
        return
    tokens = range(max(0, first - spec.overlap) * spec.every, end * spec.every)
    inputs = of.tokens[layout.slots_of(seq, tokens), of.k.shape[1] :]
    parts = inputs.split([2 * maker.bias.shape[1] for maker in of.makers], 1)
    lasts = range((first + 1) * spec.every - 1, end * spec.every, spec.every)  # tokens
    layouts = of.layouts[1:]
    for maker, part, made, places in zip(of.makers, parts, of.entries, layouts, strict=True):
        at = places.slots_of(seq, lasts) // ENTRY_TOKENS
        made[at] = maker(ops, part, first, spec).to(made.dtype)


class _Chooser:
    """Chooses the entries that tokens read, if they see more than `top`."""

    def __init__(self, of: AttendCompressed) -> None:
        index = of.spec.index
        assert index is not None and of.indexed is not None
        q, weights = of.indexed
        q = turned_last(q.unflatten(1, (index.heads, index.dim)), of.rotation)
        self._q = q.to(of.k.dtype).float()
        self._weights = weights.float() * (index.heads * index.dim) ** -0.5
        self.top = index.top
        self.keys = q.new_empty(0, index.dim)  # [entries, dim] fp32, of a sequence

    def __call__(self, token: int, count: int) -> Tensor:
        """Return which of the first `count` entries a token reads, bool [count]."""
        products = (self.keys[:count] @ self._q[token].t()).t()  # [heads, count]
        return largest(self._weights[token] @ products.relu_(), self.top)


def turned_last(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbours among the last channels of each head, in fp32.

    Args:
        x: [tokens, heads, dim]. rotation: [tokens, rope], as in `Ops.rotary`.
    """
    rest, turned = x.float().split((x.shape[2] - rotation.shape[1], rotation.shape[1]), 2)
    cos, sin = rotation[:, None].chunk(2, 2)
    a, b = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), 3)
    return torch.cat((rest, pairs.flatten(2)), 2)
