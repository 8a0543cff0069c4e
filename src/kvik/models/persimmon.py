"""Persimmon (Adept 2023): LayerNorm with biases, also on each head of q and k; q, k and v are one
matrix, stored head by head, half of each head is rotated, and the MLP has a squared ReLU."""

from __future__ import annotations

from functools import partial

from kvik.models.cohere import HeadNormAttention
from kvik.models.decoder import AttentionBlock, Decoder, PreNormLayer
from kvik.models.gpt_neox import HEAD_BY_HEAD, NEOX_MLP
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.layers import rotary_layers
from kvik.spec.model import ModelFacts

NORMS = ("q_layernorm", "k_layernorm")


def attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    if not spec.qk_norm:
        return HEAD_BY_HEAD(spec, builder, layer)
    return HeadNormAttention(
        spec, builder, layer, NORMS, True, qkv=("query_key_value",), o="dense", by_head=True
    )


PERSIMMON = Architecture(
    "PersimmonForCausalLM",
    "persimmon",
    "Persimmon",
    partial(
        Decoder,
        make_layer=partial(PreNormLayer, attention=attention, feed=NEOX_MLP),
        names=("embed_tokens", "layers", "final_layernorm", "lm_head"),
    ),
    layers=partial(rotary_layers, fraction=0.5),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="qk_layernorm",
    activations=("relu2", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"),
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(2,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "max_position_embeddings": 16_384,
        "qk_layernorm": True,
    },
)
