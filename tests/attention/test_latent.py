"""Attention over latent vectors: every backend compared with its definition, in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers.attention_backends import KV_FORMATS, NAMES, STEPS, chosen_by, make_backend
from helpers.kernel_cases import filled_matrix
from helpers.optional_triton import NO_TRITON, TRITON, device
from torch import Tensor

from kvik.attention.base import AttendLatent, AttentionBackend, AttentionSpec, LatentUp, LayerKV
from kvik.attention.fresh_prompts import FreshPrompts
from kvik.attention.indexed import Choice
from kvik.attention.layout import StepLayout
from kvik.kernels.kv_rounding import round_vectors, unround_vectors
from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import rotary
from kvik.kernels.weights import Matrix, float_weight
from kvik.nn.kv_formats import allocate_kv
from kvik.nn.parts import head_rows
from kvik.spec.kv import KVCacheSpec, group_layers, stored_as

HEADS, RANK, ROPE, NOPE, VALUE, BLOCK = 6, 32, 16, 24, 20, 16
SCALE = 0.25
TREE = (0b1, 0b11, 0b101, 0b1011)
# (cached, new) tokens of each sequence; the new ones of the last sequence are a tree.
CASES = {**STEPS, "tree": [(20, 1), (33, 4)]}


def backend_of(name: str) -> AttentionBackend:
    """Return a backend; of "triton+sdpa", torch takes fresh prompts of 5 tokens and more."""
    backend: Any = make_backend(name.removesuffix("+sdpa"))
    if name == "triton+sdpa":
        backend.prompts = FreshPrompts(5, padded=8)
    return backend


def weights() -> tuple[Tensor, Tensor]:
    """Return weights of all heads: from queries to latent space, [heads, rank, nope], and from
    latent space to values, [heads, value, rank]."""
    g = torch.Generator().manual_seed(3)
    keys = torch.randn(HEADS, RANK, NOPE, generator=g) / NOPE**0.5
    return keys, torch.randn(HEADS, VALUE, RANK, generator=g) / RANK**0.5


def up_of(ops: Ops, where: torch.device) -> LatentUp:
    def matrix(weight: Tensor) -> Matrix:
        rows = torch.zeros(HEADS, head_rows(weight.shape[1]), weight.shape[2], device=where)
        rows[:, : weight.shape[1]] = weight
        return filled_matrix(ops, float_weight(rows.flatten(0, 1)), None, None, torch.float32)

    keys, values = weights()
    return LatentUp(matrix(keys), matrix(values), RANK, VALUE)


class Sequences:
    """The inputs of some sequences for one layer, and a cache for them."""

    def __init__(self, sequences: list[tuple[int, int]], kv: LayerKV, where: torch.device) -> None:
        g = torch.Generator().manual_seed(len(sequences))
        self.sequences, self.kv, self.where = sequences, kv, where
        contexts = [cached + new for cached, new in sequences]
        self.q = [torch.randn(n, HEADS, NOPE + ROPE, generator=g) for n in contexts]
        self.rows = [torch.randn(n, RANK + ROPE, generator=g) for n in contexts]
        angles = [torch.randn(n, ROPE // 2, generator=g) for n in contexts]
        self.rotations = [torch.cat((a.cos(), a.sin()), 1) for a in angles]
        blocks = [-(-n // BLOCK) for n in contexts]
        free = torch.randperm(len(kv.k), generator=g).int()
        self.tables = free[: sum(blocks)].split(blocks)

    def run(
        self,
        backend: AttentionBackend,
        *,
        tree: bool,
        choice: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Compute the cached tokens in a separate step, and return the results of the new tokens,
        which read the keys of `choice`."""
        if any(cached for cached, _ in self.sequences):
            self.step(backend, [(0, cached) for cached, _ in self.sequences], tree=False)
        return self.step(backend, self.sequences, tree=tree, choice=choice)

    def step(
        self,
        backend: AttentionBackend,
        spans: list[tuple[int, int]],
        *,
        tree: bool,
        choice: list[Tensor] | None = None,
    ) -> list[Tensor]:
        taken = [i for i, (_, new) in enumerate(spans) if new]
        parts = [(i, slice(spans[i][0], sum(spans[i]))) for i in taken]
        counts = [spans[i][1] for i in taken]
        table = torch.zeros(len(taken), max(len(t) for t in self.tables) + 1, dtype=torch.int32)
        slots = []
        for row, (i, own) in zip(table, parts, strict=True):
            row[: len(self.tables[i])] = self.tables[i]
            at = torch.arange(own.start, own.stop)
            slots.append(self.tables[i][at // BLOCK].long() * BLOCK + at % BLOCK)
        words = (*[0] * (sum(counts) - len(TREE)), *TREE) if tree else ()

        def there(x: Tensor) -> Tensor:
            return x.to(self.where)

        layout = StepLayout(
            query_start_loc=there(torch.tensor([0, *counts]).cumsum(0).int()),
            seq_lens=there(torch.tensor([own.stop for _, own in parts], dtype=torch.int32)),
            block_table=there(table),
            slot_mapping=there(torch.cat(slots)),
            num_scheduled=tuple(counts),
            contexts=tuple(own.stop for _, own in parts),
            block_size=BLOCK,
            tree=there(torch.tensor(words)) if tree else None,
            tree_words=words,
        )
        q = there(torch.cat([self.q[i][own] for i, own in parts]))
        rows = there(torch.cat([self.rows[i][own] for i, own in parts]))
        q, q_rope = (part.clone() for part in q.split((NOPE, ROPE), 2))
        latent, k_rope = (part.clone() for part in rows.split((RANK, ROPE), 1))
        rotation = there(torch.cat([self.rotations[i][own] for i, own in parts]))
        metadata, spec = backend.plan(layout, None), AttentionSpec(SCALE)
        up, k_rope = up_of(backend._ops, self.where), k_rope[:, None]
        chosen: Choice | None = None
        if choice is not None:
            chosen = chosen_by(backend, choice, layout)
        out = backend.run_latent(
            AttendLatent(q, q_rope, latent, k_rope, up, self.kv, metadata, spec, rotation, chosen)
        )
        assert out.shape == (sum(counts), HEADS, VALUE)
        return list(out.cpu().split(counts))

    def visible(self, *, tree: bool) -> list[Tensor]:
        """Return which keys the new tokens of each sequence see, [new, cached + new] bool."""
        masks = []
        for i, (cached, new) in enumerate(self.sequences):
            visible = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
            if tree and i + 1 == len(self.sequences):
                among = torch.tensor(TREE)[:, None] >> torch.arange(new) & 1
                visible[:, cached:] = among.bool()
            masks.append(visible)
        return masks

    def expected(self, dtype: torch.dtype, masks: list[Tensor]) -> list[Tensor]:
        """Return the results by definition.

        Args:
            dtype: of the cache. masks: which keys are read, as from `visible`.
        """
        found = []
        for i, (cached, _) in enumerate(self.sequences):
            q_rope, k_rope = rotary(
                self.q[i][..., NOPE:], self.rows[i][:, None, RANK:], self.rotations[i]
            )
            q = torch.cat((self.q[i][..., :NOPE], q_rope), 2)[cached:].double()
            rows = torch.cat((self.rows[i][:, :RANK], k_rope[:, 0]), 1)
            stored = rows.to(dtype) if dtype.itemsize > 1 else None
            rows = unround_vectors(*round_vectors(rows, dtype)) if stored is None else stored
            rows = rows.double()
            to_keys, to_values = (weight.double() for weight in weights())
            keys = torch.einsum("kr,hrn->khn", rows[:, :RANK], to_keys)
            keys = torch.cat((keys, rows[:, None, RANK:].expand(-1, HEADS, -1)), 2)
            values = torch.einsum("kr,hvr->khv", rows[:, :RANK], to_values)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * SCALE
            shares = scores.masked_fill(~masks[i], -torch.inf).softmax(2)
            found.append(torch.einsum("hqk,khv->qhv", shares, values))
        return found


def allocated(sequences: list[tuple[int, int]], format: str, where: torch.device) -> LayerKV:
    """Return a cache for some sequences, with two further blocks."""
    spec = KVCacheSpec(1, RANK + ROPE, 0, latent=True)
    blocks = sum(-(-(cached + new) // BLOCK) for cached, new in sequences) + 2
    groups = group_layers(stored_as([spec], format))
    (kv,) = allocate_kv(groups, blocks, BLOCK, torch.float32, where).layers
    return kv


# Triton's cache has floats, and its interpreter is slow.
TRIALS = [
    *product(NAMES, CASES, ("fp32",)),
    *product(NAMES, ("mixed", "tree"), ("int8", "bf16", "fp8")),
    *(("triton", case, "fp32") for case in ("chunk behind a prefix", "tree")),
    ("triton", "decode", "bf16"),
    *(("triton+sdpa", case, "fp32") for case in ("prefill batch", "tree")),
    *(
        pytest.param(name, "mixed", "fp32", marks=pytest.mark.full)
        for name in ("triton", "triton+sdpa")
    ),
]


@pytest.mark.parametrize(("name", "case", "format"), TRIALS)
def test_matches_the_definition(name: str, case: str, format: str) -> None:
    backend = backend_of(name)
    where = device() if name.startswith("triton") else torch.device("cpu")
    kv = allocated(CASES[case], format, where)
    assert kv.v.numel() == 0
    sequences, tree = Sequences(CASES[case], kv, where), case == "tree"
    masks = sequences.visible(tree=tree)
    check(sequences.run(backend, tree=tree), sequences.expected(KV_FORMATS[format], masks), format)


def check(found: list[Tensor], expected: list[Tensor], format: str) -> None:
    exact = format == "fp32"
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(
            got.double(), right, rtol=1e-4 if exact else 1e-3, atol=5e-6 if exact else 1e-4
        )


@pytest.mark.parametrize(
    ("name", "case", "format"),
    [
        *product(NAMES, ("mixed", "tree"), ("fp32", "int8")),
        *(("cpu", "mixed", format) for format in ("fp8", "bf16") if "cpu" in NAMES),
        *(("triton", case, "fp32") for case in ("mixed", "tree")),
    ],
)
def test_only_chosen_keys_are_read(name: str, case: str, format: str) -> None:
    backend = backend_of(name)
    where = device() if name.startswith("triton") else torch.device("cpu")
    kv, tree = allocated(CASES[case], format, where), case == "tree"
    sequences = Sequences(CASES[case], kv, where)
    g = torch.Generator().manual_seed(1)
    masks = sequences.visible(tree=tree)
    for mask in masks:
        own = torch.arange(len(mask)), torch.arange(mask.shape[1] - len(mask), mask.shape[1])
        mask.logical_and_(torch.rand(mask.shape, generator=g) < 0.4)
        mask[own] = True  # at least one
    choice = [row.nonzero()[:, 0] for mask in masks for row in mask]
    found = sequences.run(backend, tree=tree, choice=choice)
    check(found, sequences.expected(KV_FORMATS[format], masks), format)


@pytest.mark.skipif(not TRITON, reason=NO_TRITON)
@pytest.mark.parametrize(
    ("case", "taken"),
    [
        ("prefill batch", [70, 16]),
        pytest.param("mixed", [9], marks=pytest.mark.full),
        ("decode", []),
    ],
)
def test_keys_and_values_are_only_made_for_fresh_prompts(
    case: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    make = FreshPrompts.attend_latent

    def noted(*args: Any) -> Tensor:
        found.append(args[-1].end - args[-1].start)
        return make(*args)

    kv = allocated(CASES[case], "fp32", device())
    sequences = Sequences(CASES[case], kv, device())
    backend = backend_of("triton+sdpa")
    if any(cached for cached, _ in sequences.sequences):
        sequences.step(backend, [(0, cached) for cached, _ in sequences.sequences], tree=False)
    monkeypatch.setattr(FreshPrompts, "attend_latent", noted)
    sequences.step(backend, sequences.sequences, tree=False)
    assert found == taken
