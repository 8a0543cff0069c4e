"""Hunyuan (Tencent 2025): a Llama whose query and key heads are normalised after the rotation, with
experts or without; and Hunyuan 3 (2026), with norms before it and experts that are chosen as in
DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    feed_forward,
    without_predictors,
)
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames
from kvik.spec.experts import ExpertsSpec, Router, normalised_router, read_experts
from kvik.spec.fields import MAX_HEAD_DIM, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec
from kvik.spec.rope import MAX_FACTOR, read_rope

SHARED = "shared_mlp"
V1_NAMES = ExpertNames(router="gate.wg", shared=SHARED)
V1Layer = partial(
    PreNormLayer,
    attention=partial(GroupedQueryAttention, norms=("query_layernorm", "key_layernorm")),
    feed=partial(feed_forward, names=V1_NAMES),
)


def v1_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Rotary positions; for long contexts, a constant `alpha` stretches their base."""
    key = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = fields.inside(key)
    if "dynamic" in (rope.raw("rope_type"), rope.raw("type")) and rope.raw("alpha"):
        alpha = rope.number("alpha", 1e-6, MAX_FACTOR)
        dim = fields.integer("head_dim", 4, MAX_HEAD_DIM)
        place = rope if "rope_theta" in rope else fields
        theta = place.number("rope_theta", 1.0, 1e12, 10_000.0) * alpha ** (dim / (dim - 2))
        fields = fields.changed({"rope_scaling": None, "rope_parameters": {"rope_theta": theta}})
    read = replace(read_rope(fields, positions), then_normed=True)
    return (LayerSpec(None, read),) * layers


# Keys that may have a value for each layer.
PER_LAYER = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def in_layer(fields: Fields, number: int, layers: int) -> Fields:
    """Return the fields with the values of one layer in place of lists."""
    values = {}
    for key in PER_LAYER:
        value = fields.raw(key)
        if isinstance(value, list):
            if len(value) != layers:
                raise fields.error(key, f"must have {layers} entries, not {len(value)}")
            values[key] = value[number]
    return fields.changed(values)


def v1_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Every token also goes through a shared expert of the same width."""
    fields.integer("moe_layer_num_skipped", 0, 0, 0)
    width = fields.integer("intermediate_size", 1, MAX_WIDTH)
    specs = []
    for number in range(layers):
        layer = in_layer(fields, number, layers)
        layer.integer("moe_intermediate_size", width, width, width)
        layer.integer("num_shared_expert", 1, 1, 1)
        spec = read_experts(
            layer, layers, inner="intermediate_size", active="moe_topk", router=normalised_router
        )[number]
        specs.append(spec and replace(spec, shared=width))
    return tuple(specs)


def v1_implied(fields: Fields) -> dict[str, object]:
    """Files use the usual names."""
    return {
        "moe_topk": fields.raw("num_experts_per_tok"),
        "intermediate_size": fields.raw("moe_intermediate_size"),
    }


HUNYUAN = Architecture(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    "Hunyuan, dense",
    partial(Decoder, make_layer=V1Layer),
    layers=v1_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    fixed={"mlp_bias": False, "use_qk_norm": True, "use_cla": False},
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(2,),
    gguf="hunyuan-dense",
    gguf_names={
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
)
HUNYUAN_MOE = replace(
    HUNYUAN,
    name="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    models="Hunyuan with experts",
    experts=v1_experts,
    fixed={**HUNYUAN.fixed, "use_mixed_mlp_moe": True, "norm_topk_prob": True},
    defaults={**HUNYUAN.defaults, "num_experts": 1, "moe_topk": 1},
    gguf="hunyuan-moe",
    gguf_names={**HUNYUAN.gguf_names, **gguf_experts("mlp", V1_NAMES)},
    gguf_implied=v1_implied,
)

NAMES = ExpertNames(router="router.gate", correction="expert_bias", shared=SHARED)
Hy3Layer = partial(PreNormLayer, attention=Qwen3Attention, feed=partial(feed_forward, names=NAMES))


def hy3_router(fields: Fields, experts: int, active: int) -> Router:
    scale = fields.number("router_scaling_factor", 0.0, 1e6, 2.826)
    return Router(experts, active, "sigmoid", corrected=True, scale=scale)


HY3 = Architecture(
    "HYV3ForCausalLM",
    "hy_v3",
    "Hunyuan 3",
    partial(without_predictors, make_layer=Hy3Layer),
    experts=partial(read_experts, router=hy3_router, shared="num_shared_experts", first_dense=1),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=128,
    fixed={"mlp_bias": False, "qk_norm": True, "route_norm": True}
    | {"moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
    },
)
