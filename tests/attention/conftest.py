"""A step over a paged cache, and the expected result of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from helpers.attention_backends import NAMES, make_backend, one_sequence
from helpers.windows import Seen, as_window, num_sinks, seen
from torch import Tensor

from kvik.attention.base import Attend, AttentionBackend, AttentionSpec, LayerKV
from kvik.attention.layout import StepLayout
from kvik.kernels.kv_rounding import SCALES

SPEC = AttentionSpec(0.3)


@dataclass
class Step:
    """Sequences of (cached, new) tokens, their blocks scattered over a cache full of NaN.

    `keys[i]`, `values[i]` are the whole context of sequence i; the backend has stored only the
    cached part. Entries of the block table beyond a sequence's own blocks name other blocks.
    """

    layout: StepLayout
    kv: LayerKV
    q: Tensor
    k: Tensor
    v: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    spec: AttentionSpec = SPEC
    sink_rotation: Tensor | None = None

    def run(self, backend: AttentionBackend, window: Seen = None) -> Tensor:
        """Run on a copy of the cache, so that a step can be run repeatedly."""
        return backend.run(replace(self.attend(backend, window), kv=self.copied_kv()))

    def copied_kv(self) -> LayerKV:
        """Return a copy of the cache."""
        every = (self.kv.k, self.kv.v, self.kv.k_scales, self.kv.v_scales)
        return LayerKV(*(None if tensor is None else tensor.clone() for tensor in every))

    def check(self, found: Tensor, window: Seen = None, atol: float = 2e-6) -> None:
        torch.testing.assert_close(found.double(), self.expected(window), rtol=1e-4, atol=atol)

    def attend(self, backend: AttentionBackend, window: Seen = None) -> Attend:
        metadata = backend.plan(self.layout, as_window(window))
        inputs = self.q.clone(), self.k.clone(), self.v, self.kv
        return Attend(*inputs, metadata, self.spec, sink_rotation=self.sink_rotation)

    def with_trees(self, *trees: tuple[int, ...]) -> Step:
        """Return the step with a tree, or none, for each of its sequences."""
        every = [
            word
            for tree, new in zip(trees, self.layout.num_scheduled, strict=True)
            for word in tree or (0,) * new
        ]
        layout = replace(self.layout, tree=torch.tensor(every), tree_words=tuple(every))
        return replace(self, layout=layout)

    def with_rotation(self, window: Seen) -> Step:
        """Return the step with a random angle of each token and pair for the window's sinks, if it
        has any."""
        if not num_sinks(0, window):
            return self
        tokens, _, dim = self.q.shape
        angles = torch.rand(tokens, dim // 2, generator=torch.Generator().manual_seed(5)) * 6
        return replace(self, sink_rotation=torch.cat((angles.cos(), angles.sin()), 1))

    @property
    def sink_q(self) -> Tensor:
        """The queries for sinks, float64 if they are rotated for these."""
        return self.q if self.sink_rotation is None else turned(self.q, self.sink_rotation)

    def expected(self, window: Seen = None) -> Tensor:
        """Return the result by definition, one dense matrix per sequence and head, in float64."""
        heads, kv_heads, for_sinks = self.q.shape[1], self.k.shape[1], self.sink_q
        out, start = [], 0
        for new, keys, values in zip(
            self.layout.num_scheduled, self.keys, self.values, strict=True
        ):
            context = len(keys)
            nodes = self.layout.nodes(start, new)
            reach = self.spec.bidirectional
            places = [
                _seen(query, context - new, nodes, window)
                if reach is None
                else (set(range(max(0, query - reach), min(new, query + reach + 1))), set[int]())
                for query in range(new)
            ]
            visible, sunk = (
                torch.tensor([[j in both[i] for j in range(context)] for both in places])
                for i in range(2)
            )
            rows = torch.empty(new, heads, keys.shape[2], dtype=torch.float64)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                of_head = keys[:, shared].double().T
                scores = self.q[start : start + new, head].double() @ of_head
                to_sinks = for_sinks[start : start + new, head].double() @ of_head
                scores = torch.where(sunk, to_sinks, scores)
                scores = scores * self.spec.scale
                if (cap := self.spec.softcap) is not None:
                    scores = cap * torch.tanh(scores / cap)
                if (slopes := self.spec.slopes) is not None:
                    far = _distances(context - new, nodes, new, window)
                    scores = scores + slopes[head].double() * far
                if (table := self.spec.distances) is not None:
                    reach = table.shape[1] // 2
                    for query in range(new):
                        for key in range(context):
                            place = reach + max(-reach, min(reach, key - query))
                            scores[query, key] += table[head, place].double()
                scores = torch.where(visible, scores, -torch.inf)
                if (sinks := self.spec.sinks) is not None:
                    scores = torch.cat((scores, sinks[head].double().expand(new, 1)), 1)
                weights = scores.softmax(-1)[:, :context]
                rows[:, head] = weights @ values[:, shared].double()
            out.append(rows)
            start += new
        return torch.cat(out)[..., : self.spec.value_dim]

    def narrowed(self, value_dim: int) -> Step:
        """Return the step with fewer channels of values."""
        v = self.v[..., :value_dim].contiguous()  # heads are dense
        return replace(self, v=v, spec=replace(self.spec, value_dim=value_dim))


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate x [tokens, heads, dim] by cosines and sines [tokens, dim]."""
    (low, high), (cos, sin) = x.double().chunk(2, -1), rotation[:, None].double().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _seen(
    query: int, cached: int, nodes: tuple[int, ...], window: Seen
) -> tuple[set[int], set[int]]:
    """Return the places of the keys that a query sees, and of the sinks among them."""
    places = [*range(cached)]
    if nodes:
        places += [cached + j for j in range(len(nodes)) if nodes[query] >> j & 1]
    else:
        places += range(cached, cached + query + 1)
    last = len(places) - 1
    return {places[i] for i in seen(last, window)}, set(places[: num_sinks(last, window)])


def _distances(cached: int, nodes: tuple[int, ...], new: int, window: Seen) -> Tensor:
    """Return the positions of all keys relative to those of queries, [new, cached + new], where
    these see them. The keys that a query sees are counted for its distance to sinks."""
    result = torch.zeros(new, cached + new)
    for query in range(new):
        path = [j for j in range(new) if nodes[query] >> j & 1] if nodes else range(query + 1)
        places = [*range(cached), *(cached + j for j in path)]
        last = len(places) - 1
        for position, place in enumerate(places):
            result[query, place] = position - last
        for sink in range(num_sinks(last, window)):
            result[query, places[sink]] = sink - (len(seen(last, window)) - 1)
    return result


MakeStep = Callable[..., Step]


def _poisoned(dtype: torch.dtype, *shape: int) -> LayerKV:
    """Return bytes 0xff, which are NaN or make a scale NaN."""

    def tensor(of: torch.dtype, *shape: int) -> Tensor:
        return torch.full((*shape, of.itemsize), 0xFF, dtype=torch.uint8).view(of).squeeze(-1)

    if dtype not in SCALES:
        return LayerKV(tensor(dtype, *shape), tensor(dtype, *shape))
    places, width = shape[:-1], shape[-1] // (2 if dtype == torch.uint8 else 1)
    numbers = [tensor(dtype, *places, width) for _ in range(2)]
    return LayerKV(*numbers, *(tensor(SCALES[dtype], *places) for _ in range(2)))


def _make_step(
    backend: AttentionBackend,
    sequences: list[tuple[int, int]],
    block_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    value: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    """Return a step.

    Args:
        kv_dtype: of the cache, if not `dtype`.
        value: [context, kv_heads, dim], values of every sequence in place of random ones.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    contexts = [cached + new for cached, new in sequences]
    lengths = [-(-context // block_size) for context in contexts]
    num_blocks = sum(lengths) + 3
    free = (torch.randperm(num_blocks - 1, generator=g) + 1).tolist()
    table = torch.randint(num_blocks, (len(sequences), max(lengths) + 2), generator=g)
    kv = _poisoned(kv_dtype or dtype, num_blocks, block_size, kv_heads, dim)
    keys, values, slots, q = [], [], [], []
    for i, (cached, new) in enumerate(sequences):
        blocks = torch.tensor([free.pop() for _ in range(lengths[i])])
        table[i, : lengths[i]] = blocks
        # Seeded by itself, so that a sequence is the same in any batch.
        g.manual_seed(1000 * seed + contexts[i])
        keys.append(normal(contexts[i], kv_heads, dim))
        values.append(normal(contexts[i], kv_heads, dim) if value is None else value)
        q.append(normal(new, heads, dim))
        positions = torch.arange(contexts[i])
        where = blocks[positions // block_size] * block_size + positions % block_size
        _store(backend, kv, table[i : i + 1], where[:cached], keys[i], values[i])
        slots.append(where[cached:])
    starts = torch.tensor([0] + [new for _, new in sequences]).cumsum(0)
    layout = StepLayout(
        query_start_loc=starts.int(),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        block_table=table.int(),
        slot_mapping=torch.cat(slots),
        num_scheduled=tuple(new for _, new in sequences),
        contexts=tuple(contexts),
        block_size=block_size,
    )
    new_keys = [k[cached:] for k, (cached, _) in zip(keys, sequences, strict=True)]
    new_values = [v[cached:] for v, (cached, _) in zip(values, sequences, strict=True)]
    # Strided views, as from a fused projection.
    qkv = torch.cat((torch.cat(q), torch.cat(new_keys), torch.cat(new_values)), dim=1)
    parts = qkv.split((heads, kv_heads, kv_heads), dim=1)
    return Step(layout, kv, *parts, keys, values)


def _store(
    backend: AttentionBackend,
    kv: LayerKV,
    table: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Write the first keys and values of a context by a prefill, since the order inside a block
    depends on the backend."""
    cached = len(slots)
    if not cached:
        return
    layout = one_sequence(table.int(), slots, cached, kv.k.shape[1])
    k, v = keys[:cached], values[:cached]
    backend.run(
        Attend(torch.zeros_like(k), k, v, kv, backend.plan(layout, None), AttentionSpec(1.0))
    )


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param)


@pytest.fixture
def make_step(backend: AttentionBackend) -> MakeStep:
    """Return a function that makes steps for the backend of the test."""
    return partial(_make_step, backend)
