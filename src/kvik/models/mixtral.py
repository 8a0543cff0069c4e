"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): a Mistral whose MLPs are routed experts; and
MiniMax-M2, which has the same names."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, PreNormLayer, feed_forward
from kvik.models.olmo2 import Olmo2Attention
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames
from kvik.spec.experts import corrected_router, normalised_router, read_experts
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec, rotary_layers, windowed_layers

NAMES = ExpertNames(
    gate_up=("experts.{}.w1", "experts.{}.w3"),
    down="experts.{}.w2",
    correction="e_score_correction_bias",
)
GGUF_NAMES = gguf_experts("block_sparse_moe", NAMES)
experts = partial(feed_forward, scope="block_sparse_moe", names=NAMES)

MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    "Mixtral",
    partial(Decoder, make_layer=partial(PreNormLayer, feed=experts)),
    layers=windowed_layers,
    experts=partial(read_experts, inner="intermediate_size", router=normalised_router),
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    eos_token_ids=(2,),
    gguf="llama",
    gguf_names=GGUF_NAMES,
    gguf_pairs=True,
)


def minimax_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """In published files, `rotary_dim` is the rotated width of a head."""
    width, head_dim = (fields.integer(key, 1, MAX_WIDTH, 128) for key in ("rotary_dim", "head_dim"))
    fraction = width / head_dim if "rotary_dim" in fields else 1.0
    return rotary_layers(fields, layers, positions, fraction=fraction)


# MiniMax-M2 (MiniMax 2025): queries and keys are normalised over all heads together, a part of each
# head is rotated, and the router has a correction.
MINIMAX_M2 = Architecture(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    "MiniMax-M2",
    partial(Decoder, make_layer=partial(PreNormLayer, attention=Olmo2Attention, feed=experts)),
    layers=minimax_layers,
    experts=partial(read_experts, inner="intermediate_size", router=corrected_router),
    head_dim=128,
    eos_token_ids=(200_020,),
    defaults={"num_key_value_heads": 8, "rope_theta": 5e6},
    gguf="minimax-m2",
    gguf_names=GGUF_NAMES,
)
