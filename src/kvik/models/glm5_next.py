"""GLM-5.3 (Z.ai 2026): residual streams that are mixed with each other; Kimi Linear's delta nets,
whose states forget no more than a part in a token; and in every fourth layer latent attention
without positions, over pools of keys that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.bailing_hybrid import LEAST
from kvik.models.decoder import feed_forward, mixer, skip_predictors
from kvik.models.deepseek import DeepseekAttention, read_index, sharing
from kvik.models.hy4 import StreamsDecoder, StreamsLayer, mixed_streams, read_limit
from kvik.models.kimi_linear import DELTA, KimiDeltaNet, read_delta
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.experts import corrected_router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import (
    FULL,
    INDEXED_TYPES,
    LINEAR,
    LayerSpec,
    layer_types,
    read_latent,
)
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward

ACTIVATION = "limited_swiglu"
MAX_POOL = 128  # keys
EVERY = 4  # without `layer_types`, every fourth layer attends


def glm5_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Return the MLP of a layer, or its experts, all with limits."""
    experts = spec.layers[layer].experts
    if experts is None:
        return feed_forward(spec, builder, layer, activation=ACTIVATION)
    return builder.at("mlp").experts(spec.hidden_size, experts, activation=ACTIVATION)


def glm5_attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> DeepseekAttention:
    return DeepseekAttention(spec, builder, layer, eps=spec.norm_eps)


Glm5Layer = partial(
    StreamsLayer,
    attention=partial(mixer, attention=glm5_attention, keeper=KimiDeltaNet, scope="self_attn"),
    feed=glm5_feed,
)


def glm5_next(spec: ModelFacts, builder: LayerBuilder) -> StreamsDecoder:
    """Return the text model; heads that predict further tokens are not read."""
    skip_predictors(spec, builder)
    return StreamsDecoder(spec, builder, Glm5Layer, mean=True)


def glm5_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Delta nets, and latent attention over pools of keys, by `layer_types`."""
    read_limit(fields)
    bound = fields.number("linear_lower_bound", LEAST, -1e-3, -5.0)
    bound = fields.inside(DELTA).number("gate_lower_bound", LEAST, -1e-3, bound)
    state = read_delta(fields, 64, bound)
    streams = mixed_streams(fields)
    pool = fields.integer("index_kpool", 2, MAX_POOL, 16)
    tail = "index_kpool_always_select_tail"
    if not fields.boolean(tail, True):
        raise fields.error(tail, "must be true: the last keys are always read")
    latent = read_latent(fields, turned=False)
    index = read_index(fields, latent, heads=32, pool=pool)
    if "layer_types" in fields:
        kinds = [FULL if kind in INDEXED_TYPES else kind for kind in fields.strings("layer_types")]
        fields = fields.changed({"layer_types": kinds})
    types = layer_types(fields, layers, EVERY, LINEAR)
    attends = LayerSpec(latent=latent, index=index, hyper=streams)
    shares = replace(attends, index=replace(index, shared=True))
    keeps = LayerSpec(state=state, hyper=streams)
    return tuple(
        keeps if kind == LINEAR else shares if shared else attends
        for kind, shared in zip(types, sharing(fields, layers), strict=True)
    )


GLM5_NEXT = Architecture(
    "Glm5NextForConditionalGeneration",
    "glm5_next",
    "GLM-5.3",
    glm5_next,
    layers=glm5_layers,
    experts=partial(
        read_experts, router=corrected_router, shared="n_shared_experts", first_dense=3
    ),
    indexed=INDEXED_TYPES,
    fixed={"attention_bias": False},
    defaults={
        "vocab_size": 154_880,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
    },
)
