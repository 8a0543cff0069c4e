"""Attention over the paged cache, as a model sees it."""

from __future__ import annotations

from torch import Tensor

from kvik.attention.base import AttentionBackend
from kvik.nn.context import ForwardContext


class Attention:
    """softmax(q k^T * scale) v of one layer, causal, over everything cached."""

    __slots__ = ("backend", "group", "layer", "scale")

    def __init__(self, backend: AttentionBackend, layer: int, group: int, scale: float) -> None:
        self.backend = backend
        self.layer = layer
        self.group = group  # KV group of the layer
        self.scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """Store k and v, attend.

        Args:
            q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].

        Returns:
            [tokens, heads * head_dim].
        """
        out = self.backend.run(q, k, v, ctx.kv[self.layer], ctx.metadata[self.group], self.scale)
        return out.flatten(1)
