"""OLMo 2 (OLMo team 2024, arXiv 2501.00656): a Llama that normalises the outputs of its blocks; and
OLMo 3, FlexOlmo and EXAONE 4, which do so too; OLMoE and K-EXAONE, which do not.

Section 3.1: RMSNorm comes after attention and MLP, not before, and queries and keys are normalised
over all heads together before the rotation. And the first OLMo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    PostNormLayer,
    PreNormLayer,
    feed_forward,
    plain_norm,
    without_predictors,
)
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.architecture import Architecture, gguf_experts, gguf_shared_width
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import corrected_router, read_experts, softmax_router
from kvik.spec.fields import Fields
from kvik.spec.layers import (
    SLIDING,
    LayerSpec,
    layer_types,
    mixed_layers,
    read_window,
    rotary_layers,
)
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import ForwardContext
from kvik.spec.rope import RopeSpec, read_rope

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = "clip_qkv"


class Olmo2Attention(GroupedQueryAttention):
    """Grouped-query attention with RMSNorm over all queries and over all keys of a token."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        super().__init__(spec, builder, layer, full_rows=True)
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        make, rope = builder.at("self_attn").rms_norm, spec.layers[layer].rope
        norm = partial(make, eps=spec.norm_eps, rope=rope)
        self.q_norm = norm("q_norm", heads * dim, heads=heads)
        self.k_norm = norm("k_norm", kv_heads * dim, heads=kv_heads)

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x, ctx)
        return self.q_norm(q.flatten(1)).view(q.shape), self.k_norm(k.flatten(1)).view(k.shape), v


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


EXAONE_NAMES = ExpertNames(correction="e_score_correction_bias")


def exaone_moe(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    """Return the model; multi-token-prediction layers are not read."""
    builder.skip("mtp")
    feed = partial(feed_forward, names=EXAONE_NAMES)
    make_layer = partial(PreNormLayer, attention=Qwen3Attention, feed=feed)
    return without_predictors(spec, builder, make_layer)


# K-EXAONE (LG AI Research 2026): norms before blocks, and the experts of DeepSeek-V3.
EXAONE_MOE = replace(
    EXAONE4,
    name="ExaoneMoeForCausalLM",
    model_type="exaone_moe",
    models="K-EXAONE",
    make=exaone_moe,
    experts=partial(
        read_experts, router=corrected_router, shared="num_shared_experts", first_dense=1
    ),
    keys={"n_shared_experts": "num_shared_experts"},
    eos_token_ids=(53,),
    defaults={
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
    gguf="exaone-moe",
    gguf_names=gguf_experts("mlp", EXAONE_NAMES),
    gguf_extra=gguf_shared_width,
)


def clipping(fields: Fields) -> ModelScales:
    limit = fields.number(LIMIT, 1e-6, 1e6) if LIMIT in fields else None
    return ModelScales(qkv_limit=limit)


def unclipped_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys; clipping of normalised q and k is not supported."""
    if LIMIT in fields:
        raise fields.error(LIMIT, "must be null")
    return rotary_layers(fields, layers, positions)


# FlexOlmo (Shi et al. 2025, arXiv 2507.07024): an OLMo 2 with routed experts.
FLEX_OLMO = replace(
    OLMO2,
    name="FlexOlmoForCausalLM",
    model_type="flex_olmo",
    models="FlexOlmo",
    experts=partial(read_experts, inner="intermediate_size", router=softmax_router),
    eos_token_ids=(100_257,),
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "num_experts": 7,
        "num_experts_per_tok": 5,
    },
    gguf=None,
)
# OLMo (Groeneveld et al. 2024, arXiv 2402.00838): LayerNorm without gains and biases; from version
# 1.7 on, q, k and v are clipped.
OLMO = Architecture(
    "OlmoForCausalLM",
    "olmo",
    "OLMo",
    partial(Decoder, make_layer=partial(PreNormLayer, norms=("", "")), make_norm=plain_norm),
    rms_norm=False,
    scales=clipping,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eos_token_ids=(50279,),
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    gguf="olmo",
    gguf_pairs=True,
    gguf_scales=(LIMIT,),
)
# OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): norms before blocks, and routed experts.
OLMOE = Architecture(
    "OlmoeForCausalLM",
    "olmoe",
    "OLMoE",
    partial(Decoder, make_layer=partial(PreNormLayer, attention=Olmo2Attention)),
    layers=unclipped_layers,
    experts=partial(read_experts, inner="intermediate_size", router=softmax_router),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(50279,),
    gguf="olmoe",
    gguf_implied=lambda fields: {"norm_topk_prob": False},
)
