"""StableLM 2 (Bellagente et al. 2024, arXiv 2402.17834): a Llama with LayerNorm, in which a quarter
of each head is rotated; in some, attention and MLP are parallel, or heads are normalised."""

from __future__ import annotations

from functools import partial

from kvik.models.cohere import HeadNormAttention
from kvik.models.decoder import (
    AttentionBlock,
    Decoder,
    GroupedQueryAttention,
    Layer,
    ParallelLayer,
    PreNormLayer,
)
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import rotary_layers
from kvik.spec.model import ModelFacts

PARALLEL = "parallel"
NORMS = ("q_layernorm.norms.{}", "k_layernorm.norms.{}")


def stablelm_attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    """Heads of q and k are normalised only in the 12B."""
    if not spec.qk_norm:
        return GroupedQueryAttention(spec, builder, layer)
    return HeadNormAttention(spec, builder, layer, NORMS)


def stablelm_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    make = ParallelLayer if spec.wiring == PARALLEL else PreNormLayer
    return make(spec, builder, layer, stablelm_attention)


def stablelm_wiring(fields: Fields) -> str:
    return PARALLEL if fields.boolean("use_parallel_residual", False) else ""


STABLELM = Architecture(
    "StableLmForCausalLM",
    "stablelm",
    "StableLM 2",
    partial(Decoder, make_layer=stablelm_layer),
    layers=partial(rotary_layers, fraction=0.25),
    qkv_bias="use_qkv_bias",
    qk_norm="qk_layernorm",
    wiring=stablelm_wiring,
    rms_norm=False,
    eos_token_ids=(0,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    gguf="stablelm",
    gguf_names={"attn_q_norm": f"self_attn.{NORMS[0]}", "attn_k_norm": f"self_attn.{NORMS[1]}"},
)
