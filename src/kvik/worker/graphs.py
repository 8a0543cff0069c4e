"""From a batch to logits: eagerly, or by replaying a forward that was captured once.

A small model spends more time in Python and in dispatch than in its kernels. So if possible, its
forward is captured at start, and each step replays it. The model itself stays ordinary Python and
is independent of this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend, AttentionSpec
from kvik.attention.budget import kept_keys
from kvik.frozen import frozen
from kvik.kernels.ops import Ops
from kvik.kernels.upload import upload
from kvik.nn.kv_formats import NO_STATES, KVCache, States
from kvik.nn.layers import PooledHead
from kvik.nn.lora import AdapterSlots
from kvik.spec.kv import KVGroup
from kvik.spec.network import ALL, ForwardContext, Network, Taps
from kvik.spec.pooling import PoolingSpec
from kvik.spec.shares import PipelineStage
from kvik.worker.captures import Captures, CudaCapturer, GraphMemory
from kvik.worker.group import (
    CopyCaches,
    CutKeys,
    EarlierStages,
    Enter,
    MoveTokens,
    OtherRanks,
    ReadLogits,
)
from kvik.worker.input_batch import InputBatch, StepTensors

# Functions of rows, such as draft heads: called each time, or captured for several row counts.

RowFunction = Callable[..., Tensor]  # of tensors [rows, ...] -> [rows, ...], asynchronous


class RowGraph:
    """Calls a function of rows each time."""

    def __init__(self, function: RowFunction) -> None:
        self._function = function

    def run(self, *inputs: Tensor) -> Tensor:
        """Return the function of the inputs; valid until the next call."""
        return self._function(*inputs)

    def idle_step(self) -> bool:
        """See `Graph.idle_step`."""
        return False


class CapturedRows(RowGraph):
    def __init__(
        self,
        function: RowFunction,
        like: Sequence[Tensor],
        sizes: Sequence[int],
        capturer: CudaCapturer,
        clock: Callable[[], float],
        memory: GraphMemory,
    ) -> None:
        """
        Args:
            function: rows of its result do not depend on each other. Its first call may do what
                cannot be captured.
            like: examples of its inputs, with any number of rows.
            sizes: numbers of rows, ascending.
            memory: see `Captures`.
        """
        super().__init__(function)
        self._inputs = [zero_rows(sizes[-1], tensor) for tensor in like]
        self._output: Tensor | None = None  # of every size, in the first rows
        self._captures = Captures(
            capturer, sizes, lambda size: lambda: self._call(size), clock, memory
        )

    def run(self, *inputs: Tensor) -> Tensor:
        self._captures.prepare()
        rows, sizes = len(inputs[0]), self._captures.sizes
        replay = self._captures.replay_of(sizes[bisect_left(sizes, rows) :], int)
        if replay is None or self._output is None:
            return self._function(*inputs)
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer[:rows].copy_(tensor)
        replay()
        return self._output[:rows]

    def idle_step(self) -> bool:
        return self._captures.idle_step()

    def _call(self, size: int) -> None:
        output = self._function(*(tensor[:size] for tensor in self._inputs))
        if self._output is None:
            self._output = zero_rows(self._captures.sizes[-1], output)
        self._output[:size].copy_(output)


def zero_rows(count: int, like: Tensor) -> Tensor:
    """Return zeros [count, ...] of the shape and dtype of the rows of a tensor."""
    return torch.zeros(count, *like.shape[1:], dtype=like.dtype, device=like.device)


@frozen
class StepOutput:
    """The output of a forward; valid until the next step."""

    hidden: Tensor  # [tokens, hidden], normalised
    logits: Tensor  # [sampling rows, vocab] fp32
    # top, top_ids: [sampling rows] fp32 and int64, the largest logit of each row and its token; see
    # `Ops.largest`.
    top: Tensor
    top_ids: Tensor
    # What `EngineNetwork.onward` returns, [tokens, width], or (); of a stage that is not the last,
    # the residual streams that `onward` will read.
    onward: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.hidden, self.logits, self.top, self.top_ids, *self.onward

    def first(self, tokens: int, samples: int) -> StepOutput:
        """Return the first tokens and sampling rows."""
        rows = (self.logits[:samples], self.top[:samples], self.top_ids[:samples])
        onward = tuple(states[:tokens] for states in self.onward)
        return StepOutput(self.hidden[:tokens], *rows, onward)

    @property
    def drafted_from(self) -> Tensor:
        """What a network that drafts reads next, [tokens, width]."""
        return self.onward[0] if self.onward else self.hidden


class Graph:
    """Runs the forwards of steps. By default there is nothing to prepare."""

    def prepare(self) -> None:
        """Spend a moment to make later steps faster; called before the inputs of a step are
        written."""

    def idle_step(self) -> bool:
        """Spend idle time to make later steps faster. Returns whether there is more to prepare."""
        return False

    def run(self, batch: InputBatch) -> StepOutput:
        """Run the forward of one step."""
        return self.forward(batch.tensors)

    def forward(self, step: StepTensors) -> StepOutput:
        """Run a forward over inputs that were just put; see `EngineNetwork.forward`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EngineNetwork:
    """A model, its cache, and the operations it computes with."""

    model: Network
    ops: Ops
    backend: AttentionBackend
    groups: tuple[KVGroup, ...]
    kv: KVCache
    states: States = NO_STATES
    # The processes that have other shares of the model and its cache, and do the same; None: there
    # are none, or this process does not direct them.
    ranks: OtherRanks | None = None
    stage: PipelineStage | None = None  # the layers that are computed here; None: all
    earlier: EarlierStages | None = None  # for the last stage, the stages before it
    # pooling, pooled: how hidden states become a vector or score; None: the model does not specify
    # a pooling, or there is no head after it.
    pooling: PoolingSpec | None = None
    pooled: PooledHead | None = None
    generates: bool = True  # it has logits of tokens
    # A network that reads the hidden states of this one and drafts, of which the same processes
    # have the same shares; None: there is none.
    drafting: EngineNetwork | None = None
    # For such a network, [most tokens, width] that its forwards read; None: it is none.
    hidden: Tensor | None = None
    taps: tuple[int, ...] = ()  # layers before which `onward` reads the residual stream
    # Hidden [tokens, hidden] and the residual streams -> what the network that drafts reads; None:
    # it reads the hidden states.
    onward: Callable[[Tensor, Sequence[Tensor]], Tensor] | None = None
    adapters: AdapterSlots | None = None  # from which requests choose; None: there are none
    # What layers with a budget compute, by their number.
    budgeted: Mapping[int, AttentionSpec] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of its caches. A stage may have only layers with states."""
        return (*self.kv.storages, self.states.pool)[0].device

    @property
    def entering(self) -> int:
        """Number of results of the stage before that a forward reads; see `StepTensors.entered`."""
        if self.stage is None or self.stage.first:
            return 0
        return 1 + sum(layer < self.stage.layers.start for layer in self.taps)

    def forward(self, step: StepTensors) -> StepOutput:
        """Run the forward of a step; the head only for rows that sample."""
        input_ids, entered = step.input_ids, step.entered
        metadata = tuple(
            self.backend.plan(layout, group.spec.window if group.layers else None)
            for layout, group in zip(step.layouts, self.groups, strict=True)
        )
        taps = None
        if self.taps:
            taps = Taps(self.taps, lambda x: self.ops.scaled(x, 1.0), list(entered[1:]))
        kv, states = self.kv.layers, self.states.layers
        ctx = ForwardContext(step.positions, metadata, kv, states, taps=taps)
        model, stage = self.model, self.stage
        x = entered[0] if entered else model.enter(input_ids, ctx)
        if not entered and (inputs := model.token_inputs(input_ids, x, ctx)) is not None:
            ctx = replace(ctx, token_inputs=inputs)
        span = ALL if stage is None else slice(stage.layers.start, stage.layers.stop)
        x = model.blocks(x, ctx, span)
        if stage is not None and not stage.last:
            return StepOutput(x, x[:0], x[:0], x[:0], tuple(taps.kept) if taps else ())
        hidden = model.leave(x)
        if not self.generates:
            return StepOutput(hidden, hidden[:0], hidden[:0], hidden[:0])
        logits = self.model.logits(self.ops.gather_rows(hidden, step.logits_indices))
        onward: tuple[Tensor, ...] = ()
        if self.onward is not None:
            onward = (self.onward(hidden, () if taps is None else taps.kept),)
        return StepOutput(hidden, logits, *self.ops.largest(logits), onward)

    @property
    def drafts(self) -> bool:
        """Whether it drafts from hidden states of another network."""
        return self.hidden is not None

    def read(self, hidden: Tensor) -> None:
        """Set what the next forward of a network that drafts reads: [tokens, width]."""
        assert self.hidden is not None
        self.hidden[: len(hidden)].copy_(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of rows of `StepOutput.hidden`: [rows, hidden] -> [rows, vocab] fp32."""
        if self.ranks is None:
            return self.model.logits(hidden)
        hidden = self.ranks.share(hidden)
        with self.ranks.jointly(ReadLogits(len(hidden), self.drafts)):
            hidden = self.ranks.spread(hidden)
            return self.model.logits(hidden).clone()  # from memory that the next call uses

    def enter(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids [rows] at positions [rows] -> the model's input, [rows, hidden]."""
        ctx = ForwardContext(positions, (), ())
        if self.ranks is None:
            return self.model.enter(ids, ctx)
        self.ranks.begin()
        with self.ranks.jointly(Enter(ids.tolist(), positions.tolist())):
            return self.model.enter(ids, ctx).clone()

    def copy(self, blocks: Sequence[tuple[int, int]], states: Sequence[tuple[int, int]]) -> None:
        """Copy the states of requests, in order, and blocks of the cache: pairs of source and
        target."""
        if self.ranks is not None and (blocks or states):
            self.ranks.send(CopyCaches(list(blocks), list(states)))
        self.states.copy(states)
        if blocks and self.kv.storages:  # a stage may have only layers with states
            storages = self.kv.storages
            source, target = upload(np.array(blocks), self.device).unbind(1)
            for storage in storages:
                self.ops.copy_blocks(storage, source, target)

    def move(self, group: int, places: np.ndarray) -> None:
        """Move what the layers of a KV group have stored at some places, in order.

        Args:
            places: [2, n] int64, source and target.
        """
        for processes in (self.ranks, self.earlier):
            if processes is not None:
                processes.send(MoveTokens(group, places.tolist()))
        for layer in self.groups[group].layers:
            kv = self.kv.of(layer)
            self.backend.move(kv, *upload(places, kv.k.device))

    def cut(self, cut: CutKeys) -> None:
        """Let the layers of a KV group keep only as many tokens of a request as their budget
        says."""
        layers = self.groups[cut.group].layers
        if not layers:  # other stages have them
            return
        if self.ranks is None:
            self._cut(cut)
            return
        self.ranks.begin()
        with self.ranks.jointly(cut):
            self._cut(cut)

    def _cut(self, cut: CutKeys) -> None:
        layers = self.groups[cut.group].layers
        budget = self.groups[cut.group].spec.budget
        assert budget is not None
        device = self.device
        sides = (np.frombuffer(bytearray(side), np.int64) for side in (cut.source, cut.target))
        at, to = (upload(side, device) for side in sides)
        order = torch.arange(cut.end - budget.last, cut.end, device=device) % budget.last
        for layer in layers:
            kv = self.kv.of(layer)
            assert kv.queries is not None
            queries = kv.queries[cut.slot, order]
            weights = self.backend.key_weights(kv, at, queries, self.budgeted[layer])
            chosen = kept_keys(weights, budget)
            self.backend.move(kv, at[chosen], to)


class Eager(Graph):
    """Runs the model each step."""

    def __init__(self, network: EngineNetwork) -> None:
        self.network = network

    def forward(self, step: StepTensors) -> StepOutput:
        return self.network.forward(step)
