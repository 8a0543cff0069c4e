"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers; some have routed
experts. And LFM3 (2026), whose attention has a window in some layers and a gate for each head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import (
    Decoder,
    GatedOutputAttention,
    GroupedQueryAttention,
    PreNormLayer,
    SandwichLayer,
    feed_forward,
    mixer,
)
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, Router, corrected_router, read_experts
from kvik.spec.fields import MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.layers import (
    CONV,
    FULL,
    SLIDING,
    LayerSpec,
    layer_types,
    layers_with_states,
    read_window,
)
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ExpertNames(
    gate_up=("experts.{}.w1", "experts.{}.w3"), down="experts.{}.w2", correction="expert_bias"
)


class ShortConvolution:
    """A convolution over each channel's last inputs, gated before and after."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, state: StateSpec
    ) -> None:
        hidden, bias = spec.hidden_size, state.bias
        self.hidden = hidden
        self.inputs = builder.linear("in_proj", hidden, 3 * hidden, bias=bias, role="qkv")
        self.gated = builder.gated()
        self.conv = builder.causal_conv("conv", layer, state)
        self.out = builder.linear("out_proj", hidden, hidden, bias=bias, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        before, behind, values = self.inputs(x, ctx).split_with_sizes((self.hidden,) * 3, 1)
        mixed = self.conv(self.gated(values, before), ctx)
        return self.out(self.gated(mixed, behind), ctx, residual)


conv_mixer = partial(mixer, keeper=ShortConvolution, scope=CONV)
feed = partial(feed_forward, scope="feed_forward", names=NAMES, gate_up=("w1", "w3"), down="w2")
Lfm2Attention = partial(GroupedQueryAttention, o="out_proj", norms=("q_layernorm", "k_layernorm"))
Lfm2Layer = partial(
    PreNormLayer,
    attention=partial(conv_mixer, attention=Lfm2Attention),
    feed=feed,
    norms=("operator_norm", "ffn_norm"),
)
Lfm3Layer = partial(
    SandwichLayer,
    attention=partial(conv_mixer, attention=partial(GatedOutputAttention, each_head=True)),
    feed=feed,
    norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
)


def lfm2_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Convolution layers are given by `layer_types`, or are those not in `full_attn_idxs`."""
    state = convolution_state(fields)
    if "layer_types" in fields:
        types = layer_types(fields, layers, other=CONV)
    else:
        attending: Collection[float] = range(layers)
        if "full_attn_idxs" in fields:
            attending = fields.numbers("full_attn_idxs", 0, layers - 1)
        types = tuple(FULL if i in attending else CONV for i in range(layers))
    attends = LayerSpec(None, read_rope(fields, positions))
    return layers_with_states(fields, attends, CONV, LayerSpec(state=state), types)


def convolution_state(fields: Fields) -> StateSpec:
    width = fields.integer("conv_L_cache", 2, MAX_TAPS, 3)
    bias = fields.boolean("conv_bias", False)
    return StateSpec(fields.integer("hidden_size", 1, MAX_WIDTH), width, bias)


def lfm3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Convolutions, and attention with and without a window, whose rotary positions differ. Without
    `layer_types`, each fourth layer is of either kind of attention."""
    kinds = {CONV: LayerSpec(state=convolution_state(fields))}
    window = read_window(fields)
    for kind, seen in ((FULL, None), (SLIDING, window)):
        kinds[kind] = LayerSpec(seen, read_rope(fields, positions, layer_type=kind))
    types = fields.strings("layer_types") or tuple(
        FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(layers)
    )
    if len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in kinds:
            raise fields.error("layer_types", f"must hold {', '.join(kinds)}, not {shown(kind)}")
    if set(types) == {CONV}:
        raise fields.error("layer_types", "must hold a layer with attention at least")
    return tuple(kinds[kind] for kind in types)


def lfm2_inner(fields: Fields) -> int:
    """Return the inner size of the MLP; the file gives it before an adjustment."""
    key = "block_ff_dim" if "block_ff_dim" in fields else "intermediate_size"
    size = fields.integer(key, 1, MAX_WIDTH, 12_288)
    if not fields.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    if not fields.is_null("block_ffn_dim_multiplier"):
        multiple = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        size = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * size)
        size = -(-size // multiple) * multiple
    return size


LFM2 = Architecture(
    "Lfm2ForCausalLM",
    "lfm2",
    "LFM2, dense",
    partial(
        Decoder, make_layer=Lfm2Layer, names=("embed_tokens", "layers", "embedding_norm", "lm_head")
    ),
    layers=lfm2_layers,
    inner=lfm2_inner,
    qk_norm=True,
    tied=True,
    eos_token_ids=(2,),
    defaults={
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    keys={"rms_norm_eps": "norm_eps"},
    gguf="lfm2",
    gguf_names={
        "token_embd_norm": "model.embedding_norm",
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
    },
    gguf_implied=lambda fields: {"block_auto_adjust_ff_dim": False},
)


def lfm2_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Layers after the first `num_dense_layers` have experts."""
    dense = fields.integer("num_dense_layers", 0, MAX_LAYERS, 2)
    return read_experts(fields, layers, router=lfm2_router, first_dense=dense)


def lfm2_router(fields: Fields, experts: int, active: int) -> Router:
    router = corrected_router(fields, experts, active)
    return replace(router, corrected=fields.boolean("use_expert_bias", True))


LFM2_MOE = replace(
    LFM2,
    name="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    models="LFM2 with experts",
    inner=None,
    experts=lfm2_experts,
    gguf="lfm2moe",
    gguf_names={**LFM2.gguf_names, **gguf_experts("feed_forward", NAMES)},
    gguf_implied=None,
    defaults={
        **LFM2.defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
)
LFM3 = Architecture(
    "Lfm3ForCausalLM",
    "lfm3",
    "LFM3",
    partial(
        Decoder, make_layer=Lfm3Layer, names=("embed_tokens", "layers", "embedding_norm", "lm_head")
    ),
    layers=lfm3_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    tied=True,
    head_dim=128,
    eos_token_ids=(124_900,),
    fixed={"use_sandwich_norm": True, "use_attention_gate": True},
    defaults={
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    keys={"rms_norm_eps": "norm_eps"},
)
