"""Qwen3 (Yang et al. 2025): a Llama whose query and key heads are normalised before they turn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaLayer
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.layers import switched_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


class Qwen3Attention:
    """Grouped-query attention with RMSNorm on each head of q and k, then rotary positions.

    Args:
        names: of the norms of q and k, and of the projection of what the heads give.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        names: tuple[str, str, str] = ("q_norm", "k_norm", "o_proj"),
    ) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = builder.heads(
            ("q_proj", "k_proj", "v_proj"),
            spec.hidden_size,
            (heads, kv_heads, kv_heads),
            dim,
            bias=spec.qkv_bias,
            rope=spec.layers[layer].rope,
        )
        q_norm, k_norm, o = names
        self.q_norm = builder.rms_norm(q_norm, dim, spec.norm_eps)
        self.k_norm = builder.rms_norm(k_norm, dim, spec.norm_eps)
        self.attend = builder.attention(layer, dim)
        self.o = builder.linear(o, heads * dim, spec.hidden_size, bias=spec.o_bias, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        attended = self.attend(q, k, v, ctx, rotation, (self.q_norm, self.k_norm))
        return self.o(attended, ctx, residual)


def qwen3(spec: ModelFacts, builder: LayerBuilder) -> Llama:
    return Llama(spec, builder, partial(LlamaLayer, attention=Qwen3Attention))


QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    "Qwen 3, dense",
    qwen3,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    layers=switched_layers,
    head_dim=128,
    gguf="qwen3",
)
