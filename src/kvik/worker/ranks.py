"""Processes that compute one model together: how ranks other than the first process messages.

Only the first process (rank 0) plans, samples and drafts. It writes a step's inputs to memory that
all share, and sends the others the size of the step. They have a share of every matrix and of the
heads of the cache, run the same recorded forward, and exchange data with the first one in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from kvik.attention.base import StepLayout
from kvik.config.config import ResolvedConfig
from kvik.kernels.upload import upload
from kvik.spec.declare import ForwardContext
from kvik.spec.shares import PipelineStage
from kvik.worker.cuda_graphs import DecodeGraphs
from kvik.worker.graphs import Eager, EngineNetwork
from kvik.worker.group import (
    CaptureStep,
    CopyBlocks,
    CopyPages,
    CopyStates,
    Enter,
    GiveBack,
    JoinedStep,
    Message,
    MoveTokens,
    OpenPages,
    RankSetup,
    ReadLogits,
    RunStep,
    StageStep,
    WarmUpStep,
)
from kvik.worker.group_pages import PageShare
from kvik.worker.loading import load_share
from kvik.worker.pipeline import StageTape, Tape
from kvik.worker.platforms import (
    NativePlatform,
    TorchPlatform,
    TritonPlatform,
    inference_on,
    on_device,
    platform,
)
from kvik.worker.step_inputs import FixedInputs, StepSizes, dtype_of


class Member(Protocol):
    """A process other than the first, once it has loaded."""

    @property
    def digest(self) -> str:
        """See `GroupMember.digest`."""
        ...

    def serve(self, receive: Callable[[], Message]) -> None:
        """Process messages from the first process, until it ends.

        Raises:
            EOFError: from `receive`, when it has ended.
        """
        ...


def make_rank(
    config: ResolvedConfig, setup: RankSetup, stage: PipelineStage | None, memory: np.ndarray | None
) -> Member:
    """Load the share of a process other than the first; see `Rank`."""
    if config.runner.kernels == "native":
        return Rank(config, setup, stage, memory)
    return TorchRank(config, setup)


class Rank:
    """A process other than the first, with native kernels."""

    def __init__(
        self,
        config: ResolvedConfig,
        setup: RankSetup,
        stage: PipelineStage | None = None,
        memory: np.ndarray | None = None,
    ) -> None:
        """
        Args:
            stage: stage of the group; None: it has all layers.
            memory: for weights; see `WeightMemory`.

        Raises:
            ModelError: the weights do not fit the spec.
        """
        torch.set_num_threads(1)
        self._platform = NativePlatform(config, memory, setup)
        self._network: EngineNetwork = load_share(config, self._platform, setup, stage)
        self._tape = self._platform.tape(self._network, StepSizes.of_engine(config))
        assert self._platform.group is not None
        self._group = self._platform.group
        self._hidden = config.model.hidden_size, self._platform.parts.dtype
        self._pages = PageShare(config, self._network, setup, stage)

    @property
    def digest(self) -> str:
        """Digest of what was recorded; equal in all processes of a group."""
        return self._group.digest

    def serve(self, receive: Callable[[], Message]) -> None:
        """See `Member`."""
        while True:
            message = receive()
            with torch.inference_mode():
                self._do(message)

    def _do(self, message: Message) -> None:
        match message:
            case RunStep(tokens, seqs, samples):
                self._tape.native.replay(self._tape.recording, (tokens, seqs, samples))
            case CopyBlocks() | CopyStates() | MoveTokens():
                _change_caches(self._network, message)
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
            case OpenPages() | CopyPages():
                self._pages.do(message)


class LeadingRank:
    """The first process of a stage before the last one, which directs the others of its group."""

    def __init__(
        self, config: ResolvedConfig, stage: PipelineStage, setup: RankSetup | None
    ) -> None:
        """
        Args:
            setup: None: there are no others.

        Raises:
            ModelError: the weights do not fit the spec.
            ConfigError: the model uses an operation that has no native kernel.
        """
        torch.set_num_threads(1)
        self._platform = NativePlatform(config, setup=setup)
        self._network: EngineNetwork = load_share(config, self._platform, setup, stage)
        sizes = StepSizes.of_engine(config)
        graph, inputs = self._platform.graph(self._network, sizes)
        assert isinstance(graph, Tape) and isinstance(inputs, FixedInputs)
        self._tape = StageTape(graph, inputs)
        self._pages = PageShare(config, self._network, setup, stage)

    def serve(
        self,
        receive: Callable[[], Message],
        entered: Callable[[], bytes],
        leave: Callable[[memoryview], None],
    ) -> None:
        """Process messages from the engine, until it ends.

        Args:
            entered: waits for [tokens, hidden] of the next step from the stage before; returns b""
                in the first stage.
            leave: hands this stage's result to the next stage.

        Raises:
            EOFError, OSError: from these functions, when a process has ended.
            GroupLost: a process of the group has ended.
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
                    self._network.others.send(message)
                self._platform.give_back(self._network.kv.storages, blocks)
            case OpenPages() | CopyPages():
                if self._network.others is not None:
                    self._network.others.send(message)
                self._pages.do(message)


class TorchRank:
    """A process other than the first, with kernels of torch or Triton."""

    def __init__(self, config: ResolvedConfig, setup: RankSetup) -> None:
        """
        Raises:
            ModelError: the weights do not fit the spec.
            BrokenGroup: one of the processes is gone.
        """
        device = torch.device(config.runner.device)
        if device.type == "cpu":
            torch.set_num_threads(config.runner.threads)
        self._inference = inference_on(device)
        with on_device(device):
            chosen = platform(config, setup=setup)
            assert isinstance(chosen, TorchPlatform | TritonPlatform)
            assert chosen.joined is not None
            self._group = chosen.joined.group
            self._network = load_share(config, chosen, setup, None)
            sizes = StepSizes.of_engine(config)
            graph, self._inputs = chosen.graph(self._network, sizes)
            self._warm_up = chosen.parts.warm_ups.steps(self._network, config.model, sizes)
        assert isinstance(graph, Eager | DecodeGraphs)
        self._graph = graph
        self._device, self._block_size = device, config.cache.block_size
        self._hidden = config.model.hidden_size, chosen.parts.dtype
        self._pages = PageShare(config, self._network, setup, None)

    @property
    def digest(self) -> str:
        """See `Member`."""
        return self._group.digest

    def serve(self, receive: Callable[[], Message]) -> None:
        """See `Member`."""
        while True:
            message = receive()
            with self._inference():
                self._do(message)

    def _do(self, message: Message) -> None:
        match message:
            case JoinedStep(inputs):
                self._run(inputs)
            case CaptureStep(number):
                assert isinstance(self._graph, DecodeGraphs)
                self._graph.capture(number)
            case WarmUpStep():
                self._warm_up.next()
            case CopyBlocks() | CopyStates() | MoveTokens():
                _change_caches(self._network, message)
            case ReadLogits(rows):
                width, dtype = self._hidden
                hidden = torch.empty(rows, width, dtype=dtype, device=self._device)
                self._network.model.logits(self._group.spread(hidden))
            case Enter(ids, positions):
                both = np.array([ids, positions], np.int64)
                tokens, at = upload(both, self._device).unbind(0)
                self._network.model.enter(tokens, ForwardContext(at, (), ()))
            case OpenPages() | CopyPages():
                self._pages.do(message)

    def _run(self, inputs: dict[str, tuple[list[int], bytes]]) -> None:
        """Run a step with the inputs from `build_input_batch` in the first process."""
        arrays: dict[str, np.ndarray] = {
            name: np.frombuffer(data, dtype_of(name)).reshape(shape).copy()
            for name, (shape, data) in inputs.items()
        }
        there = {name: self._inputs.put(name, array) for name, array in arrays.items()}
        self._inputs.send()
        layouts = tuple(
            StepLayout(
                query_start_loc=there["query_start_loc"],
                seq_lens=there["seq_lens"],
                block_table=there[f"block_table {group}"],
                slot_mapping=there[f"slot_mapping {group}"],
                num_scheduled=tuple(np.diff(arrays["query_start_loc"]).tolist()),
                contexts=tuple(arrays["seq_lens"].tolist()),
                block_size=self._block_size,
                tree=there.get("tree"),
                tree_words=tuple(arrays["tree"].tolist()) if "tree" in arrays else (),
                state_rows=there.get("state_rows"),
            )
            for group in range(len(self._network.groups))
        )
        ids = self._group.spread(there["input_ids"])
        self._graph.forward(ids, there["positions"], layouts, there["logits_indices"])


def _change_caches(network: EngineNetwork, message: CopyBlocks | CopyStates | MoveTokens) -> None:
    """Apply the change that the first process makes to its share to this process's share."""
    match message:
        case CopyBlocks(pairs):
            network.copy_blocks(pairs)
        case CopyStates(pairs):
            network.copy_states(pairs)
        case MoveTokens(group, places):
            network.move(group, np.array(places, np.int64))
