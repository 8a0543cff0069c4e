"""Platforms of a worker: operations, attention, memory of the cache, and how steps run."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.attention.select import select as select_backend
from kvik.config.compute import TRANSFORMERS
from kvik.config.config import ResolvedConfig
from kvik.config.step_memory import DRAW_BYTES
from kvik.errors import ConfigError
from kvik.kernels.ops import Ops
from kvik.kernels.packing import PLAIN, Packing
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import DTYPES
from kvik.nn.kv_formats import Zeros
from kvik.worker.captures import NO_CAPTURE_PEERS, CudaCapturer, GraphMemory
from kvik.worker.graphs import CapturedRows, Eager, EngineNetwork, Graph, RowFunction, RowGraph
from kvik.worker.group import RankSetup
from kvik.worker.joined import Joined
from kvik.worker.replays import CpuTape, DecodeGraphs
from kvik.worker.step_inputs import (
    DeviceInputs,
    EnteredStates,
    FixedInputs,
    FreshInputs,
    StepInputs,
    StepSizes,
)
from kvik.worker.team import Team, pace_of
from kvik.worker.warm_up import TritonWarmUps, WarmUps

# The current device.
#
# CUDA keeps a current device per thread; Triton's launches, streams, events and graphs use it
# unless they name another. One thread may create an engine and another step it, two engines of one
# process may have a GPU each, and the caller's thread may use a third. So every entry point of a
# worker makes its device current and restores the caller's on return.


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context within which the device is the current one."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def inference_on(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of contexts, one for each step: inference mode with the device current.

    A CPU needs only inference mode."""
    return torch.inference_mode if device.type == "cpu" else partial(_inference, device)


@contextmanager
def _inference(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device), torch.inference_mode():
        yield


# The memory of a KV cache in one allocation, so that it does not fragment other memory.

ALIGNMENT = 256  # bytes, of each part
MARGIN = 1 << 20  # bytes for the alignment of some hundred parts


class KVPool:
    """`nn.kv_formats.Zeros` that returns parts of one allocation, made at the first call."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: bytes planned for all parts.
        """
        self._size = size + MARGIN
        self._memory: Tensor | None = None
        self._used = 0

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None:
            self._memory = torch.zeros(self._size, dtype=torch.uint8, device=device)
        first, size = self._used, prod(shape) * dtype.itemsize
        self._used = -(-(first + size) // ALIGNMENT) * ALIGNMENT
        if self._used > self._size:
            raise RuntimeError(
                f"the KV cache takes more than the {self._size} bytes planned for it"
            )
        return self._memory[first : first + size].view(dtype).view(shape)


log = logging.getLogger(__name__)

NATIVE_DRAW_BYTES = 4  # per logit: a copy of the rows that draw
# The same, plus a list of logits, and what a program computes about a chunk of them
# (kernels/triton/draw.py).
TRITON_DRAW_BYTES = NATIVE_DRAW_BYTES + 5


@dataclass(frozen=True, slots=True)
class PlatformParts:
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    own_ops: Ops  # of this process alone, for matrices that are not divided
    packing: Packing  # layout of matrices for these operations
    draw_bytes: int  # see `SamplingTable`
    backend: AttentionBackend
    kv_zeros: Zeros  # where the memory of the KV cache comes from
    warm_ups: WarmUps = field(default_factory=WarmUps)


class Platform(Protocol):
    """The kernels and the memory of a device, and how steps run there."""

    parts: PlatformParts
    team: Team | None = None  # threads of the native kernels; None: other kernels
    # The group of this process, for kernels of torch or Triton; None: there is none.
    joined: Joined | None = None

    @property
    def graph_memory(self) -> GraphMemory | None:
        """Memory of graphs captured on a GPU; None: nothing can be captured."""
        return None

    def graph(
        self, network: EngineNetwork, sizes: StepSizes, *, drafts: bool = False
    ) -> tuple[Graph, StepInputs]:
        """Return how steps run, and where their inputs are put.

        Args:
            sizes: of the largest step.
            drafts: the network is the draft model.
        """
        ...

    def wait_loaded(self) -> None:
        """Wait until the other processes of the group have loaded what this one has, and are ready
        for steps.

        Raises:
            ConfigError, GroupLost: see `OtherRanks.wait_loaded`.
        """
        if self.joined is not None:
            self.joined.wait_loaded()

    def for_drafts(self) -> Platform:
        """Return the platform of drafts that only the first process of a group computes; this one
        if there is no group."""
        ...

    def hidden_states(self, tokens: int, width: int) -> Tensor:
        """Return memory for hidden states [tokens, width] that forwards read, in all processes of a
        group."""
        return torch.zeros(tokens, width, dtype=self.parts.dtype, device=self.parts.device)

    def rows(self, function: RowFunction, like: Sequence[Tensor]) -> RowGraph:
        """Return how draft heads run.

        Args:
            function, like: see `CapturedRows`.
        """
        return RowGraph(function)

    @staticmethod
    def give_back(storages: Sequence[Tensor], blocks: Sequence[int]) -> int:
        """Give the memory of blocks back to the system, where possible. Returns bytes."""
        return 0

    @staticmethod
    def release_freed() -> None:
        """Return freed memory that the allocator caches to the system: after loading, allocations
        have other sizes. Keeps no part of the platform alive."""
        ...


def entered_states(
    config: ResolvedConfig,
    parts: PlatformParts,
    network: EngineNetwork,
    sizes: StepSizes,
    zeros: Callable[[tuple[int, ...], type], np.ndarray] | None = None,
) -> EnteredStates | None:
    """Return memory for what a stage gets from the one before; None: there is none.

    Args:
        zeros: see `EnteredStates`.
    """
    if not network.entering:
        return None
    shape = network.entering, sizes.tokens, config.model.residual_width
    return EnteredStates(*shape, parts.dtype, parts.device, zeros)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of each run of neighbours, and their number."""
    ordered = sorted(blocks)
    for _, run in groupby(enumerate(ordered), lambda item: item[1] - item[0]):
        members = [block for _, block in run]
        yield members[0], len(members)


class TorchPlatform(Platform):
    """torch's own kernels, on any of its devices."""

    def __init__(self, config: ResolvedConfig, setup: RankSetup | None = None) -> None:
        device, dtype = torch.device(config.runner.device), DTYPES[config.runner.dtype]
        self.joined = None if setup is None else Joined(config, setup)
        ops = TORCH if self.joined is None else self.joined.ops(TORCH)
        backend = select_backend(config.runner.attention_backend, ops, device, dtype)
        if self.joined is not None:
            backend = self.joined.attention(backend)
        self.parts = PlatformParts(
            device, dtype, ops, TORCH, PLAIN, DRAW_BYTES, backend, torch.zeros
        )
        self._config = config

    def graph(
        self, network: EngineNetwork, sizes: StepSizes, *, drafts: bool = False
    ) -> tuple[Graph, StepInputs]:
        states = entered_states(self._config, self.parts, network, sizes)
        eager = Eager(network), FreshInputs(self.parts.device, states)
        return eager if self.joined is None else self.joined.steps(network, *eager)

    def for_drafts(self) -> Platform:
        return self if self.joined is None else TorchPlatform(self._config)

    @staticmethod
    def release_freed() -> None:
        torch.cuda.empty_cache()  # does nothing if no GPU was used


class TransformersPlatform(TorchPlatform):
    """torch's own kernels, with forwards by transformers."""

    def graph(
        self, network: EngineNetwork, sizes: StepSizes, *, drafts: bool = False
    ) -> tuple[Graph, StepInputs]:
        from kvik.worker.transformers_model import TransformersModel, TransformersSteps

        model = network.model
        assert isinstance(model, TransformersModel)
        steps = TransformersSteps(model, self._config.model.vocab_size, self.parts.ops)
        return steps, FreshInputs(self.parts.device)


class NativePlatform(Platform):
    """The native kernels for CPUs. For `memory` see `WeightMemory`."""

    def __init__(
        self,
        config: ResolvedConfig,
        memory: np.ndarray | None = None,
        setup: RankSetup | None = None,
    ) -> None:
        from kvik.attention.cpu import CpuAttention
        from kvik.attention.group import GroupAttention
        from kvik.kernels.cpu.buffers import zeros
        from kvik.kernels.cpu.group import Group, group_ops, group_packing, own_ops
        from kvik.kernels.cpu.matrix import TILES
        from kvik.kernels.cpu.native import Native, notices
        from kvik.kernels.cpu.ops import native_ops

        runner, cache, scheduler = config.runner, config.cache, config.scheduler
        device, dtype = torch.device("cpu"), DTYPES[runner.dtype]
        self.native = Native(runner.threads, memory=memory, adapt=runner.adapt_threads)
        self.team = Team(self.native, runner.threads, pace_of(runner.cpu_quota))
        for notice in notices():
            log.warning(notice)
        ops = alone = native_ops(self.native)
        backend = select_backend(runner.attention_backend, ops, device, dtype, self.native)
        self.group: Group | None = None
        self._ranks = None if setup is None else setup.ranks
        packing = TILES
        if setup is not None:
            assert isinstance(backend, CpuAttention)
            self.group = Group(
                self.native,
                setup.memory,
                setup.rank,
                setup.size,
                whole_experts=runner.expert_parallel,
            )
            ops, alone = group_ops(self.native, ops, self.group), own_ops(self.native, ops)
            packing = group_packing(self.native, self.group)
            backend = GroupAttention(backend, ops, self.group)
        self.parts = PlatformParts(
            device, dtype, ops, alone, packing, NATIVE_DRAW_BYTES, backend, zeros
        )
        self._config = config
        self._block_size = cache.block_size
        self._max_blocks = -(-scheduler.max_model_len // cache.block_size)

    def graph(
        self, network: EngineNetwork, sizes: StepSizes, *, drafts: bool = False
    ) -> tuple[Graph, StepInputs]:
        from kvik.attention.cpu import CpuAttention
        from kvik.kernels.cpu.recording import CaptureError

        eager = Eager(network), FreshInputs(self.parts.device)
        if self.group is None and not isinstance(self.parts.backend, CpuAttention):
            return eager  # attention uses torch's operations, as configured
        try:
            tape = self.tape(network, sizes)
        except CaptureError as error:
            if self.group is not None:
                raise ConfigError("tensor_parallel_size", f"must be 1: {error}") from None
            if network.stage is not None:
                raise ConfigError("pipeline_parallel_size", f"must be 1: {error}") from None
            log.warning("every step runs in Python, which is slower: %s", error)
            return eager
        tape.ranks = self._ranks
        return tape, tape.inputs

    def wait_loaded(self) -> None:
        if self.group is not None and self._ranks is not None:
            self._ranks.wait_loaded(self.group)

    def hidden_states(self, tokens: int, width: int) -> Tensor:
        if self.group is None:
            return super().hidden_states(tokens, width)
        dtype = self.parts.dtype
        memory = self.group.fixed((tokens * width * dtype.itemsize,), np.uint8)
        return torch.from_numpy(memory).view(dtype).view(tokens, width)

    def tape(self, network: EngineNetwork, sizes: StepSizes) -> CpuTape:
        """Record a forward of the largest step.

        Raises:
            CaptureError: the model uses an operation that has no native kernel.
        """
        zeros = np.zeros if self.group is None else self.group.fixed
        states = entered_states(self._config, self.parts, network, sizes, zeros)
        inputs = FixedInputs(
            sizes, len(network.groups), self._max_blocks, zeros=zeros, states=states
        )
        return CpuTape.capture(self.native, network, inputs, self._block_size)

    def for_drafts(self) -> Platform:
        return self if self.group is None else NativePlatform(self._config)

    @staticmethod
    def give_back(storages: Sequence[Tensor], blocks: Sequence[int]) -> int:
        from kvik.kernels.cpu.buffers import give_back

        runs = list(_runs(blocks))
        return sum(give_back(storage, runs) for storage in storages)

    @staticmethod
    def release_freed() -> None:
        from kvik.kernels.cpu._native import release_freed

        release_freed()


class GpuMemory:
    """Memory of a GPU that the model and its drafts share, for caches and captured forwards."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.pool = KVPool(config.memory.kv_cache)
        self.graphs = GraphMemory(config.runner.graph_memory, config.memory.activations)
        self._device = torch.device(config.runner.device)

    @cached_property
    def capturer(self) -> CudaCapturer:
        """Captures forwards of the model, of the draft model and of draft heads."""
        return CudaCapturer(self._device)


class TritonPlatform(Platform):
    """Triton's kernels on a GPU."""

    def __init__(
        self,
        config: ResolvedConfig,
        setup: RankSetup | None = None,
        memory: GpuMemory | None = None,
    ) -> None:
        """
        Args:
            memory: memory to share; None: this platform is the first.
        """
        from kvik.attention.triton import TritonAttention
        from kvik.kernels.triton.ops import triton_ops
        from kvik.kernels.triton.packed import GPU

        device, dtype = torch.device(config.runner.device), DTYPES[config.runner.dtype]
        self.joined = None if setup is None else Joined(config, setup)
        ops = own_ops = triton_ops(device)
        if self.joined is not None:
            ops = self.joined.ops(ops)
        runner = config.runner
        backend = select_backend(
            runner.attention_backend, ops, device, dtype, torch_prompts=runner.torch_prompts
        )
        # Other backends plan each step on the host.
        self._plans_on_device = isinstance(backend, TritonAttention)
        warm_ups = TritonWarmUps(config, ops, backend, device, self.joined)
        if self.joined is not None:
            backend = self.joined.attention(backend)
        self._memory = memory or GpuMemory(config)
        self.parts = PlatformParts(
            device,
            dtype,
            ops,
            own_ops,
            GPU,
            TRITON_DRAW_BYTES,
            backend,
            self._memory.pool,
            warm_ups,
        )
        self._config = config

    @property
    def graph_memory(self) -> GraphMemory | None:
        runner = self._config.runner
        return self._memory.graphs if runner.graph_sizes or runner.draft_graph_sizes else None

    def graph(
        self, network: EngineNetwork, sizes: StepSizes, *, drafts: bool = False
    ) -> tuple[Graph, StepInputs]:
        graph, inputs = self._own_steps(network, sizes, drafts=drafts)
        if self.joined is None:
            return graph, inputs
        return self.joined.steps(network, graph, inputs)

    def _own_steps(
        self, network: EngineNetwork, sizes: StepSizes, *, drafts: bool
    ) -> tuple[Graph, StepInputs]:
        config, device = self._config, self.parts.device
        context, block_size = config.scheduler.max_model_len, config.cache.block_size
        captured = config.runner.draft_graph_sizes if drafts else config.runner.graph_sizes
        states = entered_states(self._config, self.parts, network, sizes)
        if not self._plans_on_device:
            return Eager(network), FreshInputs(device, states)
        inputs = DeviceInputs(
            sizes, len(network.groups), -(-context // block_size), device, captured, states
        )
        if not captured:
            return Eager(network), inputs
        graphs = DecodeGraphs(
            network,
            inputs,
            self._memory.capturer,
            captured,
            block_size,
            context,
            time.monotonic,
            self._memory.graphs,
            self.joined.peers(network) if self.joined is not None else NO_CAPTURE_PEERS,
        )
        return graphs, inputs

    def for_drafts(self) -> Platform:
        return self if self.joined is None else TritonPlatform(self._config, memory=self._memory)

    def rows(self, function: RowFunction, like: Sequence[Tensor]) -> RowGraph:
        sizes = [size.rows for size in self._config.runner.draft_graph_sizes]
        if not sizes:
            return super().rows(function, like)
        memory = self._memory
        return CapturedRows(function, like, sizes, memory.capturer, time.monotonic, memory.graphs)

    @staticmethod
    def release_freed() -> None:
        gc.collect()  # graphs and their capturer refer to each other
        torch.cuda.empty_cache()


def platform(
    config: ResolvedConfig, memory: np.ndarray | None = None, setup: RankSetup | None = None
) -> Platform:
    """Make the platform that `resolve` chose.

    Args:
        memory: see `WeightMemory`; only native kernels use it.
        setup: of its group of processes; None: it computes alone.
    """
    makers: dict[str, Callable[[ResolvedConfig], Platform]] = {
        "native": partial(NativePlatform, memory=memory, setup=setup),
        "triton": partial(TritonPlatform, setup=setup),
        "torch": partial(TorchPlatform, setup=setup),
        TRANSFORMERS: TransformersPlatform,
    }
    return makers[config.runner.kernels](config)
