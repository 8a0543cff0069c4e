"""GLM-4 (Zhipu AI 2024): a Llama in which half of each head is rotated, in pairs of neighbours;
GLM-4-0414 (Z.ai 2025), with norms before and after its blocks; GLM-4.5 to 4.7, with routed experts;
and Solar Open, with the experts of GLM-4.5."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    AttentionBlock,
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    SandwichLayer,
    feed_forward,
    without_predictors,
)
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.experts import ExpertsSpec, corrected_router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import PredictorSpec, rotary_layers
from kvik.spec.model import ModelFacts

# Gate and up are one matrix.
glm_feed = partial(feed_forward, gate_up=("gate_up_proj",))
Glm4Layer = partial(
    SandwichLayer,
    feed=glm_feed,
    norms=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)
GLM4 = Architecture(
    "Glm4ForCausalLM",
    "glm4",
    "GLM-4-0414",
    partial(Decoder, make_layer=Glm4Layer),
    layers=partial(rotary_layers, fraction=0.5, interleaved=True),
    qkv_bias="attention_bias",
    head_dim=128,
    defaults={"attention_bias": True, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    eos_token_ids=(151329, 151336, 151338),
    gguf="glm4",
    gguf_names={
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)

GLM = replace(
    GLM4,
    name="GlmForCausalLM",
    model_type="glm",
    models="GLM-4 and GLM-Edge",
    make=partial(Decoder, make_layer=partial(PreNormLayer, feed=glm_feed)),
    gguf=None,
)


def glm4_moe_attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    """Heads of q and k are normalised only in the larger models."""
    make = Qwen3Attention if spec.qk_norm else GroupedQueryAttention
    return make(spec, builder, layer)


# GLM-4.5 (GLM-4.5 team 2025, arXiv 2508.06471).
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    "GLM-4.5 to 4.7, with experts",
    partial(without_predictors, make_layer=partial(PreNormLayer, attention=glm4_moe_attention)),
    layers=partial(rotary_layers, fraction=0.5),
    experts=partial(
        read_experts, router=corrected_router, shared="n_shared_experts", first_dense=1
    ),
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    predictor=PredictorSpec(),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    eos_token_ids=(151329, 151336, 151338),
    gguf="glm4moe",
    gguf_names={"post_attention_norm": "post_attention_layernorm"},
)
# Text models of those that read images: their three positions per token are equal for text.
GLM4V = replace(
    GLM4,
    name="Glm4vForConditionalGeneration",
    model_type="glm4v_text",
    models="GLM-4.1V and 4.6V-Flash, text alone",
    qkv_bias=True,
    head_dim=None,
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    gguf=None,
)
GLM4V_MOE = replace(
    GLM4_MOE,
    name="Glm4vMoeForConditionalGeneration",
    model_type="glm4v_moe_text",
    models="GLM-4.5V and 4.6V, text alone",
    predictor=None,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": True},
    gguf=None,
)


def solar_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Every layer has experts."""
    fields.integer("first_k_dense_replace", 0, 0, 0)
    return read_experts(fields, layers, router=corrected_router, shared="n_shared_experts")


# Solar Open (Upstage 2025).
SOLAR_OPEN = Architecture(
    "SolarOpenForCausalLM",
    "solar_open",
    "Solar Open",
    Decoder,
    experts=solar_experts,
    qkv_bias="attention_bias",
    head_dim=128,
    fixed={"use_qk_norm": False},
    keys={"intermediate_size": "moe_intermediate_size"},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
    },
)
