"""Captured decoding steps on a CPU: what is captured is called again, on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend, AttentionMetadata, LayerKV, StepLayout
from kvik.worker import platforms
from kvik.worker.cuda_graphs import DecodeGraphs
from kvik.worker.device_inputs import DeviceInputs
from kvik.worker.graphs import Network
from kvik.worker.platforms import NativePlatform
from kvik.worker.step_inputs import StepSizes

CPU = torch.device("cpu")


@dataclass
class Again:
    """Captures by remembering what to call."""

    replayed: int = 0
    captured: list[Callable[[], None]] = field(default_factory=list)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        self.captured.append(call)

        def replay() -> None:
            self.replayed += 1
            call()

        return replay


@dataclass(frozen=True, slots=True)
class Planned(AttentionMetadata):
    real: AttentionMetadata
    tokens: int


class ByTensors:
    """A backend as it is on a GPU: plain integers only bound what there is, and how much that is
    stands in the tensors. What comes behind is padding, and must be harmless."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner
        self.caps = inner.caps

    def plan(self, layout: StepLayout, window: int | None) -> AttentionMetadata:
        lens, starts = layout.seq_lens.tolist(), layout.query_start_loc.tolist()
        rows = sum(length > 0 for length in lens)
        assert not any(lens[rows:]), "requests without keys come last"
        tokens = starts[rows]
        assert (layout.slot_mapping[tokens:] == -1).all(), "padding is stored nowhere"
        assert all(a <= b for a, b in zip(lens, layout.contexts, strict=True))
        queries = tuple(b - a for a, b in pairwise(starts))
        assert queries == layout.num_scheduled
        if not rows:
            return Planned(layout, window, AttentionMetadata(layout, window), 0)
        real = replace(
            layout,
            query_start_loc=layout.query_start_loc[: rows + 1],
            seq_lens=layout.seq_lens[:rows],
            block_table=layout.block_table[:rows],
            slot_mapping=layout.slot_mapping[:tokens],
            num_scheduled=queries[:rows],
            contexts=tuple(lens[:rows]),
        )
        return Planned(layout, window, self.inner.plan(real, window), tokens)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        metadata: AttentionMetadata,
        scale: float,
        rotation: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, Planned)
        out, some = torch.zeros_like(q), slice(metadata.tokens)
        if metadata.tokens:
            turn = None if rotation is None else rotation[some]
            out[some] = self.inner.run(q[some], k[some], v[some], kv, metadata.real, scale, turn)
        return out

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        self.inner.move(kv, source, target)


@contextmanager
def captured_steps(*sizes: int) -> Iterator[list[tuple[DecodeGraphs, Again]]]:
    """Engines with native kernels that are made within capture decoding steps of these sizes; the
    forwards of each, and after those the ones of its draft model."""
    made: list[tuple[DecodeGraphs, Again]] = []

    def graph(self: NativePlatform, network: Network, most: StepSizes, *, trees: bool = False):
        again, fitting = Again(), tuple(size for size in sizes if size <= most.seqs)
        inputs = DeviceInputs(
            most, len(network.groups), self._max_blocks, CPU, fitting[-1], trees=trees
        )
        context = self._max_blocks * self._block_size
        graphs = DecodeGraphs(
            network, inputs, again, fitting, self._block_size, context, lambda: 0.0
        )
        made.append((graphs, again))
        return graphs, inputs

    select = platforms.select_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "select_backend", lambda *facts: ByTensors(select(*facts)))
        patch.setattr(NativePlatform, "graph", graph)
        yield made
