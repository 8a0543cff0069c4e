"""Gemma (Gemma team 2024, arXiv 2403.08295), Gemma 2 (2024, arXiv 2408.00118) and Gemma 3 (2025,
arXiv 2503.19786).

Gains of norms are 1 + the stored value, embeddings are scaled by the square root of their width,
and the MLP gates by GELU. Gemma 2 also normalises after its blocks, every other layer has a window,
and scores and logits are capped. Gemma 3 caps neither and normalises the heads of q and k; five
layers with a window alternate with one without, and each kind has its own rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    SandwichLayer,
    feed_forward,
    last_norm,
)
from kvik.spec.architecture import Architecture
from kvik.spec.fields import Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types, mixed_layers, read_window
from kvik.spec.model import ModelScales
from kvik.spec.pooling import PoolingSpec, mean_vectors
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope

GEGLU = "gelu_tanh_and_mul"


norm_from_one = partial(last_norm, offset=1.0)  # its gain is 1 + the stored values
geglu = partial(feed_forward, activation=GEGLU)
GemmaLayer = partial(PreNormLayer, feed=geglu, offset=1.0)
VaultGemmaLayer = partial(GemmaLayer, norms=("input_layernorm", "pre_feedforward_layernorm"))
Gemma2Layer = partial(SandwichLayer, feed=geglu, offset=1.0)
Gemma3Layer = partial(
    Gemma2Layer, attention=partial(GroupedQueryAttention, norms=("q_norm", "k_norm"), offset=1.0)
)


def gemma_scales(fields: Fields) -> ModelScales:
    return ModelScales(embedding=math.sqrt(fields.integer("hidden_size", 1, MAX_POSITIONS)))


def gemma2_scales(fields: Fields) -> ModelScales:
    return replace(
        gemma3_scales(fields),
        attention_cap=softcap(fields, "attn_logit_softcapping", 50.0),
        logits_cap=softcap(fields, "final_logit_softcapping", 30.0),
    )


def softcap(fields: Fields, key: str, default: float | None = None) -> float | None:
    """Return the cap of scores or logits; None: no cap."""
    return None if fields.is_null(key) else fields.number(key, 1e-3, 1e9, default)


def gemma3_scales(fields: Fields) -> ModelScales:
    width = fields.number("query_pre_attn_scalar", 1.0, 1e9, 256.0)
    embedding = math.sqrt(fields.integer("hidden_size", 1, MAX_POSITIONS))
    return ModelScales(embedding=embedding, attention=width**-0.5)


def gemma3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with a window, and others by `sliding_window_pattern` or `layer_types`."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.raw(key) is not None:
            raise fields.error(key, "must be null")
    every = fields.integer("sliding_window_pattern", 1, MAX_POSITIONS, 6)
    types, window = layer_types(fields, layers, every), read_window(fields)
    ropes = gemma3_ropes(fields, types, positions)
    return tuple(LayerSpec(window if kind == SLIDING else None, ropes[kind]) for kind in types)


def gemma3_ropes(fields: Fields, types: Sequence[str], positions: int) -> dict[str, RopeSpec]:
    """Return the rotary positions of each kind of layer: those with a window have a small base, the
    others a large one, maybe scaled.

    `max_position_embeddings` is the length after scaling, also of the kind "linear".
    """
    if FULL in fields.inside("rope_parameters") or SLIDING in fields.inside("rope_parameters"):
        ropes = {kind: read_rope(fields, positions, layer_type=kind) for kind in set(types)}
    else:
        slow = fields if "rope_theta" in fields else fields.changed({"rope_theta": 1e6})
        fast = fields.number("rope_local_base_freq", 1.0, 1e12, 1e4)
        ropes = {
            FULL: read_rope(slow, positions),
            SLIDING: RopeSpec(theta=fast, original_max_position=positions),
        }
    return {
        kind: replace(rope, original_max_position=int(positions / rope.factor))
        if rope.kind == "linear"
        else rope
        for kind, rope in ropes.items()
    }


def embedding_gemma_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Like Gemma 3, but bidirectional: queries see half of a window on either side."""
    if not fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "must be true for a model without a head")
    return tuple(
        replace(
            layer,
            window=None,
            bidirectional=layer.window.keys // 2 if layer.window else MAX_POSITIONS,
        )
        for layer in gemma3_layers(fields, layers, positions)
    )


def embedding_gemma_vectors(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    """The mean of all tokens, unless files say otherwise. Vectors were trained to be truncated
    (Vera et al. 2025, arXiv 2509.20354, section 2.2)."""
    return replace(mean_vectors(fields, hidden, eps), dimensions=(128, 256, 512))


def implied_scale(fields: Fields, *, large: int) -> dict[str, object]:
    """Return the scale of scores; the 27B, which has `large` layers, has another rule."""
    hidden = fields.integer("hidden_size", 1, MAX_POSITIONS)
    heads = fields.integer("num_attention_heads", 1, MAX_POSITIONS)
    layers = fields.integer("num_hidden_layers", 1, MAX_POSITIONS)
    width = hidden / heads if layers == large else fields.raw("head_dim")
    return {"query_pre_attn_scalar": width}


GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


GEMMA = Architecture(
    "GemmaForCausalLM",
    "gemma",
    "Gemma",
    partial(Decoder, make_layer=GemmaLayer, make_norm=norm_from_one),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    activations=("gelu_pytorch_tanh", "gelu"),
    scales=gemma_scales,
    tied=True,
    head_dim=256,
    eos_token_ids=(1,),
    gguf="gemma",
)
GEMMA2 = replace(
    GEMMA,
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    models="Gemma 2",
    make=partial(Decoder, make_layer=Gemma2Layer, make_norm=norm_from_one),
    layers=partial(mixed_layers, every=2),
    activations=("gelu_pytorch_tanh",),
    scales=gemma2_scales,
    keys={"hidden_act": "hidden_activation"},
    defaults={"num_key_value_heads": 4},
    fixed={"use_bidirectional_attention": False},
    gguf="gemma2",
    gguf_names=GGUF_NAMES,
    gguf_scales=("attn_logit_softcapping", "final_logit_softcapping"),
    gguf_implied=partial(implied_scale, large=46),
)
# VaultGemma (Google 2025, arXiv 2510.15001): without the norms after blocks.
VAULTGEMMA = replace(
    GEMMA2,
    name="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    models="VaultGemma",
    make=partial(Decoder, make_layer=VaultGemmaLayer, make_norm=norm_from_one),
    gguf=None,
)
GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    models="Gemma 3, text-only models",
    make=partial(Decoder, make_layer=Gemma3Layer, make_norm=norm_from_one),
    layers=gemma3_layers,
    qk_norm=True,
    scales=gemma3_scales,
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    gguf="gemma3",
    gguf_scales=(),
    gguf_implied=partial(implied_scale, large=62),
)
# The larger ones also read images; kvik runs their text model.
# EmbeddingGemma (Vera et al. 2025), an encoder.
EMBEDDING_GEMMA = replace(
    GEMMA3,
    name="Gemma3TextModel",
    models="EmbeddingGemma",
    layers=embedding_gemma_layers,
    pooled=embedding_gemma_vectors,
    fixed={},
    gguf=None,
)
