"""What a worker computes with: operations, attention, storage of the cache, and how steps run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from kvik.attention.base import AttentionBackend
from kvik.attention.select import select as select_backend
from kvik.config.config import ResolvedConfig
from kvik.kernels.ops import Ops
from kvik.kernels.select import select as select_ops
from kvik.nn.kv_formats import DenseKV, KVFormat
from kvik.worker.graphs import Eager, Graph, Network
from kvik.worker.step_inputs import FixedInputs, FreshInputs, StepInputs, StepSizes

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Parts:
    device: torch.device
    dtype: torch.dtype
    ops: Ops
    backend: AttentionBackend
    kv_format: KVFormat


class Platform(Protocol):
    @property
    def parts(self) -> Parts: ...

    def graph(self, network: Network) -> tuple[Graph, StepInputs]:
        """How steps run, and where it wants their inputs."""
        ...


class TorchPlatform:
    """torch's own kernels, on any of its devices."""

    def __init__(self, config: ResolvedConfig) -> None:
        device, dtype = torch.device(config.runner.device), DTYPES[config.runner.dtype]
        ops = select_ops(device)
        backend = select_backend(config.runner.attention_backend, ops, device, dtype)
        self.parts = Parts(device, dtype, ops, backend, DenseKV(dtype))

    def graph(self, network: Network) -> tuple[Graph, StepInputs]:
        return Eager(network), FreshInputs(self.parts.device)


class NativePlatform:
    """The native kernels for CPUs."""

    def __init__(self, config: ResolvedConfig) -> None:
        from kvik.kernels.cpu.buffers import zeros
        from kvik.kernels.cpu.native import Native, notices
        from kvik.kernels.cpu.ops import native_ops

        runner, cache, scheduler = config.runner, config.cache, config.scheduler
        device, dtype = torch.device("cpu"), DTYPES[runner.dtype]
        self.native = Native(runner.threads)
        for notice in notices(runner.threads):
            log.warning(notice)
        ops = native_ops(self.native)
        backend = select_backend(runner.attention_backend, ops, device, dtype, self.native)
        self.parts = Parts(device, dtype, ops, backend, DenseKV(dtype, zeros))
        self._inputs = FixedInputs(
            StepSizes.of(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
            len(cache.groups),
            -(-scheduler.max_model_len // cache.block_size),
        )
        self._block_size = cache.block_size

    def graph(self, network: Network) -> tuple[Graph, StepInputs]:
        from kvik.attention.cpu import CpuAttention
        from kvik.kernels.cpu.recording import CaptureError
        from kvik.worker.cpu_tape import CpuTape

        eager = Eager(network), FreshInputs(self.parts.device)
        if not isinstance(self.parts.backend, CpuAttention):
            return eager  # it runs torch's operations, as was decided
        try:
            return CpuTape.capture(
                self.native, network, self._inputs, self._block_size
            ), self._inputs
        except CaptureError as error:
            log.warning("every step runs through Python: %s", error)
            return eager


def platform(config: ResolvedConfig) -> Platform:
    """As `resolve` decided."""
    return NativePlatform(config) if config.runner.kernels == "native" else TorchPlatform(config)
