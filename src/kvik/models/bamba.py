"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2 layers, and some with attention in which half
of each head is rotated; every layer has an MLP."""

from __future__ import annotations

import math
from functools import partial

from kvik.errors import shown
from kvik.models import mamba2
from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer, feed_forward, mixer
from kvik.spec.architecture import Architecture
from kvik.spec.experts import listed_layers
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.kv import StateSpec
from kvik.spec.layers import LayerSpec
from kvik.spec.rope import read_rope

KEYS = {
    mamba2.HEADS: "mamba_n_heads",
    mamba2.HEAD_DIM: "mamba_d_head",
    mamba2.GROUPS: "mamba_n_groups",
    mamba2.SIZE: "mamba_d_state",
    mamba2.TAPS: "mamba_d_conv",
}
DEFAULTS = {"mamba_n_groups": 1, "mamba_d_state": 256}
FIXED = {"mamba_proj_bias": False}
LIMIT = "time_step_limit"
INDICES = "attn_layer_indices"


mamba_mixer = partial(mixer, attention=GroupedQueryAttention, keeper=mamba2.Mamba2, scope="mamba")


def check_limits(fields: Fields) -> None:
    """Raise `ModelError` if steps are limited."""
    limits = fields.raw(LIMIT)
    if limits is not None:
        # transformers writes infinity as an object
        free = [[0, math.inf], [0, {"__float__": "Infinity"}]]
        if limits not in free:
            raise fields.error(LIMIT, f"must be from 0 to infinity, not {shown(limits)}")


def mixer_state(fields: Fields) -> StateSpec:
    """Return the state of a layer with a mixer, whose steps must not be limited."""
    check_limits(fields)
    inner = fields.integer("hidden_size", 1, MAX_WIDTH) * fields.integer("mamba_expand", 1, 64, 2)
    return mamba2.mamba2_state(fields, KEYS, "mamba_conv_bias", inner)


def bamba_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers in `attn_layer_indices` have attention."""
    rope = read_rope(fields, positions, fraction=0.5)
    if rope.fraction != 0.5:
        reason = f"must be 0.5 for this architecture, not {rope.fraction:g}"
        raise fields.error("partial_rotary_factor", reason)
    attending = listed_layers(fields, INDICES)
    if not attending & set(range(layers)):
        raise fields.error(INDICES, f"must hold at least one of the {layers} layers")
    kinds = LayerSpec(None, rope), LayerSpec(state=mixer_state(fields))
    return tuple(kinds[layer not in attending] for layer in range(layers))


BAMBA = Architecture(
    "BambaForCausalLM",
    "bamba",
    "Bamba",
    partial(
        Decoder,
        make_layer=partial(
            PreNormLayer,
            attention=mamba_mixer,
            feed=partial(feed_forward, scope="feed_forward"),
            norms=("input_layernorm", "pre_ff_layernorm"),
        ),
        names=("embed_tokens", "layers", "final_layernorm", "lm_head"),
    ),
    layers=bamba_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    eos_token_ids=(2,),
    keys=KEYS,
    fixed=FIXED,
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        **DEFAULTS,
    },
)
