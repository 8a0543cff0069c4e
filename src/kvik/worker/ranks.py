"""Processes that compute one model together: how ranks other than the first process messages.

Only the first process (rank 0) plans, samples and drafts. It writes a step's inputs to memory that
all share, and sends the others the size of the step. They have a share of every matrix and of the
heads of the cache, run the same recorded forward, and exchange data with the first one in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvik.config.config import ResolvedConfig
from kvik.kernels.upload import upload
from kvik.spec.network import ForwardContext
from kvik.spec.shares import PipelineStage
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import (
    CaptureStep,
    CopyCaches,
    CopyPages,
    CutKeys,
    Enter,
    GiveBack,
    IdleStep,
    LoadAdapter,
    Message,
    MoveTokens,
    OpenPages,
    RankSetup,
    ReadLogits,
    RunStep,
    SentStep,
    WarmUpStep,
)
from kvik.worker.input_batch import put_step
from kvik.worker.joined import spread_inputs
from kvik.worker.loading import load_share
from kvik.worker.page_copies import PageShare
from kvik.worker.pipeline import StageSteps
from kvik.worker.platforms import (
    NativePlatform,
    Platform,
    TorchPlatform,
    TritonPlatform,
    inference_on,
    on_device,
    platform,
)
from kvik.worker.replays import DecodeGraphs
from kvik.worker.step_inputs import StepSizes, unpacked

if TYPE_CHECKING:
    from kvik.kernels.torch_group import TorchGroup
    from kvik.models.model_spec import ModelSpec


class Member:
    """A process other than the engine's, once it has loaded its share of a model."""

    digest = ""  # see `GroupMember.digest`

    def __init__(
        self,
        config: ResolvedConfig,
        platform: Platform,
        network: EngineNetwork,
        setup: RankSetup | None,
        stage: PipelineStage | None,
    ) -> None:
        """
        Args:
            setup: of its group; None: there is none.
            stage: stage of the group; None: it has all layers.
        """
        self._platform, self._network = platform, network
        self._hidden = config.model.hidden_size, platform.parts.dtype
        self._inference = inference_on(platform.parts.device)
        self._pages = PageShare(config, network, setup, stage)

    def serve(self, receive: Callable[[], Message], reply: Callable[[bytes], None]) -> None:
        """Process messages from the process that directs this one, until it ends.

        Raises:
            EOFError: from `receive`, when it has ended.
        """
        while True:
            message = receive()
            with self._inference():
                match message:
                    case LoadAdapter():
                        reply(self._load_adapter(message).encode())
                    case IdleStep():
                        reply(b"\1" * self._idle_step())
                    case _:
                        self._do(message)

    def _idle_step(self) -> bool:
        """See `Executor.idle_step`. Only the first process of a stage gets this message."""
        return False

    def _load_adapter(self, message: LoadAdapter) -> str:
        """Load an adapter here and in the processes that this one directs. Returns why that fails,
        or ""."""
        assert self._network.adapters is not None
        try:
            self._network.adapters.load(message.slot, message.adapter)
            if self._network.ranks is not None:
                self._network.ranks.ask(message)
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def _do(self, message: Message) -> None:
        """Do in this process's share what the other one does in its own."""
        match message:
            case CopyCaches(blocks, states):
                self._network.copy(blocks, states)
            case CutKeys():
                self._network.cut(message)
            case MoveTokens(group, places):
                self._network.move(group, np.array(places, np.int64))
            case GiveBack(blocks):
                self._platform.give_back(self._network.kv.storages, blocks)
            case OpenPages() | CopyPages():
                self._pages.do(message)


def make_rank(
    config: ResolvedConfig, setup: RankSetup, stage: PipelineStage | None, memory: np.ndarray | None
) -> Member:
    """Load the share of a process other than the first; see `Rank`."""
    if config.runner.kernels == "native":
        return Rank(config, setup, stage, memory)
    return TorchRank(config, setup, stage)


class Rank(Member):
    """A process other than the first, with native kernels. Its digest is that of what it has
    recorded."""

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
        platform = NativePlatform(config, memory, setup)
        network = load_share(config, platform, setup, stage)
        super().__init__(config, platform, network, setup, stage)
        self._tapes = [platform.tape(network, StepSizes.of_engine(config))]
        self._networks = [network]
        if network.drafting is not None:
            self._tapes.append(platform.tape(network.drafting, StepSizes.of_drafting(config)))
            self._networks.append(network.drafting)
        assert platform.group is not None
        self._group = platform.group
        self.digest = self._group.digest

    def _do(self, message: Message) -> None:
        match message:
            case RunStep(tokens, seqs, samples, drafts):
                tape = self._tapes[drafts]
                tape.native.replay(tape.recording, (tokens, seqs, samples))
            case ReadLogits(rows, drafts):
                width, dtype = self._hidden
                self._group.begin()
                self._networks[drafts].model.logits(self._group.take((rows, width), dtype))
            case Enter(ids, positions):
                self._group.begin()
                ctx = ForwardContext(torch.tensor(positions), (), ())
                self._network.model.enter(torch.tensor(ids), ctx)
            case _:
                super()._do(message)


class LeadingRank(Member):
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
        runner, sizes = config.runner, StepSizes.of_engine(config)
        device = torch.device(runner.device)
        torch.set_num_threads(1 if runner.kernels == "native" else runner.threads)
        with on_device(device):
            chosen = platform(config, setup=setup)
            network = load_share(config, chosen, setup, stage)
            super().__init__(config, chosen, network, setup, stage)
            graph, inputs = chosen.graph(network, sizes)
            self._idle_work = chosen.parts.warm_ups.steps(network, config.model, sizes), graph
            chosen.wait_loaded()
        self._steps = StageSteps(network, graph, inputs, config.cache.block_size)

    def lead(
        self,
        receive: Callable[[], Message],
        reply: Callable[[bytes], None],
        entered: Callable[[], bytes],
        leave: Callable[[memoryview], None],
    ) -> None:
        """Process messages from the engine, until it ends.

        Args:
            entered: waits for the results of the next step from the stage before; returns b""
                in the first stage.
            leave: hands this stage's results to the next stage.

        Raises:
            EOFError, OSError: from these functions, when a process has ended.
            GroupLost: a process of the group has ended.
        """
        self._entered, self._leave = entered, leave
        self.serve(receive, reply)

    def _do(self, message: Message) -> None:
        if isinstance(message, SentStep):
            for cut in message.cuts:
                self._network.cut(cut)
            self._network.copy(message.block_copies, message.state_copies)
            output = self._steps.run(unpacked(message.inputs), self._entered())
            result = torch.cat((output.hidden, *output.onward)) if output.onward else output.hidden
            self._leave(result.view(torch.uint8).cpu().numpy().data.cast("B"))
            return
        ranks = self._network.ranks
        if ranks is not None and isinstance(message, GiveBack | OpenPages | CopyPages):
            ranks.send(message)
        super()._do(message)

    def _idle_step(self) -> bool:
        return any(work.idle_step() for work in self._idle_work)


class TorchRank(Member):
    """A process other than the first, with kernels of torch or Triton."""

    def __init__(
        self, config: ResolvedConfig, setup: RankSetup, stage: PipelineStage | None
    ) -> None:
        """
        Args:
            stage: stage of the group; None: it has all layers.

        Raises:
            ModelError: the weights do not fit the spec.
            BrokenGroup: one of the processes is gone.
        """
        device = torch.device(config.runner.device)
        if device.type == "cpu":
            torch.set_num_threads(config.runner.threads)
        with on_device(device):
            chosen = platform(config, setup=setup)
            assert isinstance(chosen, TorchPlatform | TritonPlatform)
            assert chosen.joined is not None
            network = load_share(config, chosen, setup, stage)
            super().__init__(config, chosen, network, setup, stage)
            group, spec = chosen.joined.group, config.model
            self._steps = [
                TorchSteps(config, chosen, group, network, spec, StepSizes.of_engine(config))
            ]
            if network.drafting is not None:
                assert config.speculation is not None
                spec, sizes = config.speculation.source.spec or spec, StepSizes.of_drafting(config)
                self._steps.append(TorchSteps(config, chosen, group, network.drafting, spec, sizes))
        self._group, self._device = group, device
        self.digest = group.digest

    def _do(self, message: Message) -> None:
        match message:
            case SentStep(inputs, drafts=drafts):
                self._steps[drafts].run(unpacked(inputs))
            case CaptureStep(number, drafts):
                self._steps[drafts].capture(number)
            case WarmUpStep(drafts):
                self._steps[drafts].warm_up.next()
            case ReadLogits(rows, drafts):
                width, dtype = self._hidden
                hidden = torch.empty(rows, width, dtype=dtype, device=self._device)
                self._steps[drafts].network.model.logits(self._group.spread(hidden))
            case Enter(ids, positions):
                arrays = np.array([ids, positions], np.int64)
                tokens, at = upload(arrays, self._device).unbind(0)
                self._network.model.enter(tokens, ForwardContext(at, (), ()))
            case _:
                super()._do(message)


class TorchSteps:
    """The forwards of a network in such a process."""

    def __init__(
        self,
        config: ResolvedConfig,
        platform: TorchPlatform | TritonPlatform,
        group: TorchGroup,
        network: EngineNetwork,
        spec: ModelSpec,
        sizes: StepSizes,
    ) -> None:
        """
        Args:
            spec, sizes: of the network, and of its largest step.
        """
        self.network, self._group = network, group
        graph, self._inputs = platform.graph(network, sizes, drafts=network.drafts)
        # Calls that the first process also makes.
        self.warm_up = platform.parts.warm_ups.steps(network, spec, sizes)
        self._graph, self._block_size = graph, config.cache.block_size

    def capture(self, number: int) -> None:
        """See `DecodeGraphs.capture`."""
        assert isinstance(self._graph, DecodeGraphs)
        self._graph.capture(number)

    def run(self, arrays: dict[str, np.ndarray]) -> None:
        """Run a step with the inputs that were put in the first process."""
        step = put_step(arrays, self._inputs, len(self.network.groups), self._block_size)
        spread_inputs(self._group, self.network, step)
        self._graph.forward(step)
