"""DBRX (Databricks 2024): a mixture of experts with LayerNorm, whose queries, keys and values are
clipped. Checkpoints stack the rows of all experts of a layer."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    feed_forward,
    last_norm,
)
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames
from kvik.spec.experts import ExpertsSpec, Router, read_experts
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, rotary_layers
from kvik.spec.model import ModelScales

ATTENTION, EXPERTS = "attn_config", "ffn_config"  # keys of objects
LIMIT, WIDTH, NORMALISED = "clip_qkv", "ffn_hidden_size", "moe_normalize_expert_weights"
NAMES = ExpertNames(
    router="router.layer", gate_up=("experts.{}.w1", "experts.{}.v1"), down="experts.{}.w2"
)
NORMS = "norm_attn_norm.norm_1", "norm_attn_norm.norm_2"

attention = partial(GroupedQueryAttention, scope="norm_attn_norm.attn", qkv=("Wqkv",), o="out_proj")
experts = partial(feed_forward, scope="ffn", names=NAMES)


def dbrx_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Published files have the base of rotary positions among the facts of attention."""
    theta = fields.inside(ATTENTION).raw("rope_theta")
    if theta is not None and "rope_parameters" not in fields:
        fields = fields.changed({"rope_theta": theta})
    return rotary_layers(fields, layers, positions)


def dbrx_router(fields: Fields, experts: int, active: int) -> Router:
    normalised = not fields.is_null(NORMALISED)
    if normalised:
        fields.number(NORMALISED, 1.0, 1.0, 1.0)  # the weights are divided by this norm of them
    return Router(experts, active, normalised=normalised)


def dbrx_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    inside = fields.inside(EXPERTS)
    inside.inside("ffn_act_fn").choice("name", ("silu",), "silu")
    return read_experts(inside, layers, inner=WIDTH, active="moe_top_k", router=dbrx_router)


def dbrx_scales(fields: Fields) -> ModelScales:
    inside = fields.inside(ATTENTION)
    return ModelScales(qkv_limit=inside.number(LIMIT, 1e-6, 1e6) if LIMIT in inside else None)


DBRX = Architecture(
    "DbrxForCausalLM",
    "dbrx",
    "DBRX",
    partial(
        Decoder,
        make_layer=partial(
            PreNormLayer, attention=attention, feed=experts, norms=NORMS, norm_bias=False
        ),
        make_norm=partial(last_norm, name="norm_f", bias=False),
        scopes=("transformer", ""),
        names=("wte", "blocks", "", "lm_head"),
    ),
    layers=dbrx_layers,
    experts=dbrx_experts,
    rms_norm=False,
    scales=dbrx_scales,
    inner=lambda fields: fields.inside(EXPERTS).integer(WIDTH, 1, MAX_WIDTH),
    kv_heads=lambda fields: fields.inside(ATTENTION).integer("kv_n_heads", 1, MAX_HEADS, 1),
    keys={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
)
