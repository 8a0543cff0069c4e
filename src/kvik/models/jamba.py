"""Jamba (AI21 2024, arXiv 2403.19887): a layer with attention without positions for several with
Mamba; an MLP or routed experts in each."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer, feed_forward, mixer
from kvik.models.mamba import CONV_BIAS, RANK, SIZE, TAPS, Mamba, mamba_state
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames
from kvik.spec.experts import ExpertsSpec, expert_count, read_experts, softmax_router
from kvik.spec.fields import MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec

NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
KEYS = {
    SIZE: "mamba_d_state",
    TAPS: "mamba_d_conv",
    RANK: "mamba_dt_rank",
    CONV_BIAS: "mamba_conv_bias",
}


def every_few(fields: Fields, kind: str, layers: int, period: int, offset: int) -> list[bool]:
    """Return which layers are of a kind: one in each `period`, at an offset.

    Args:
        kind: prefix of the two keys.
        period, offset: their defaults.
    """
    period = fields.integer(f"{kind}_layer_period", 1, MAX_LAYERS, period)
    offset = fields.integer(f"{kind}_layer_offset", 0, period - 1, min(offset, period - 1))
    return [layer % period == offset for layer in range(layers)]


def jamba_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    inner = fields.integer("hidden_size", 1, MAX_WIDTH)
    inner *= fields.integer("mamba_expand", 1, 64, 2)
    eps = fields.number("rms_norm_eps", 0.0, 1.0)
    keeps = LayerSpec(state=mamba_state(fields.named(KEYS), inner, eps))
    attending = every_few(fields, "attn", layers, 8, 4)
    return tuple(LayerSpec() if attends else keeps for attends in attending)


def jamba_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    if expert_count(fields) == 1:
        return (None,) * layers
    read = read_experts(fields, layers, inner="intermediate_size", router=softmax_router)
    sparse = every_few(fields, "expert", layers, 2, 1)
    return tuple(experts if has else None for experts, has in zip(read, sparse, strict=True))


JAMBA = Architecture(
    "JambaForCausalLM",
    "jamba",
    "Jamba",
    partial(
        Decoder,
        make_layer=partial(
            PreNormLayer,
            attention=partial(
                mixer,
                attention=GroupedQueryAttention,
                keeper=partial(Mamba, norms=NORMS),
                scope="mamba",
            ),
            feed=partial(feed_forward, scope="feed_forward", names=ExpertNames(router="router")),
            norms=("input_layernorm", "pre_ff_layernorm"),
        ),
        names=("embed_tokens", "layers", "final_layernorm", "lm_head"),
    ),
    layers=jamba_layers,
    experts=jamba_experts,
    optional_experts=True,
    eos_token_ids=(2,),
    fixed={"mamba_proj_bias": False, "norm_topk_prob": False},
    defaults={
        "vocab_size": 65_536,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
)
