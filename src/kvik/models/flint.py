"""Flint (Recursive 2026): most layers have a window, the others no positions; heads of queries and
keys have norms, and each head a learned sink. Experts are chosen by the sigmoid of their logits,
and a shared one serves every token."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import AttentionBlock, Decoder, GroupedQueryAttention, PreNormLayer
from kvik.models.qwen3 import shared_experts
from kvik.spec.architecture import Architecture
from kvik.spec.declare import SINKS, LayerBuilder
from kvik.spec.experts import Router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, mixed_layers
from kvik.spec.model import ModelFacts

NORMS = "q_norm", "k_norm"


def attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    sink_name = builder.at("self_attn").one_of("softmax_offset", SINKS)
    return GroupedQueryAttention(spec, builder, layer, norms=NORMS, sinks=True, sink_name=sink_name)


def flint_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """The layers without a window: those in `layer_types`, else the first, every fourth one from
    the second and the last."""
    if "layer_types" not in fields:
        types = [SLIDING if i % 4 != 1 else FULL for i in range(layers)]
        types[0] = types[-1] = FULL
        fields = fields.changed({"layer_types": types})
    return mixed_layers(fields, layers, positions, every=0, full_rotary=False)


def sigmoid_router(fields: Fields, experts: int, active: int) -> Router:
    normalised = fields.boolean("norm_topk_prob", True)
    return Router(experts, active, "sigmoid", normalised=normalised)


FLINT = Architecture(
    "FlintForCausalLM",
    "flint",
    "Flint",
    partial(Decoder, make_layer=partial(PreNormLayer, attention=attention, feed=shared_experts)),
    layers=flint_layers,
    experts=partial(
        read_experts,
        router=sigmoid_router,
        shared_width="shared_expert_intermediate_size",
        gated=False,
    ),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=128,
    defaults={
        "vocab_size": 150_144,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 262_144,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "mlp_only_layers": [0, 1],
        "sliding_window": 513,
    },
)
