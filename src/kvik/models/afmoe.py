"""AFMoE (Arcee 2025, Trinity): attention with a gate for each channel and norms around each block;
layers with a window have rotary positions, others none. Experts are chosen with a correction."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from kvik.models.decoder import Decoder, GatedOutputAttention, SandwichLayer, feed_forward
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames
from kvik.spec.experts import ExpertsSpec, Router, corrected_router, read_experts
from kvik.spec.fields import MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, mixed_layers
from kvik.spec.model import ModelScales

NAMES = ExpertNames(router="router.gate", correction="expert_bias")
NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_mlp_layernorm", "post_mlp_layernorm"),
)


def afmoe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Each `global_attn_every_n_layers`-th layer, or those in `layer_types`, have no window."""
    every = fields.integer("global_attn_every_n_layers", 1, MAX_LAYERS, 4)
    return mixed_layers(fields, layers, positions, every=every, full_rotary=False)


def afmoe_router(fields: Fields, experts: int, active: int) -> Router:
    router = corrected_router(fields, experts, active)
    scale = fields.number("route_scale", 0.0, 1e6, router.scale)
    return replace(router, normalised=True, scale=scale)


def afmoe_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Layers after the first `num_dense_layers` have experts."""
    dense = fields.integer("num_dense_layers", 0, MAX_LAYERS, 1)
    shared = "num_shared_experts"
    return read_experts(fields, layers, router=afmoe_router, shared=shared, first_dense=dense)


def afmoe_scales(fields: Fields) -> ModelScales:
    width = fields.integer("hidden_size", 1, MAX_WIDTH)
    return ModelScales(embedding=math.sqrt(width) if fields.boolean("mup_enabled", False) else 1.0)


AFMOE = Architecture(
    "AfmoeForCausalLM",
    "afmoe",
    "AFMoE (Trinity)",
    partial(
        Decoder,
        make_layer=partial(
            SandwichLayer,
            attention=GatedOutputAttention,
            feed=partial(feed_forward, names=NAMES),
            norms=NORMS,
        ),
    ),
    layers=afmoe_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    experts=afmoe_experts,
    scales=afmoe_scales,
    qk_norm=True,
    head_dim=128,
    keys={"n_shared_experts": "num_shared_experts"},
    gguf="afmoe",
    gguf_names={
        **gguf_experts("mlp", NAMES),
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    gguf_implied=lambda fields: {"mup_enabled": True},
    defaults={
        "vocab_size": 200_192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "max_position_embeddings": 16_384,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "sliding_window": 1024,
    },
)
