"""Indexers, by every backend, compared with their definition in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.attention_backends import KV_FORMATS, NAMES, as_bits, make_backend, one_sequence
from helpers.indexed import CASES, SPECS, Texts, check_choice
from torch import Tensor

from kvik.attention.base import Attend, AttentionSpec
from kvik.attention.indexed import Choice
from kvik.kernels.kv_rounding import round_vectors, unround_vectors
from kvik.nn.kv_formats import allocate_kv
from kvik.spec.kv import KVCacheSpec, group_layers, stored_as


@pytest.mark.each(6)  # a backend reads the keys of a case, a spec says which are chosen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("case", "spec"),
    [
        pytest.param(case, spec, marks=[pytest.mark.full] if case == "long" else [])
        for case, spec in product(CASES, SPECS)
        if case != "tree" or not SPECS[spec].pool
    ],
)
def test_the_largest_scores_are_chosen(case: str, spec: str, name: str, dtype: torch.dtype) -> None:
    check_choice(case, make_backend(name), dtype, SPECS[spec])


@pytest.mark.parametrize("spec", ["halves", "blocks", "pools"])
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_does_not_depend_on_chunks(name: str, spec: str) -> None:
    make = make_backend(name)
    whole = Texts([70], backend=make, spec=SPECS[spec]).step([(0, 70)])
    texts, chunked = Texts([70], backend=make, spec=SPECS[spec]), []
    for first, end in ((0, 5), (5, 12), (12, 13), (13, 70)):
        chunked += texts.step([(first, end - first)])
    for pair in zip(whole, chunked, strict=True):
        assert all(torch.equal(*heads) for heads in zip(*pair, strict=True))


HEADS, KV_HEADS, DIM, BLOCK, SCALE = 6, 2, 32, 16, 0.2
TREE = (0b1, 0b11, 0b101, 0b1011)
# (cached, new) tokens of a sequence; those of the last one are a tree.
READERS = {"decode": (300, 1), "prompt": (0, 70), "chunk": (30, 20), "tree": (33, len(TREE))}


@pytest.mark.parametrize(
    ("name", "case", "format"),
    [*product(NAMES, READERS, ("fp32",)), *product(NAMES, ("chunk", "tree"), KV_FORMATS)],
)
def test_kv_heads_read_keys_of_their_own(name: str, case: str, format: str) -> None:
    backend, (cached, new) = make_backend(name), READERS[case]
    context, g = cached + new, torch.Generator().manual_seed(new)
    groups = group_layers(stored_as([KVCacheSpec(KV_HEADS, DIM, 0)], format))
    table = torch.randperm(-(-context // BLOCK), generator=g).int()
    (kv,) = allocate_kv(groups, len(table), BLOCK, torch.float32, torch.device("cpu")).layers
    q = torch.randn(context, HEADS, DIM, generator=g)
    k, v = torch.randn(2, context, KV_HEADS, DIM, generator=g)
    place = torch.arange(context)
    slots = table[place // BLOCK].long() * BLOCK + place % BLOCK
    visible = torch.ones(new, context, dtype=torch.bool).tril(cached)
    tree = TREE if case == "tree" else ()
    if tree:
        visible[:, cached:] = (torch.tensor(tree)[:, None] >> torch.arange(new) & 1).bool()
    reads = visible[:, None] & (torch.rand(new, KV_HEADS, context, generator=g) < 0.4)
    reads[torch.arange(new), :, place[cached:]] = True  # at least one key

    def attend(first: int, end: int, words: tuple[int, ...] = ()) -> Attend:
        layout = one_sequence(table[None], slots[first:end], end)
        if words:
            layout = replace(layout, tree=torch.tensor(words), tree_words=words)
        parts = (x[first:end].clone() for x in (q, k, v))
        return Attend(*parts, kv, backend.plan(layout, None), AttentionSpec(SCALE))

    if cached:
        backend.run(attend(0, cached))
    last = attend(cached, context, tree)
    choice: Choice = [[of_head.nonzero()[:, 0] for of_head in token] for token in reads]
    if name == "cpu":
        of_heads = zip(*choice, strict=True)
        choice = [torch.stack([as_bits([*c], last.metadata.layout) for c in of_heads], 1)]
    found = backend.run_by_head(last, choice)
    group = HEADS // KV_HEADS
    keys, values = (stored(x, KV_FORMATS[format]).repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q[cached:].double(), keys) * SCALE
    shares = scores.masked_fill(~reads.repeat_interleave(group, 1), -torch.inf).softmax(2)
    right = torch.einsum("qhk,khd->qhd", shares, values)
    rtol, atol = (1e-4, 5e-6) if format == "fp32" else (2e-3, 2e-4)
    torch.testing.assert_close(found.double(), right, rtol=rtol, atol=atol)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a cache holds of x, in float64."""
    if dtype.itemsize > 1:
        return x.to(dtype).double()
    return unround_vectors(*round_vectors(x, dtype)).double()
