"""Indexers, compared with their definition in float64."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_backends import PARENTS, STEPS, tree_words
from torch import Tensor

from kvik.attention.indexed import Indexed, choose_keys, index_keys
from kvik.attention.layout import StepLayout
from kvik.kernels.reference.ops import REFERENCE
from kvik.spec.kv import IndexSpec

HEADS, DIM, ROPE, TOP, BLOCK = 8, 24, 8, 11, 16
TREE = tree_words(PARENTS)
CASES = {**STEPS, "tree": [(20, 1), (33, len(TREE))]}


class Texts:
    """What an indexer computes of the tokens of some sequences, and where their keys are cached."""

    def __init__(self, contexts: list[int], *, interleaved: bool) -> None:
        g = torch.Generator().manual_seed(len(contexts))
        self.spec = IndexSpec(HEADS, DIM, TOP, interleaved)
        self.q = [torch.randn(n, HEADS * DIM, generator=g) for n in contexts]
        self.k = [torch.randn(n, DIM, generator=g) for n in contexts]
        self.weights = [torch.randn(n, HEADS, generator=g) for n in contexts]
        self.angles = [torch.randn(n, ROPE // 2, generator=g) for n in contexts]
        counts = [-(-n // BLOCK) for n in contexts]
        self.tables = torch.randperm(sum(counts), generator=g).int().split(counts)
        self.cache = torch.full((sum(counts), BLOCK, 1, DIM), torch.nan)

    def step(self, spans: list[tuple[int, int]], words: tuple[int, ...] = ()) -> list[Tensor]:
        """Store the keys of the new tokens of each sequence, and return what they choose.

        Args:
            spans: (cached, new) tokens. words: of the tree in the last sequence.
        """
        table = torch.zeros(len(spans), max(map(len, self.tables)), dtype=torch.int32)
        slots = []
        for row, blocks, (cached, new) in zip(table, self.tables, spans, strict=True):
            row[: len(blocks)] = blocks
            at = torch.arange(cached, cached + new)
            slots.append(blocks[at // BLOCK].long() * BLOCK + at % BLOCK)
        counts = [new for _, new in spans]
        layout = StepLayout(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor([sum(span) for span in spans], dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.cat(slots),
            num_scheduled=tuple(counts),
            contexts=tuple(map(sum, spans)),
            block_size=BLOCK,
            tree_words=(*[0] * (sum(counts) - len(words)), *words) if words else (),
        )
        angles = self.new(self.angles, spans)
        rotation = torch.cat((angles.cos(), angles.sin()), 1)
        parts = (self.new(part, spans) for part in (self.q, self.k, self.weights))
        of = Indexed(self.spec, *parts, rotation)
        index_keys(REFERENCE, of, self.cache, layout)
        return choose_keys(of, self.cache, layout)

    @staticmethod
    def new(parts: list[Tensor], spans: list[tuple[int, int]]) -> Tensor:
        pairs = zip(parts, spans, strict=True)
        return torch.cat([part[cached : cached + new] for part, (cached, new) in pairs])

    def scores(self, seq: int) -> Tensor:
        """Return the score of each key for each query of a sequence, by definition."""
        q = self.q[seq].view(-1, HEADS, DIM).double()
        k, turns = self.k[seq][:, None].double(), torch.polar(*self._unit(seq))
        q, k = (self._turned(x, turns) for x in (q, k))
        products = torch.einsum("qhd,kd->qhk", q, k[:, 0]) / DIM**0.5
        weights = self.weights[seq].double() / HEADS**0.5
        return torch.einsum("qh,qhk->qk", weights, products.relu())

    def _unit(self, seq: int) -> tuple[Tensor, Tensor]:
        angles = self.angles[seq].double()
        return torch.ones_like(angles), angles

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = x[..., :ROPE].unflatten(-1, (-1, 2) if self.spec.interleaved else (2, -1))
        pairs = pairs if self.spec.interleaved else pairs.transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns[:, None])
        return torch.cat((turned.flatten(-2), x[..., ROPE:]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_largest_scores_are_chosen(case: str, interleaved: bool) -> None:
    spans, words = CASES[case], TREE if case == "tree" else ()
    texts = Texts([*map(sum, spans)], interleaved=interleaved)
    if any(cached for cached, _ in spans):
        texts.step([(0, cached) for cached, _ in spans])
    chosen = texts.step(spans, words)
    if max(map(sum, spans)) <= TOP:
        assert not chosen  # each reads all that it sees
        return
    found = iter(chosen)
    for seq, (cached, new) in enumerate(spans):
        visible = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
        if words and seq + 1 == len(spans):
            visible[:, cached:] = torch.tensor(words)[:, None] >> torch.arange(new) & 1
        scores = texts.scores(seq)[cached:].masked_fill(~visible, -torch.inf)
        for row, seen in zip(scores, visible, strict=True):
            right = row.topk(min(TOP, int(seen.sum()))).indices.sort().values
            assert torch.equal(next(found), right)
    assert next(found, None) is None


def test_a_choice_does_not_depend_on_chunks() -> None:
    whole = Texts([70], interleaved=False).step([(0, 70)])
    texts, chunked = Texts([70], interleaved=False), []
    for first, end in ((0, 5), (5, 12), (12, 13), (13, 70)):
        chosen = texts.step([(first, end - first)])
        chunked += chosen or [torch.arange(place + 1) for place in range(first, end)]
    assert all(torch.equal(*pair) for pair in zip(whole, chunked, strict=True))
