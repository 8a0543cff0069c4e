"""MPT (MosaicML 2023): ALiBi, LayerNorm without biases, and no other biases; q, k and v are one
matrix, and may be clipped."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import log2

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    last_norm,
    plain_mlp,
)
from kvik.spec.architecture import MAX_BIAS, Architecture
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, alibi_slopes
from kvik.spec.model import ModelScales

ATTENTION = "attn_config"  # key of an object
LIMIT, SCALE, LARGEST = "clip_qkv", "softmax_scale", "alibi_bias_max"  # keys in it
SWITCHES = {"alibi": True, "qk_ln": False, "prefix_lm": False, "attn_uses_sequence_id": False}


def mpt_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    inside, heads = fields.inside(ATTENTION), fields.integer("n_heads", 1, MAX_HEADS)
    inside.choice("attn_type", ("multihead_attention",), "multihead_attention")
    for key, value in SWITCHES.items():
        if inside.boolean(key, value) is not value:
            raise inside.error(key, f"must be {str(value).lower()}")
    fields.choice("norm_type", ("low_precision_layernorm", "layernorm"), "layernorm")
    if "logit_scale" in fields:
        raise fields.error("logit_scale", "must be null")
    slopes = alibi_slopes(heads, inside.number(LARGEST, 1e-6, 1e6, 8.0))
    return (LayerSpec(slopes=slopes),) * layers


def mpt_scales(fields: Fields) -> ModelScales:
    inside = fields.inside(ATTENTION)
    scale, limit = (
        inside.number(key, 1e-6, 1e6) if key in inside else None for key in (SCALE, LIMIT)
    )
    return ModelScales(attention=scale, qkv_limit=limit)


def mpt_inner(fields: Fields) -> int:
    hidden = fields.integer("d_model", 1, MAX_WIDTH)
    return hidden * fields.integer("expansion_ratio", 1, MAX_WIDTH // hidden, 4)


MPT = Architecture(
    "MptForCausalLM",
    "mpt",
    "MPT",
    partial(
        Decoder,
        make_layer=partial(
            PreNormLayer,
            attention=partial(GroupedQueryAttention, scope="attn", qkv=("Wqkv",), o="out_proj"),
            feed=partial(plain_mlp, up="up_proj", down="down_proj", scope="ffn"),
            norms=("norm_1", "norm_2"),
            norm_bias=False,
        ),
        make_norm=partial(last_norm, name="norm_f", bias=False),
        scopes=("transformer", ""),
        names=("wte", "blocks", "", "lm_head"),
    ),
    layers=mpt_layers,
    scales=mpt_scales,
    inner=mpt_inner,
    activations=("gelu",),
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    keys={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    fixed={"no_bias": True},
    gguf="mpt",
    gguf_names={
        "blk": "transformer.blocks",
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    gguf_scales=(LIMIT,),
    gguf_extra=lambda spec: {MAX_BIAS: -log2(min(spec.layers[0].slopes))},
    gguf_implied=lambda fields: {ATTENTION: {key: fields.raw(key) for key in (LIMIT, LARGEST)}},
)
MPT_OF_ITS_OWN = replace(MPT, name="MPTForCausalLM")  # as its published files say
