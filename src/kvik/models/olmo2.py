"""OLMo 2 (OLMo team 2024, arXiv 2501.00656): a Llama that normalises the outputs of its blocks; and
OLMo 3 and EXAONE 4, which do so too.

Section 3.1: RMSNorm comes after attention and MLP, not before, and queries and keys are normalised
over all heads together before the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, GroupedQueryAttention, PostNormLayer, PreNormLayer
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.experts import read_experts, softmax_router
from kvik.spec.fields import Fields
from kvik.spec.layers import (
    SLIDING,
    LayerSpec,
    layer_types,
    mixed_layers,
    read_window,
    rotary_layers,
)
from kvik.spec.model import ModelFacts
from kvik.spec.rope import RopeSpec, read_rope

if TYPE_CHECKING:
    from torch import Tensor


class Olmo2Attention(GroupedQueryAttention):
    """Grouped-query attention with RMSNorm over all queries and over all keys of a token."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        super().__init__(spec, builder, layer, full_rows=True)
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        make, rope = builder.at("self_attn").rms_norm, spec.layers[layer].rope
        norm = partial(make, eps=spec.norm_eps, rope=rope)
        self.q_norm = norm("q_norm", heads * dim, heads=heads)
        self.k_norm = norm("k_norm", kv_heads * dim, heads=kv_heads)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        q = self.q_norm(q.flatten(1)).view(q.shape)
        k = self.k_norm(k.flatten(1)).view(k.shape)
        return self.o(self.attend(q, k, v, ctx, rotation), ctx, residual)


POST_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    "olmo2",
    "OLMo 2",
    partial(Decoder, make_layer=partial(PostNormLayer, attention=Olmo2Attention)),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(50279,),
    gguf="olmo2",
    gguf_names=POST_NORMS,
)


def olmo3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Three layers with a window, then one without; only the latter has scaled positions."""
    types, window = layer_types(fields, layers, every=4), read_window(fields)
    nested = any(kind in fields.inside("rope_parameters") for kind in types)
    ropes = {
        kind: read_rope(fields, positions, layer_type=kind if nested else "") for kind in types
    }
    if SLIDING in ropes and not nested:
        theta = ropes[SLIDING].theta
        ropes[SLIDING] = RopeSpec(theta=theta, original_max_position=positions)
    return tuple(LayerSpec(window if kind == SLIDING else None, ropes[kind]) for kind in types)


# OLMo 3 (OLMo team 2025): most layers have a sliding window.
OLMO3 = replace(
    OLMO2,
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    models="OLMo 3",
    layers=olmo3_layers,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    gguf_marker=("attention.sliding_window", 1, ""),
)
# EXAONE 4 (LG AI Research 2025, arXiv 2507.11407): each head of q and k is normalised separately,
# and layers without a window have no positions.
EXAONE4 = Architecture(
    "Exaone4ForCausalLM",
    "exaone4",
    "EXAONE 4",
    partial(Decoder, make_layer=partial(PostNormLayer, attention=Qwen3Attention)),
    layers=partial(mixed_layers, every=4, full_rotary=False),
    qk_norm=True,
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(2,),
    gguf="exaone4",
    gguf_names=POST_NORMS,
)


def olmoe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys; clipping of q, k and v is not supported."""
    if "clip_qkv" in fields:
        raise fields.error("clip_qkv", "must be null")
    return rotary_layers(fields, layers, positions)


# OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): norms before blocks, and routed experts.
OLMOE = Architecture(
    "OlmoeForCausalLM",
    "olmoe",
    "OLMoE",
    partial(Decoder, make_layer=partial(PreNormLayer, attention=Olmo2Attention)),
    layers=olmoe_layers,
    experts=partial(read_experts, inner="intermediate_size", router=softmax_router),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(50279,),
    gguf="olmoe",
    gguf_implied=lambda fields: {"norm_topk_prob": False},
)
