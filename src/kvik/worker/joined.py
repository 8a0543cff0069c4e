"""Groups with kernels of torch or Triton: their steps are not recorded, and torch.distributed
exchanges data. The first process sends the inputs of each step, and all run it (`ranks.TorchRank`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.attention.group import SharedHeads
from kvik.config.config import ResolvedConfig
from kvik.errors import ConfigError
from kvik.kernels.cut_ops import cut_ops
from kvik.kernels.ops import Ops
from kvik.worker.captures import CapturePeers
from kvik.worker.graphs import EngineNetwork, Graph, StepOutput
from kvik.worker.group import CaptureStep, Message, OtherRanks, RankSetup, SentStep, WarmUpStep
from kvik.worker.input_batch import StepTensors
from kvik.worker.step_inputs import StepInputs, packed

if TYPE_CHECKING:
    from kvik.kernels.torch_group import TorchGroup


class Joined(CapturePeers):
    """The connection of a process to its group, for kernels of torch or Triton."""

    def __init__(self, config: ResolvedConfig, setup: RankSetup) -> None:
        """Connect to the other processes.

        Raises:
            BrokenGroup: one of them is gone.
            ConfigError: this torch cannot connect them.
        """
        from kvik.kernels.torch_group import connect  # brings in torch.distributed

        runner, peers = config.runner, setup.ranks
        device = torch.device(runner.device)
        if device.type != "cpu" and not torch.distributed.is_nccl_available():
            raise ConfigError("tensor_parallel_size", "must be 1 on GPUs: this torch has no NCCL")
        self._fast, self._whole_experts = runner.fast_cut, runner.expert_parallel
        self._ranks, self._device = peers, device
        self._drafts = False  # the captured forwards are of the network that drafts
        self.group = connect(
            device, setup.file, setup.rank, setup.size, lambda: peers is not None and peers.lost
        )

    def ops(self, ops: Ops) -> Ops:
        """Return the operations on this process's share."""
        return cut_ops(ops, self.group, fast=self._fast, whole_experts=self._whole_experts)

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        """Return attention over this process's heads; `backend` uses the operations of `ops`."""
        return SharedHeads(backend, self.group, fast=self._fast)

    def steps(
        self, network: EngineNetwork, graph: Graph, inputs: StepInputs
    ) -> tuple[Graph, StepInputs]:
        """Return how steps run in this process. The first process sends the others each step."""
        if self._ranks is None:
            return graph, inputs
        sent = SentInputs(inputs, drafts=network.drafts)
        return SentSteps(network, graph, sent, self._ranks, self.group), sent

    def wait_loaded(self) -> None:
        """See `Platform.wait_loaded`."""
        if self._ranks is not None:
            self._ranks.wait_loaded(self.group)

    def peers(self, network: EngineNetwork) -> Joined:
        """Return this object for captures of a network's forwards."""
        peers = copy(self)
        peers._drafts = network.drafts
        return peers

    # The first process decides these, and all processes take part; see `CapturePeers`.

    def capturing(self, number: int) -> AbstractContextManager[None]:
        return self._jointly(CaptureStep(number, self._drafts))

    def agree(self, done: bool) -> bool:
        vote = torch.tensor([done], dtype=torch.uint8, device=self._device)
        return bool(self.group.gather(vote).all())

    def warming_up(self) -> AbstractContextManager[None]:
        """Return a context in which this process makes its next call of the warm-up, and the others
        do too."""
        return self._jointly(WarmUpStep(self._drafts))

    def _jointly(self, message: Message) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.jointly(message)


class SentInputs(StepInputs):
    """Inputs of the first process, kept to send them to the others."""

    def __init__(self, inputs: StepInputs, *, drafts: bool) -> None:
        """
        Args:
            drafts: of a network that drafts, whose next forward reads again what is not put anew.
        """
        self.fixed, self.states, self._drafts = inputs.fixed, inputs.states, drafts
        self._inputs = inputs
        self._putting: dict[str, np.ndarray] = {}
        self._sent: dict[str, np.ndarray] = {}

    def put(self, name: str, array: np.ndarray) -> Tensor:
        self._putting[name] = array
        return self._inputs.put(name, array)

    def send(self) -> None:
        kept = self._sent if self._drafts else {}
        self._sent, self._putting = {**kept, **self._putting}, {}
        self._inputs.send()

    def step(self) -> SentStep:
        """Return the step whose inputs were sent last."""
        return SentStep(packed(self._sent), drafts=self._drafts)


class SentSteps(Graph):
    """Steps of the first process, which all processes compute together."""

    def __init__(
        self,
        network: EngineNetwork,
        graph: Graph,
        inputs: SentInputs,
        peers: OtherRanks,
        group: TorchGroup,
    ) -> None:
        self._network = network
        self._graph, self._inputs, self._ranks, self._group = graph, inputs, peers, group

    def prepare(self) -> None:
        self._graph.prepare()

    def idle_step(self) -> bool:
        return self._graph.idle_step()

    def forward(self, step: StepTensors) -> StepOutput:
        """Run a step in all processes.

        Raises:
            GroupLost: one of the others is gone.
        """
        with self._ranks.jointly(self._inputs.step()):
            spread_inputs(self._group, self._network, step)
            return self._graph.forward(step)


def spread_inputs(group: TorchGroup, network: EngineNetwork, step: StepTensors) -> None:
    """Let all processes have what only the first one knows: the tokens (on a GPU, its device may
    know them from the step before), results of the stage before, and for a network that drafts the
    hidden states that it reads."""
    group.spread(step.input_ids)
    for states in step.entered:
        group.spread(states)
    if network.hidden is not None:
        group.spread(network.hidden[: len(step.input_ids)])
