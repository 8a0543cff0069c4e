"""Captured decoding steps on a CPU: what is captured is called again, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvik.attention.base import Attend, AttentionBackend, AttentionMetadata, LayerKV, StepLayout
from kvik.config.graph_sizes import GraphSize, catching_up_sizes, drafting_sizes
from kvik.spec.kv import Window
from kvik.worker import platforms
from kvik.worker.captures import Captured, GraphMemory
from kvik.worker.cuda_graphs import DecodeGraphs
from kvik.worker.graphs import CapturedRows, EngineNetwork, RowFunction, RowGraph
from kvik.worker.platforms import NativePlatform
from kvik.worker.step_inputs import DeviceInputs, StepSizes

CPU = torch.device("cpu")
ROOMY = 1 << 40


@dataclass
class Again:
    """Captures by remembering what to call."""

    replayed: int = 0
    captured: list[Callable[[], None]] = field(default_factory=list)

    def capture(self, call: Callable[[], None]) -> Captured:
        call()
        self.captured.append(call)

        def replay() -> None:
            self.replayed += 1
            call()

        return Captured(replay, 1, ROOMY)


@dataclass(frozen=True, slots=True)
class Planned(AttentionMetadata):
    real: AttentionMetadata
    tokens: int  # of requests
    written: int  # and of padding


class ByTensors:
    """A backend as it is on a GPU: plain integers only bound what there is, and how much that is
    stands in the tensors. What comes behind is padding, and must be harmless. What attention gives
    tokens of no request is whatever was in memory."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner
        self.caps = inner.caps

    def plan(self, layout: StepLayout, window: Window | None) -> AttentionMetadata:
        lens, starts = layout.seq_lens.tolist(), layout.query_start_loc.tolist()
        rows = sum(length > 0 for length in lens)
        assert not any(lens[rows:]), "requests without keys come last"
        tokens = starts[rows]
        assert (layout.slot_mapping[tokens:] == -1).all(), "padding is stored nowhere"
        assert all(a <= b for a, b in zip(lens, layout.contexts, strict=True))
        queries = tuple(b - a for a, b in pairwise(starts))
        assert len(queries) == len(lens) == len(layout.num_scheduled)
        assert all(0 < a <= b for a, b in zip(queries, layout.num_scheduled, strict=True))
        assert starts[-1] <= len(layout.slot_mapping), "padding has room"
        if not rows:
            return Planned(layout, window, AttentionMetadata(layout, window), 0, starts[-1])
        tree = None if layout.tree is None else layout.tree[:tokens]
        assert tree is None or not layout.tree[tokens:].any(), "padding is no tree"
        rows_of_queries = None
        if layout.state_rows is not None:
            assert (layout.state_rows[rows:] == -1).all(), "padding keeps nothing"
            rows_of_queries = layout.state_rows[:rows]
        firsts = None if layout.first_keys is None else layout.first_keys[:rows]
        real = replace(
            layout,
            query_start_loc=layout.query_start_loc[: rows + 1],
            seq_lens=layout.seq_lens[:rows],
            block_table=layout.block_table[:rows],
            slot_mapping=layout.slot_mapping[:tokens],
            num_scheduled=queries[:rows],
            contexts=tuple(lens[:rows]),
            tree=tree,
            tree_words=() if tree is None else tuple(tree.tolist()),
            state_rows=rows_of_queries,
            first_keys=firsts,
            firsts=() if firsts is None else tuple(firsts.tolist()),
        )
        return Planned(layout, window, self.inner.plan(real, window), tokens, starts[-1])

    def run(self, attend: Attend) -> Tensor:
        metadata = attend.metadata
        assert isinstance(metadata, Planned)
        out, some = torch.zeros_like(attend.q), slice(metadata.tokens)
        out[metadata.written :] = torch.nan
        if metadata.tokens:
            real = replace(
                attend,
                q=attend.q[some],
                k=None if attend.k is None else attend.k[some],
                v=None if attend.v is None else attend.v[some],
                metadata=metadata.real,
                rotation=None if attend.rotation is None else attend.rotation[some],
            )
            out[some] = self.inner.run(real)
        return out

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        self.inner.move(kv, source, target)

    def keys(self, kv: LayerKV, at: Tensor) -> Tensor:
        return self.inner.keys(kv, at)


@contextmanager
def captured_steps(
    *rows: int, drafts: int = 0, heads: list[Again] | None = None
) -> Iterator[list[tuple[DecodeGraphs, Again]]]:
    """Engines with native kernels that are made within capture decoding steps of so many requests;
    with drafts, all at once, and also those of up to so many drafts of each. The forwards of each
    engine, and after those the ones of its draft model; `heads` gets those of draft heads."""
    made: list[tuple[DecodeGraphs, Again]] = []

    def graph(
        self: NativePlatform,
        network: EngineNetwork,
        most: StepSizes,
        *,
        trees: bool = False,
        drafts: bool = False,
    ) -> tuple[DecodeGraphs, DeviceInputs]:
        again, seqs = Again(), max(rows)
        sizes = [GraphSize(n, n, 1, n) for n in rows]
        if drafts:
            sizes += catching_up_sizes(seqs, most.tokens)
        elif judged:
            sizes += drafting_sizes(seqs, judged, most.samples - most.seqs, tree=trees)
        sizes = [size for size in sizes if size.rows <= most.seqs and size.tokens <= most.tokens]
        inputs = DeviceInputs(most, len(network.groups), self._max_blocks, CPU, sizes, trees=trees)
        context = self._max_blocks * self._block_size
        graphs = DecodeGraphs(
            network,
            inputs,
            again,
            sizes,
            self._block_size,
            context,
            lambda: 0.0,
            GraphMemory(ROOMY, 0),
        )
        made.append((graphs, again))
        while judged and graphs.rest():
            pass
        return graphs, inputs

    def rows_graph(self: NativePlatform, function: RowFunction, like: Sequence[Tensor]) -> RowGraph:
        again = Again()
        graph = CapturedRows(function, like, rows, again, lambda: 0.0, GraphMemory(ROOMY, 0))
        if heads is not None:
            heads.append(again)
        while graph.rest():
            pass
        return graph

    judged, select = drafts, platforms.select_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "select_backend", lambda *facts: ByTensors(select(*facts)))
        patch.setattr(NativePlatform, "graph", graph)
        patch.setattr(NativePlatform, "rows", rows_graph)
        yield made
