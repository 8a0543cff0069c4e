"""Granite 3 (IBM 2024): a Llama with constants for embedding, attention, residuals and logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.model import ModelFacts, ModelScales

if TYPE_CHECKING:
    from torch import Tensor


class GraniteLayer:
    """Attention and MLP; each reads the residual stream normalised and adds a part of what it
    gives."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = builder.rms_norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = builder.rms_norm("post_attention_layernorm", hidden, eps, before="gate_up")
        self.mlp = builder.at("mlp").gated_mlp(hidden, spec.intermediate_size, bias=spec.mlp_bias)
        self.add = builder.scaled_sum(spec.scales.residual)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.add(self.attention(self.attention_norm(x), None, rotation, ctx), x)
        return self.add(self.mlp(self.mlp_norm(x), ctx), x)


def granite_scales(fields: Fields) -> ModelScales:
    def number(key: str) -> float:
        return fields.number(key, 1e-6, 1e6, 1.0)

    return ModelScales(
        embedding=number("embedding_multiplier"),
        residual=number("residual_multiplier"),
        attention=number("attention_multiplier"),
        logits=1.0 / number("logits_scaling"),
    )


GRANITE = Architecture(
    "GraniteForCausalLM",
    "granite",
    "Granite 3",
    partial(Llama, make_layer=GraniteLayer),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    scales=granite_scales,
    eos_token_ids=(2,),
    gguf="granite",
    gguf_pairs=True,
    gguf_scales=(
        *("embedding_multiplier", "residual_multiplier"),
        *("attention_multiplier", "logits_scaling"),
    ),
)
