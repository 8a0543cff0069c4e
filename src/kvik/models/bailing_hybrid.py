"""Ling 3.0 (InclusionAI 2026): Kimi Linear's delta nets, whose states forget no more than a part in
a token, and latent attention in every sixth layer, with a gate for each head; experts in groups."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import QKV, PreNormLayer, feed_forward, mixer, without_predictors
from kvik.models.deepseek import DeepseekAttention
from kvik.models.kimi_linear import KEYS, KimiDeltaNet, kimi_experts
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.layers import LINEAR, LayerSpec, latent_layers, layer_types, layers_with_states
from kvik.spec.network import ForwardContext

if TYPE_CHECKING:
    from torch import Tensor

SCOPE, OUT, GATE = "attention", "dense", "g_proj"  # names in attention and in delta nets
NAMES = ExpertNames(correction="gate.expert_bias")
# The least bound of the logarithm of a decay; a state times e to this is 0 in float32.
LEAST = -100.0


class WideGates:
    """Computes what a delta net reads; the gates of channels come from the hidden state."""

    def __init__(self, builder: LayerBuilder, hidden: int, state: StateSpec) -> None:
        heads, width = state.value_heads, state.values
        self.parts = 3 * width, width
        linear = partial(builder.linear, bias=False)
        self.wide = linear((*QKV, GATE), hidden, (width,) * 4, role="qkv")
        self.gates = linear(("b_proj", "f_proj"), hidden, (heads, width), role="gates")

    def __call__(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] -> queries, keys and values [tokens, 3 * width], gates [tokens, heads
        * (1 + dim)], and the gates of outputs [tokens, width]."""
        qkv, gate = self.wide(x, ctx).split_with_sizes(self.parts, 1)
        return qkv, self.gates(x, ctx), gate


def bailing_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Delta nets, and latent attention in each `layer_group_size`-th layer or by `layer_types`."""
    if "q_lora_rank" in fields:
        raise fields.error("q_lora_rank", "must be absent: queries are computed from hidden states")
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    heads = fields.integer("linear_num_heads", 1, MAX_HEADS, heads)
    # transformers writes another `head_dim`, and this one beside it.
    dim = fields.integer("linear_head_dim", 1, MAX_WIDTH, fields.integer("head_dim", 1, MAX_WIDTH))
    taps = fields.integer("short_conv_kernel_size", 2, MAX_TAPS)
    taps = fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, taps)
    bound = fields.number("kda_lower_bound", LEAST, -1e-3)
    bounded = fields.boolean("kda_safe_gate", True)
    state = StateSpec.recurrent(
        heads, heads, dim, dim, taps, gates=1 + dim, bound=bound if bounded else 0.0
    )
    every = fields.integer("layer_group_size", 1, MAX_LAYERS)
    types = layer_types(fields, layers, every, LINEAR)
    attends, *_ = latent_layers(fields, layers, positions)
    return layers_with_states(fields, attends, LINEAR, LayerSpec(state=state), types)


BailingLayer = partial(
    PreNormLayer,
    attention=partial(
        mixer,
        attention=partial(DeepseekAttention, scope=SCOPE, o=OUT, gate=GATE, each_head=True),
        keeper=partial(KimiDeltaNet, make_inputs=WideGates, o=OUT),
        scope=SCOPE,
    ),
    feed=partial(feed_forward, names=NAMES),
)


BAILING_HYBRID = Architecture(
    "BailingHybridForCausalLM",
    "bailing_hybrid",
    "Ling 3.0",
    partial(
        without_predictors,
        make_layer=BailingLayer,
        names=("word_embeddings", "layers", "norm", "lm_head"),
    ),
    layers=bailing_layers,
    experts=partial(kimi_experts, first_dense=2),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    keys={"max_position_embeddings": "model_max_length"},
    # transformers writes the names of Kimi Linear.
    older={**KEYS, "max_position_embeddings": "model_max_length"},
    eos_token_ids=(156_895,),
    defaults={
        "vocab_size": 157_184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "model_max_length": 262_144,
        "q_lora_rank": None,
        "head_dim": 128,
        "rope_theta": 6e6,
        "short_conv_kernel_size": 4,
        "layer_group_size": 6,
        "kda_lower_bound": -5.0,
        "num_experts": 512,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 768,
        "routed_scaling_factor": 2.5,
    },
)
