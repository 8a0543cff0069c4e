"""Processes that compute one model together: what the first tells the others, and what they do.

The first process (rank 0) plans, samples and drafts alone. It lays a step's inputs out in memory
that all share and tells the others how large the step is. They have a share of every matrix and of
the heads of the cache, run the same recorded forward, and meet the first one in it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvik.config.config import ResolvedConfig
from kvik.spec.declare import ForwardContext
from kvik.spec.shares import PipelineStage
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import (
    CopyBlocks,
    CopyStates,
    Enter,
    GiveBack,
    Message,
    MoveTokens,
    ReadLogits,
    RunStep,
    Seat,
    StageStep,
)
from kvik.worker.loading import load_share
from kvik.worker.pipeline import StageTape, Tape
from kvik.worker.platforms import NativePlatform
from kvik.worker.step_inputs import FixedInputs, StepSizes


class Rank:
    """Another process than the first: its share of the model, and what it does with it."""

    def __init__(
        self,
        config: ResolvedConfig,
        seat: Seat,
        stage: PipelineStage | None = None,
        memory: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            stage: of which the group is; None: it has all layers.
            memory: for weights; see `WeightMemory`.

        Raises:
            ModelError: the weights do not fit the spec.
        """
        torch.set_num_threads(1)
        self._platform = NativePlatform(config, memory, seat)
        self._network: EngineNetwork = load_share(config, self._platform, seat, stage)
        trees = config.speculation is not None and config.speculation.trees
        self._tape = self._platform.tape(self._network, StepSizes.of_engine(config), trees=trees)
        assert self._platform.group is not None
        self._group = self._platform.group
        self._hidden = config.model.hidden_size, self._platform.parts.dtype

    @property
    def digest(self) -> str:
        """Of what was recorded; equal in all processes of a group."""
        return self._group.digest

    def serve(self, receive: Callable[[], Message]) -> None:
        """Do what the first process tells, until it has gone.

        Raises:
            EOFError: from `receive`, when it has.
        """
        while True:
            message = receive()
            with torch.inference_mode():
                self._do(message)

    def _do(self, message: Message) -> None:
        match message:
            case RunStep(tokens, seqs, samples):
                self._tape.native.replay(self._tape.recording, (tokens, seqs, samples))
            case CopyBlocks(pairs):
                self._network.copy_blocks(pairs)
            case CopyStates(pairs):
                self._network.copy_states(pairs)
            case MoveTokens(group, places):
                self._network.move(group, np.array(places, np.int64))
            case ReadLogits(rows):
                width, dtype = self._hidden
                self._group.begin()
                self._network.model.logits(self._group.take((rows, width), dtype))
            case Enter(ids, positions):
                self._group.begin()
                ctx = ForwardContext(torch.tensor(positions), (), ())
                self._network.model.enter(torch.tensor(ids), ctx)
            case GiveBack(blocks):
                self._platform.give_back(self._network.kv.storages, blocks)


class LeadingRank:
    """The first process of a stage before the last one, which tells the others of its group."""

    def __init__(self, config: ResolvedConfig, stage: PipelineStage, seat: Seat | None) -> None:
        """
        Args:
            seat: None: there are no others.

        Raises:
            ModelError: the weights do not fit the spec.
            ConfigError: the model uses an operation that has no native kernel.
        """
        torch.set_num_threads(1)
        self._platform = NativePlatform(config, seat=seat)
        self._network: EngineNetwork = load_share(config, self._platform, seat, stage)
        trees = config.speculation is not None and config.speculation.trees
        sizes = StepSizes.of_engine(config)
        graph, inputs = self._platform.graph(self._network, sizes, trees=trees)
        assert isinstance(graph, Tape) and isinstance(inputs, FixedInputs)
        self._tape = StageTape(graph, inputs)

    def serve(
        self,
        receive: Callable[[], Message],
        entered: Callable[[], bytes],
        leave: Callable[[memoryview], None],
    ) -> None:
        """Do what the engine tells, until it has gone.

        Args:
            entered: waits for [tokens, hidden] of the next step from the stage before; of the first
                stage returns b"".
            leave: hands the same to the next stage.

        Raises:
            EOFError, OSError: from them, when a process has gone.
            GroupLost: one of the group has.
        """
        while True:
            message = receive()
            with torch.inference_mode():
                if isinstance(message, StageStep):
                    leave(self._run(message, entered))
                else:
                    self._do(message)

    def _run(self, step: StageStep, entered: Callable[[], bytes]) -> memoryview:
        if step.state_copies:
            self._network.copy_states(step.state_copies)
        if step.block_copies:
            self._network.copy_blocks(step.block_copies)
        hidden = self._tape.run(self._tape.arrays(step), entered()).hidden
        return hidden.view(torch.uint8).numpy().data.cast("B")

    def _do(self, message: Message) -> None:
        match message:
            case MoveTokens(group, places):
                self._network.move(group, np.array(places, np.int64))
            case GiveBack(blocks):
                if self._network.others is not None:
                    self._network.others.tell(message)
                self._platform.give_back(self._network.kv.storages, blocks)
