"""One rank: loads the model as resolved, allocates the cache as planned, computes plans."""

from __future__ import annotations

import time

import torch

from kvik.config.config import ResolvedConfig
from kvik.config.errors import ConfigError
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.models.registry import load_model
from kvik.nn.builder import Builder
from kvik.nn.checkpoint import Checkpoint, open_checkpoint
from kvik.nn.kv_formats import allocate_kv
from kvik.worker.graphs import Network
from kvik.worker.model_runner import ModelRunner
from kvik.worker.platforms import platform
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_table import SamplingTable


class Worker:
    """Raises `ModelError` while it is built if the weights do not fit the spec."""

    def __init__(self, config: ResolvedConfig) -> None:
        runner, cache, scheduler = config.runner, config.cache, config.scheduler
        self._threads = runner.threads if runner.device == "cpu" else None
        if runner.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError("device", "torch cannot use the GPU: is its build for CUDA?")
        self._set_threads()
        chosen = platform(config)
        parts = chosen.parts
        checkpoint: Checkpoint | None = None
        if runner.load_format == "safetensors":
            checkpoint = open_checkpoint(runner.model_path)
        builder = Builder(
            parts.ops,
            parts.backend,
            cache.groups,
            dtype=parts.dtype,
            device=parts.device,
            max_model_len=scheduler.max_model_len,
            checkpoint=checkpoint,
            stored_quantization=config.model.quantization,
            quantization=runner.quantization,
        )
        chosen.release_freed()  # what reading the tokenizer took
        with torch.inference_mode():
            model = load_model(config.model, builder, seed=runner.seed)
            chosen.release_freed()
            kv = allocate_kv(
                cache.groups,
                cache.num_blocks,
                cache.block_size,
                parts.dtype,
                parts.device,
                parts.kv_zeros,
            )
            network = Network(model, parts.ops, parts.backend, cache.groups, kv)
            graph, inputs = chosen.graph(network)
        self._runner: ModelRunner | None = ModelRunner(
            network=network,
            graph=graph,
            inputs=inputs,
            table=RequestTable(
                scheduler.max_num_seqs,
                scheduler.max_model_len,
                len(cache.groups),
                cache.block_size,
            ),
            sampling=SamplingTable(
                scheduler.max_num_seqs, config.model.vocab_size, parts.device, parts.draw_bytes
            ),
            device=parts.device,
            clock=time.monotonic,
        )

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if self._runner is None:
            raise RuntimeError("the worker is closed")
        self._set_threads()
        with torch.inference_mode():
            return self._runner.run(plan)

    def _set_threads(self) -> None:
        """Before every step, because another engine of this process may have set its own number."""
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def close(self) -> None:
        """Drop weights and cache; safe to call twice."""
        self._runner = None
