"""ERNIE 4.5 (Baidu 2025): a Llama that rotates pairs of neighbours; the larger ones have routed
experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import Decoder, PreNormLayer, feed_forward
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, Router, read_experts
from kvik.spec.fields import MAX_LAYERS, Fields
from kvik.spec.layers import rotary_layers
from kvik.spec.model import ModelFacts

NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_row=True)
PREDICTOR = ("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj")

ERNIE4_5 = Architecture(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    "ERNIE 4.5, dense",
    Decoder,
    layers=partial(rotary_layers, interleaved=True),
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    tied=True,
    eos_token_ids=(2,),
    head_dim=128,
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    gguf="ernie4_5",
)


def ernie_moe(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    for scope in PREDICTOR:
        builder.skip(f"model.{scope}")
    feed = partial(feed_forward, names=NAMES)
    return Decoder(spec, builder, partial(PreNormLayer, feed=feed))


def ernie_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Each `moe_layer_interval`-th layer has experts, from `moe_layer_start_index` to
    `moe_layer_end_index`."""
    if fields.boolean("use_bias", False):
        raise fields.error("use_bias", "must be false with experts")
    first = fields.integer("moe_layer_start_index", 0, MAX_LAYERS, 1)
    last = fields.integer("moe_layer_end_index", -1, MAX_LAYERS, -1) % layers
    every = fields.integer("moe_layer_interval", 1, MAX_LAYERS, 1)
    shared = "moe_num_shared_experts"
    all_layers = read_experts(fields, layers, active="moe_k", router=ernie_router, shared=shared)
    return tuple(
        experts if first <= layer <= last and (layer + 1) % every == 0 else None
        for layer, experts in enumerate(all_layers)
    )


def ernie_router(fields: Fields, experts: int, active: int) -> Router:
    return Router(experts, active, corrected=True)


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    models="ERNIE 4.5 with experts",
    make=ernie_moe,
    experts=ernie_experts,
    head_dim=None,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
    },
    gguf=None,
)
