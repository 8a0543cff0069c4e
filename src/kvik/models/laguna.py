"""Laguna (Poolside 2026): layers with a window may have more heads of queries than the others, and
other rotary positions; attention has a gate for each head or channel, through a softplus. Experts
are chosen with a correction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.errors import shown
from kvik.models.decoder import (
    AttentionBlock,
    Decoder,
    GatedOutputAttention,
    PreNormLayer,
    feed_forward,
)
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import Router, corrected_router, read_experts
from kvik.spec.fields import MAX_HEADS, Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, typed_layers
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward

EACH_HEAD, EACH_CHANNEL = "per-head", "per-element"
HEADS, KV_HEADS = "num_attention_heads_per_layer", "num_key_value_heads"
# Names in published checkpoints and in those that transformers writes.
CORRECTIONS = "experts.e_score_correction_bias", "gate.e_score_correction_bias"
SHARED = "shared_expert.down_proj", "shared_experts.down_proj"


def attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    each_head = spec.wiring == EACH_HEAD
    return GatedOutputAttention(spec, builder, layer, each_head, gate="g_proj", by="softplus")


def feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    mlp = builder.at("mlp")
    shared, _, _ = mlp.one_of(*SHARED).partition(".")
    names = ExpertNames(correction=mlp.one_of(*CORRECTIONS), shared=shared)
    return feed_forward(spec, builder, layer, names=names)


def laguna_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with and without a window, with as many heads as the file gives for each."""
    specs = typed_layers(fields, layers, positions, fraction=1.0)
    if HEADS not in fields:
        return specs
    counts = fields.numbers(HEADS, 1, MAX_HEADS)
    kv_heads = fields.integer(KV_HEADS, 1, MAX_HEADS)
    if len(counts) != layers or any(count % kv_heads for count in counts):
        reason = f"must have {layers} multiples of {KV_HEADS} ({kv_heads})"
        raise fields.error(HEADS, f"{reason}, not {shown([*counts])}")
    return tuple(replace(spec, heads=int(n)) for spec, n in zip(specs, counts, strict=True))


def laguna_wiring(fields: Fields) -> str:
    """Return what a gate multiplies; true means a head."""
    if fields.raw("gating") is True:
        return EACH_HEAD
    return fields.choice("gating", (EACH_HEAD, EACH_CHANNEL), EACH_HEAD)


def laguna_router(fields: Fields, experts: int, active: int) -> Router:
    fields.number("moe_router_logit_softcapping", 0.0, 0.0, 0.0)
    scale = fields.number("moe_routed_scaling_factor", 0.0, 1e6, 1.0)
    return replace(corrected_router(fields, experts, active), normalised=True, scale=scale)


LAGUNA = Architecture(
    "LagunaForCausalLM",
    "laguna",
    "Laguna",
    partial(Decoder, make_layer=partial(PreNormLayer, attention=attention, feed=feed)),
    layers=laguna_layers,
    experts=partial(
        read_experts,
        router=laguna_router,
        shared_width="shared_expert_intermediate_size",
        gated=False,
        first_dense=1,
    ),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=128,
    wiring=laguna_wiring,
    fixed={"moe_apply_router_weight_on_input": False},
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        KV_HEADS: 8,
        "max_position_embeddings": 131_072,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "sliding_window": 512,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)
