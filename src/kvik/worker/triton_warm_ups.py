"""Warm-ups of Triton's kernels.

Separate from `warm_up.py` because this imports Triton, which only machines with a GPU need.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.attention.triton import TritonAttention
from kvik.config.config import ResolvedConfig
from kvik.config.graph_sizes import heads_sizes
from kvik.kernels.ops import Ops
from kvik.kernels.triton.attention_shapes import SHORT, lengths
from kvik.kernels.triton.matrix_shapes import tokens_of_experts
from kvik.kernels.weights import DTYPES
from kvik.models.model_spec import ModelSpec
from kvik.worker.graphs import EngineNetwork, RowFunction
from kvik.worker.joined import Joined
from kvik.worker.step_inputs import StepSizes
from kvik.worker.warm_up import NOTHING, IdleWork, WarmUp, WarmUps, forwards, heads, rules


class TritonWarmUps(WarmUps):
    """`WarmUps` that compile the kernels for the lengths, heads and rules of a configuration."""

    def __init__(
        self,
        config: ResolvedConfig,
        ops: Ops,
        backend: AttentionBackend,
        device: torch.device,
        joined: Joined | None,
    ) -> None:
        """
        Args:
            joined: the group, whose processes make the calls of `steps` together.
        """
        self._config = config
        self._ops = ops
        self._backend = backend
        self._device = device
        self._joined = joined

    def steps(self, network: EngineNetwork, spec: ModelSpec, sizes: StepSizes) -> WarmUp:
        if not isinstance(self._backend, TritonAttention):
            return NOTHING  # other backends plan each step on the host
        context, block_size = self._config.scheduler.max_model_len, self._config.cache.block_size
        max_length = min(sizes.tokens, spec.max_context, context)
        routers = {layer.experts.router for layer in spec.layers if layer.experts}
        by_expert = [tokens_of_experts(router.experts, router.active) for router in routers]
        if adapters := self._config.runner.max_adapters:
            by_expert.append(tokens_of_experts(adapters, 1))
        attending = [layer for layer in spec.layers if layer.attends]
        heads = {(spec.query_heads(layer), spec.heads(layer)[0]) for layer in attending}
        classes = lengths(heads, max_length, set().union(*by_expert))
        nodes = [length for length in classes if sizes.trees and length <= SHORT]
        dtype, device = DTYPES[self._config.runner.dtype], self._device

        def entered(length: int) -> list[Tensor]:
            shape = length, spec.hidden_size
            return [torch.zeros(shape, dtype=dtype, device=device)] * network.entering

        calls = forwards(network, classes, sizes, block_size, context, nodes, entered)
        jointly = nullcontext if self._joined is None else self._joined.peers(network).warming_up
        return WarmUp(calls, jointly)

    def heads(self, function: RowFunction, like: Sequence[Tensor]) -> IdleWork:
        if self._config.runner.draft_graph_sizes:
            return NOTHING  # they are compiled when they are captured
        sizes = [size.rows for size in heads_sizes(self._config.scheduler.max_num_seqs)]
        return heads(function, like, sizes)

    def rules(self) -> IdleWork:
        config = self._config
        return rules(self._ops, config.model.vocab_size, self._device, config.speculation)
