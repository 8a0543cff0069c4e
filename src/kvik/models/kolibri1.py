"""Kolibri 1 (Aleph Alpha 2026): norms before and after each block; four layers with a window, then
one without positions; experts are chosen by logits with a correction and weighed by their sigmoid.
"""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, Layer, SandwichLayer, feed_forward
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import Router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import mixed_layers
from kvik.spec.model import ModelFacts

# Each with its names in published checkpoints and in those that transformers writes.
ATTENDED = "post_attn_norm", "post_self_attn_layernorm"
FED = "post_ffn_norm", "post_mlp_layernorm"
CORRECTIONS = "moe.router.expert_bias", "mlp.gate.e_score_correction_bias"


def kolibri_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    attended, fed, correction = (builder.one_of(*names) for names in (ATTENDED, FED, CORRECTIONS))
    norms = ("input_layernorm", attended, "post_attention_layernorm", fed)
    names = ExpertNames(
        router="mlp.gate",
        gate_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        down="mlp.experts.{}.down_proj",
        correction=correction,
        shared="mlp.shared_experts",
    )
    feed = partial(feed_forward, scope="", names=names)
    return SandwichLayer(spec, builder, layer, Qwen3Attention, feed, norms)


def logit_router(fields: Fields, experts: int, active: int) -> Router:
    normalised = fields.boolean("norm_topk_prob", False)
    return Router(experts, active, "logit", corrected=True, normalised=normalised)


KOLIBRI1 = Architecture(
    "Kolibri1ForCausalLM",
    "kolibri1",
    "Kolibri 1",
    partial(Decoder, make_layer=kolibri_layer),
    layers=partial(mixed_layers, every=5, full_rotary=False),
    experts=partial(
        read_experts,
        router=logit_router,
        shared_width="shared_expert_intermediate_size",
        gated=False,
    ),
    qk_norm=True,
    head_dim=128,
    keys={"intermediate_size": "moe_intermediate_size"},
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 2560,
        "num_hidden_layers": 50,
        "num_attention_heads": 48,
        "num_key_value_heads": 4,
        "max_position_embeddings": 262_144,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "sliding_window": 513,
    },
)
