"""Texts for an indexer, and its definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from helpers.attention_backends import (
    PARENTS,
    STEPS,
    from_bits,
    placed,
    places_chosen,
    seen_by_token,
    tree_words,
)
from torch import Tensor

from kvik.attention.base import AttentionBackend, LayerKV
from kvik.attention.indexed import Indexed
from kvik.attention.layout import StepLayout
from kvik.spec.kv import IndexSpec

HEADS, DIM, ROPE, TOP, BLOCK = 8, 24, 8, 11, 16
SPECS = {
    "halves": IndexSpec(HEADS, DIM, TOP),
    "neighbours": IndexSpec(HEADS, DIM, TOP, interleaved=True),
    "blocks": IndexSpec(HEADS, DIM, 3 * 8, span=8, local=1),
    "strips": IndexSpec(HEADS, DIM, 3 * 16, span=16, local=1),  # by vectors in whole tiles
    "large blocks": IndexSpec(HEADS, DIM, 2 * 128, span=128, local=2),
    "pairs": IndexSpec(HEADS, DIM, 6 * 2, span=2),
    "pools": IndexSpec(HEADS, DIM, 3 * 4, pool=4),
    "odd pools": IndexSpec(HEADS, DIM, 2 * 7, pool=7),
}
TREE = tree_words(PARENTS)
CASES = {**STEPS, "tree": [(20, 1), (33, len(TREE))], "long": [(1500, 1), (0, 70), (1100, 5)]}


def layout_of(
    tables: Sequence[Tensor], spans: Sequence[tuple[int, int]], block_size: int
) -> StepLayout:
    """Return the layout of a step with the blocks and the (cached, new) tokens of each sequence."""
    table = torch.zeros(len(spans), max(map(len, tables)), dtype=torch.int32)
    slots = []
    for row, blocks, (cached, new) in zip(table, tables, spans, strict=True):
        row[: len(blocks)] = blocks
        at = torch.arange(cached, cached + new)
        slots.append(blocks[at // block_size].long() * block_size + at % block_size)
    counts = [new for _, new in spans]
    return StepLayout(
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor([sum(span) for span in spans], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.cat(slots),
        num_scheduled=tuple(counts),
        contexts=tuple(map(sum, spans)),
        block_size=block_size,
    )


class Texts:
    """What an indexer computes of the tokens of some sequences, and where their keys are cached."""

    def __init__(
        self,
        contexts: list[int],
        *,
        backend: AttentionBackend,
        spec: IndexSpec = SPECS["halves"],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.backend, self.dtype, self.spec = backend, dtype, spec
        g = torch.Generator().manual_seed(len(contexts))
        self.q = [torch.randn(n, HEADS * DIM, generator=g).to(dtype) for n in contexts]
        self.k = [torch.randn(n, spec.stored, generator=g).to(dtype) for n in contexts]
        self.bias = torch.randn(spec.pool, DIM, generator=g) if spec.pool else None
        self.weights = [torch.randn(n, HEADS, generator=g).to(dtype) for n in contexts]
        self.angles = [torch.randn(n, ROPE // 2, generator=g) for n in contexts]
        counts = [-(-n // BLOCK) for n in contexts]
        self.tables = torch.randperm(sum(counts), generator=g).int().split(counts)
        none = torch.zeros(sum(counts), BLOCK, 1, 0)
        index = torch.full((sum(counts), BLOCK, 1, spec.stored), torch.nan, dtype=dtype)
        self.kv = placed(LayerKV(none, none, index=index), backend)

    def step(self, spans: list[tuple[int, int]], words: tuple[int, ...] = ()) -> list[list[Tensor]]:
        """Store the keys of the new tokens of each sequence, and return what they choose, for each
        head that chooses.

        Args:
            spans: (cached, new) tokens. words: of the tree in the last sequence.
        """
        num_tokens = sum(new for _, new in spans)
        in_tree = (*[0] * (num_tokens - len(words)), *words) if words else ()
        layout = replace(
            layout_of(self.tables, spans, BLOCK),
            tree=torch.tensor(in_tree) if in_tree else None,
            tree_words=in_tree,
        )
        angles = self.new(self.angles, spans)
        rotation = None if self.spec.pool else torch.cat((angles.cos(), angles.sin()), 1)
        q, k, weights = (self.new(part, spans) for part in (self.q, self.k, self.weights))
        of = Indexed(self.spec, q, k, None if self.spec.span else weights, rotation, self.bias)
        choice = self.backend.choose(*placed((of, self.kv, layout), self.backend))
        heads = HEADS if self.spec.span else 1
        if not choice:
            return [[seen] * heads for seen in seen_by_token(layout)]
        if not self.spec.span:
            return [[places] for places in places_chosen(choice, layout, self.backend)]
        if self.backend.caps.name == "cpu":
            each = (from_bits(choice[0][:, head], layout) for head in range(heads))
            return [list(of_token) for of_token in zip(*each, strict=True)]
        return [[places.cpu() for places in of_token] for of_token in choice]

    @staticmethod
    def new(parts: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
        pairs = zip(parts, spans, strict=True)
        return torch.cat([part[cached : cached + new] for part, (cached, new) in pairs])

    def scores(self, seq: int) -> Tensor:
        """Return the score of each key, or whole pool, for each query of a sequence, by definition,
        [queries, 1 or heads, keys]."""
        q = self.q[seq].view(-1, HEADS, DIM).double()
        k, turns = self.k[seq][:, None].double(), torch.polar(*self._unit(seq))
        if self.bias is not None:
            whole = k[: len(k) // self.spec.pool * self.spec.pool]
            k, gates = whole.unflatten(0, (-1, self.spec.pool)).chunk(2, 3)
            k = (k * (gates + self.bias[:, None]).softmax(1)).sum(1).to(self.dtype).double()
        else:
            q, k = (self._turned(x, turns).to(self.dtype).double() for x in (q, k))
        products = torch.einsum("qhd,kd->qhk", q, k[:, 0]) / DIM**0.5
        if self.spec.span:
            return products
        weights = self.weights[seq].double() / HEADS**0.5
        return torch.einsum("qh,qhk->qk", weights, products.relu())[:, None]

    def right(self, scores: Tensor) -> Tensor:
        """Return the places of the keys that a head chooses, by its scores of the keys that a query
        sees, in their order."""
        spec = self.spec
        if spec.pool:
            pools = len(scores) // spec.pool
            best = scores[:pools].topk(min(spec.top // spec.pool, pools)).indices.sort().values
            whole = best[:, None] * spec.pool + torch.arange(spec.pool)
            return torch.cat((whole.flatten(), torch.arange(pools * spec.pool, len(scores))))
        if not spec.span:
            return scores.topk(min(spec.top, len(scores))).indices.sort().values
        blocks = scores.split(spec.span)
        best = torch.stack([block.max() for block in blocks])
        best[len(best) - min(spec.local, len(best)) :] = torch.inf
        chosen = best.topk(min(spec.top // spec.span, len(best))).indices.sort().values
        places = torch.arange(len(scores)).split(spec.span)
        return torch.cat([places[block] for block in chosen])

    def _unit(self, seq: int) -> tuple[Tensor, Tensor]:
        angles = self.angles[seq].double()
        return torch.ones_like(angles), angles

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = x[..., :ROPE].unflatten(-1, (-1, 2) if self.spec.interleaved else (2, -1))
        pairs = pairs if self.spec.interleaved else pairs.transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns[:, None])
        return torch.cat((turned.flatten(-2), x[..., ROPE:]), -1)


def check_choice(
    case: str,
    backend: AttentionBackend,
    dtype: torch.dtype,
    spec: IndexSpec = SPECS["halves"],
    before: AttentionBackend | None = None,
) -> None:
    """Check what each new token of a case of `CASES` reads, against the definition.

    Args:
        before: stores the keys of earlier tokens; None: `backend`.
    """
    spans, words = CASES[case], TREE if case == "tree" else ()
    texts = Texts([*map(sum, spans)], backend=backend, spec=spec, dtype=dtype)
    if any(cached for cached, _ in spans):
        texts.backend = before or backend
        texts.step([(0, cached) for cached, _ in spans])
        texts.backend = backend
    found = iter(texts.step(spans, words))
    for seq, (cached, new) in enumerate(spans):
        visible = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
        if words and seq + 1 == len(spans):
            visible[:, cached:] = torch.tensor(words)[:, None] >> torch.arange(new) & 1
        for of_heads, seen in zip(texts.scores(seq)[cached:], visible, strict=True):
            places = seen.nonzero()[:, 0]
            # One score for each whole pool: the others are not read.
            padded = torch.nn.functional.pad(of_heads, (0, len(seen) - of_heads.shape[1]))
            for scores, chosen in zip(padded, next(found), strict=True):
                assert torch.equal(chosen, places[texts.right(scores[places])])
    assert next(found, None) is None
