"""Hunyuan 3 (Tencent 2026): a Llama with norms of heads, and experts that are chosen as in
DeepSeek-V3."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import PreNormLayer, feed_forward, without_predictors
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.declare import Architecture, ExpertNames
from kvik.spec.experts import Router, read_experts
from kvik.spec.fields import Fields

NAMES = ExpertNames(router="router.gate", correction="expert_bias", shared="shared_mlp")
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
