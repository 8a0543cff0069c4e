"""Llama 4 (Meta 2025): layers with rotary positions see a chunk of the context, the others see all
of it without positions; each token has one routed and one shared expert."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    AttentionBlock,
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    feed_forward,
)
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, Router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import CHUNKED, FULL, LayerSpec, QueryScale, layer_types, turning
from kvik.spec.model import ModelFacts
from kvik.spec.rope import MAX_POSITIONS, read_rope
from kvik.spec.visible_keys import Window

NAMES = ExpertNames(router="router", shared="shared_expert")
GGUF_NAMES = {
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **gguf_experts("feed_forward", NAMES),
}


def llama4_attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    """In layers with rotary positions, heads of q and k are normalised without gains, before the
    rotation, which does not change their length."""
    normed = spec.qk_norm and spec.layers[layer].rope is not None
    return GroupedQueryAttention(spec, builder, layer, norms=("", "") if normed else ())


Llama4Layer = partial(
    PreNormLayer,
    attention=llama4_attention,
    feed=partial(feed_forward, scope="feed_forward", names=NAMES),
)


def llama4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with rotary positions see chunks, the others everything, unless `layer_types` says
    otherwise."""
    rope = read_rope(fields, positions, interleaved=True)
    if rope.kind in ("yarn", "longrope") and fields.boolean("use_qk_norm", True):
        raise fields.error("use_qk_norm", f"must be false with rope_type {rope.kind!r}")
    turned = turning(fields, layers)
    types = tuple(CHUNKED if rotates else FULL for rotates in turned)
    if "layer_types" in fields:
        types = layer_types(fields, layers, other=CHUNKED)
    chunk = None
    if CHUNKED in types:
        chunk = Window(fields.integer("attention_chunk_size", 1, MAX_POSITIONS), chunked=True)
    tuned = fields.raw("attn_temperature_tuning")  # older files have a number
    scale = None
    if bool(tuned) if isinstance(tuned, int) else fields.boolean("attn_temperature_tuning", True):
        step = fields.integer("floor_scale", 1, MAX_POSITIONS)
        scale = QueryScale(step, fields.number("attn_scale", 0.0, 1e6))
    return tuple(
        LayerSpec(
            chunk if kind == CHUNKED else None,
            rope if turns else None,
            query_scale=None if turns else scale,
        )
        for kind, turns in zip(types, turned, strict=True)
    )


def sigmoid_router(fields: Fields, experts: int, active: int) -> Router:
    """The sigmoid of an expert's logit multiplies the expert's input."""
    return Router(experts, active, "sigmoid", normalised=False, weigh_inputs=True)


def llama4_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Every token also goes through a shared expert of the same width."""
    routed = read_experts(fields, layers, inner="intermediate_size", router=sigmoid_router)
    return tuple(experts and replace(experts, shared=experts.inner) for experts in routed)


def gguf_implied(fields: Fields) -> dict[str, object]:
    """Files use the usual name for the width of experts. Only Maverick (128 experts) does not
    normalise heads."""
    inner, count = fields.raw("moe_intermediate_size"), fields.raw("num_local_experts")
    return {"intermediate_size": inner, "use_qk_norm": count != 128}


LLAMA4 = Architecture(
    "Llama4ForCausalLM",
    "llama4_text",
    "Llama 4, text-only models",
    partial(Decoder, make_layer=Llama4Layer),
    layers=llama4_layers,
    experts=llama4_experts,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="use_qk_norm",
    head_dim=128,
    eos_token_ids=(2,),
    keys={"intermediate_size": "intermediate_size_mlp"},
    defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    gguf="llama4",
    gguf_names=GGUF_NAMES,
    gguf_implied=gguf_implied,
)
# Scout and Maverick also read images; kvik runs their text model.
LLAMA4_IMAGES = replace(
    LLAMA4,
    name="Llama4ForConditionalGeneration",
    model_type="llama4",
    models="Llama 4, text part of models that read images",
    gguf=None,
)
