"""Attention over the paged cache, as a model sees it."""

from __future__ import annotations

from torch import Tensor

from kvik.attention.base import AttentionBackend, HeadNorms
from kvik.nn.norm import RMSNorm
from kvik.spec.declare import ForwardContext


class Attention:
    """softmax(q k^T * scale) v of one layer, causal, over everything cached."""

    __slots__ = ("backend", "group", "layer", "scale")

    def __init__(self, backend: AttentionBackend, layer: int, group: int, scale: float) -> None:
        self.backend = backend
        self.layer = layer
        self.group = group  # KV group of the layer
        self.scale = scale

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: ForwardContext,
        rotation: Tensor | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> Tensor:
        """Normalise and turn q and k, store k and v, attend.

        Args:
            q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim].
            rotation: [tokens, head_dim] fp32, of `Rope.at`; None where nothing turns.
            norms: of the heads of q and k, with one eps; None: none.

        Returns:
            [tokens, heads * head_dim].
        """
        kv, metadata = ctx.kv[self.layer], ctx.metadata[self.group]
        by: HeadNorms | None = None
        if norms is not None:
            of_q, of_k = norms
            by = HeadNorms(of_q.weight, of_k.weight, of_q.eps)
        out = self.backend.run(q, k, v, kv, metadata, self.scale, rotation, by)
        return out.flatten(1)
