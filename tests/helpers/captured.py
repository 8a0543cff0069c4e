"""Captured decoding steps on a CPU: a replay calls the captured function on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import pytest
import torch
from torch import Tensor

from kvik.attention.base import (
    Attend,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    LayerKV,
)
from kvik.attention.layout import StepLayout
from kvik.config.config import ResolvedConfig
from kvik.config.graph_sizes import GraphSize, catching_up_sizes, drafting_sizes
from kvik.models.model_spec import ModelSpec
from kvik.spec.visible_keys import Window
from kvik.worker import platforms
from kvik.worker.captures import NO_CAPTURE_PEERS, Captured, CapturePeers, GraphMemory, NotCaptured
from kvik.worker.graphs import CapturedRows, EngineNetwork, Graph, RowFunction, RowGraph
from kvik.worker.group import RankSetup
from kvik.worker.joined import Joined
from kvik.worker.platforms import NativePlatform, TorchPlatform
from kvik.worker.replays import DecodeGraphs
from kvik.worker.step_inputs import DeviceInputs, StepInputs, StepSizes
from kvik.worker.warm_up import WarmUp, WarmUps, forwards

CPU = torch.device("cpu")
ROOMY = 1 << 40


@dataclass
class Again:
    """A capturer whose replays call the captured function again.

    Attributes:
        fails: it cannot record, so no process of the group captures.
    """

    replayed: int = 0
    captured: list[Callable[[], None]] = field(default_factory=list)
    fails: bool = False

    def capture(self, call: Callable[[], None], peers: CapturePeers = NO_CAPTURE_PEERS) -> Captured:
        call()
        if not peers.agree(not self.fails):
            raise NotCaptured
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
    """A backend that takes lengths from tensors, as captured kernels on a GPU do.

    Plain integers of the layout are only upper bounds. Rows and tokens after those of requests are
    padding, which must be harmless. Results for tokens of no sequence are undefined (NaN).
    """

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
        if not rows or (layout.slot_mapping[:tokens] == -1).all():  # nothing to store, or a warm-up
            return Planned(layout, window, AttentionMetadata(layout, window), 0, starts[-1])
        tree = None if layout.tree is None else layout.tree[:tokens]
        assert tree is None or not layout.tree[tokens:].any(), "padding is no tree"
        of_states = layout.state_rows, layout.state_pending, layout.state_drafts
        if layout.state_rows is not None:
            assert (layout.state_rows[rows:] == -1).all(), "padding keeps nothing"
        state_rows, pending, drafts = (None if x is None else x[:rows] for x in of_states)
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
            state_rows=state_rows,
            state_pending=pending,
            state_drafts=drafts,
            first_keys=firsts,
            firsts=() if firsts is None else tuple(firsts.tolist()),
        )
        return Planned(layout, window, self.inner.plan(real, window), tokens, starts[-1])

    def run(self, attend: Attend) -> Tensor:
        metadata = attend.metadata
        (tokens, heads, size), some = attend.q.shape, slice(metadata.tokens)
        out = attend.q.new_zeros(tokens, heads, attend.spec.value_dim or size)
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

    def rank_heads(self, heads: int, kv_heads: int) -> int:
        return self.inner.rank_heads(heads, kv_heads)

    def key_weights(self, kv: LayerKV, at: Tensor, queries: Tensor, spec: AttentionSpec) -> Tensor:
        return self.inner.key_weights(kv, at, queries, spec)


@contextmanager
def captured_steps(
    *rows: int, drafts: int = 0, heads: list[Again] | None = None
) -> Iterator[list[tuple[DecodeGraphs, Again]]]:
    """Capture decoding steps of native kernels, in engines that are made in the context.

    Args:
        rows: requests of the steps.
        drafts: if not 0, also capture steps with up to this many drafts of each request, and
            capture all steps at once.
        heads: receives the capturers of draft heads.

    Yields:
        The graphs and the capturer of each engine, and after them those of its draft model.
    """
    made: list[tuple[DecodeGraphs, Again]] = []

    def graph(
        self: NativePlatform,
        network: EngineNetwork,
        most: StepSizes,
        *,
        drafts: bool = False,
    ) -> tuple[DecodeGraphs, DeviceInputs]:
        again, seqs = Again(), max(rows)
        sizes = [GraphSize(n, n, 1, n) for n in rows]
        if drafts:
            sizes += catching_up_sizes(seqs, most.tokens)
        elif judged:
            sizes += drafting_sizes(seqs, judged, most.samples - most.seqs, tree=most.trees)
        sizes = [size for size in sizes if size.rows <= most.seqs and size.tokens <= most.tokens]
        inputs = DeviceInputs(most, len(network.groups), self._max_blocks, CPU, sizes)
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
        while judged and graphs.idle_step():
            pass
        return graphs, inputs

    def rows_graph(self: NativePlatform, function: RowFunction, like: Sequence[Tensor]) -> RowGraph:
        again = Again()
        graph = CapturedRows(function, like, rows, again, lambda: 0.0, GraphMemory(ROOMY, 0))
        if heads is not None:
            heads.append(again)
        while graph.idle_step():
            pass
        return graph

    judged, select = drafts, platforms.select_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "select_backend", lambda *facts: ByTensors(select(*facts)))
        patch.setattr(NativePlatform, "graph", graph)
        patch.setattr(NativePlatform, "rows", rows_graph)
        yield made


class _ForwardWarmUps(WarmUps):
    """Warm-ups of a process that run the forward for a few lengths."""

    def __init__(self, joined: Joined | None) -> None:
        self._joined = joined

    def steps(self, network: EngineNetwork, spec: ModelSpec, sizes: StepSizes) -> WarmUp:
        def entered(length: int) -> list[Tensor]:
            return [torch.zeros(length, spec.hidden_size)] * network.entering

        context, block_size = spec.max_context, network.kv.layers[0].k.shape[1]
        calls = forwards(network, (8, 1), sizes, block_size, context, (), entered)
        jointly = nullcontext if self._joined is None else self._joined.peers(network).warming_up
        return WarmUp(calls, jointly)


@contextmanager
def captured_groups(
    *rows: int, max_context: int, failing: int | None = None
) -> Iterator[list[tuple[DecodeGraphs, Again]]]:
    """Capture decoding steps of torch's kernels in all processes of the groups and stages that are
    made in the context, which must be threads of this process.

    Args:
        rows: requests of the steps.
        failing: number of the process, in the order in which they load, that cannot capture.

    Yields:
        The graphs and the capturer of each process.
    """
    made: list[tuple[DecodeGraphs, Again]] = []
    numbers = count()  # processes load at the same time
    make = TorchPlatform.__init__

    def init(self: TorchPlatform, config: ResolvedConfig, setup: RankSetup | None = None) -> None:
        make(self, config, setup)
        self.parts = replace(self.parts, warm_ups=_ForwardWarmUps(self.joined))

    def graph(
        self: TorchPlatform,
        network: EngineNetwork,
        most: StepSizes,
        *,
        drafts: bool = False,
    ) -> tuple[Graph, StepInputs]:
        again, sizes = Again(fails=next(numbers) == failing), [GraphSize(n, n, 1, n) for n in rows]
        block_size = network.kv.layers[0].k.shape[1]
        blocks = -(-max_context // block_size)
        states = platforms.entered_states(self._config, self.parts, network, most)
        inputs = DeviceInputs(most, len(network.groups), blocks, CPU, sizes, states)
        memory = GraphMemory(ROOMY, 0)
        peers = NO_CAPTURE_PEERS if self.joined is None else self.joined.peers(network)
        graphs = DecodeGraphs(
            network, inputs, again, sizes, block_size, max_context, lambda: 0.0, memory, peers
        )
        made.append((graphs, again))
        if self.joined is None:
            return graphs, inputs
        return self.joined.steps(network, graphs, inputs)

    select = platforms.select_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platforms, "select_backend", lambda *facts: ByTensors(select(*facts)))
        patch.setattr(TorchPlatform, "__init__", init)
        patch.setattr(TorchPlatform, "graph", graph)
        yield made
