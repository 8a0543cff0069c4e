"""From a batch to logits: eagerly, or by replaying a forward that was captured once.

A small model spends more time in Python and in dispatch than in its kernels. So where it can be,
its forward is captured at start, and each step replays it. The model itself stays ordinary Python
and knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvik.attention.base import AttentionBackend, LayerKV, StepLayout
from kvik.frozen import frozen
from kvik.kernels.ops import Ops
from kvik.spec.declare import ForwardContext, Model
from kvik.spec.kv import KVGroup
from kvik.worker.input_batch import InputBatch


@frozen
class StepOutput:
    """Attributes:
    hidden: [tokens, hidden], normalised.
    logits: [sampling rows, vocab] fp32.
    top, top_ids: [sampling rows] fp32 and int64, the largest logit of each row and its token, as
        `Ops.largest` says. All are valid until the next step.
    """

    hidden: Tensor
    logits: Tensor
    top: Tensor
    top_ids: Tensor


class Graph(Protocol):
    def prepare(self) -> None:
        """Before the inputs of a step are laid out: a moment to make later steps faster."""
        ...

    def rest(self) -> bool:
        """Nothing is to be computed: a longer moment to make later steps faster. Returns whether
        there is more of this to do."""
        ...

    def run(self, batch: InputBatch) -> StepOutput:
        """The forward of one step."""
        ...


@dataclass(frozen=True, slots=True)
class EngineNetwork:
    """A model, its cache, and what it computes with."""

    model: Model
    ops: Ops
    backend: AttentionBackend
    groups: tuple[KVGroup, ...]
    kv: tuple[LayerKV, ...]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        layouts: Sequence[StepLayout],
        logits_indices: Tensor,
    ) -> StepOutput:
        """One forward over a step; the head only for rows that sample."""
        metadata = tuple(
            self.backend.plan(layout, group.spec.window)
            for layout, group in zip(layouts, self.groups, strict=True)
        )
        hidden = self.model.forward(input_ids, ForwardContext(positions, metadata, self.kv))
        logits = self.model.logits(self.ops.gather_rows(hidden, logits_indices))
        return StepOutput(hidden, logits, *self.ops.largest(logits))


class Eager:
    """Runs the model each step."""

    def __init__(self, network: EngineNetwork) -> None:
        self.network = network

    def prepare(self) -> None:
        pass

    def rest(self) -> bool:
        return False

    def run(self, batch: InputBatch) -> StepOutput:
        return self.network.forward(
            batch.input_ids, batch.positions, batch.layouts, batch.logits_indices
        )
