"""Qwen3.5 (Qwen team 2026), dense and with experts, and Qwen3-Next (2025): three gated delta nets
to each layer of gated attention.

Gains of norms are 1 + what the checkpoint has, but for that behind a delta net.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.gemma import last_norm
from kvik.models.llama import Llama
from kvik.models.qwen3 import shared_experts
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.experts import normalised_router, read_experts, softmax_router
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, layer_types, layers_with_states
from kvik.spec.model import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelFacts
from kvik.spec.rope import read_rope
from kvik.spec.states import MAX_TAPS, StateSpec

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = "linear_attention"
BY_KEY_HEAD = "by key head"  # how the inputs of delta nets are stored


class GatedAttention:
    """Grouped-query attention with RMSNorm on each head of q and k, then rotary positions in a part
    of each head; what heads give is gated."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        rope = spec.layers[layer].rope
        self.qkv = builder.heads(
            ("q_proj", "k_proj", "v_proj"),
            spec.hidden_size,
            (heads, kv_heads, kv_heads),
            dim,
            bias=spec.qkv_bias,
            rope=rope,
            gated=True,
        )
        norm = partial(builder.rms_norm, dim=dim, eps=spec.norm_eps, offset=1.0, rope=rope)
        self.attend = builder.attention(layer, dim, norms=(norm("q_norm"), norm("k_norm")))
        self.gated = builder.gated("sigmoid")
        self.o = builder.linear("o_proj", heads * dim, spec.hidden_size, bias=spec.o_bias, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] -> [tokens, hidden]."""
        q, gate, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        attended = self.attend(q, k, v, ctx, rotation)
        return self.o(self.gated(attended, gate.flatten(1)), ctx, residual)


class GatedDeltaNet:
    """A short convolution, then the gated delta rule (Yang et al. 2024); what its heads give is
    normalised and gated."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, state: StateSpec
    ) -> None:
        hidden, heads = spec.hidden_size, state.value_heads
        self.widths = state.channels, state.values
        self.heads = heads, state.value_dim
        if spec.wiring == BY_KEY_HEAD:
            wide, narrow = by_key_head(state)
            self.inputs = builder.linear(
                "in_proj_qkvz", hidden, len(wide), bias=False, role="qkv", order=wide
            )
            self.gates = builder.linear(
                "in_proj_ba", hidden, len(narrow), bias=False, role="qkv", order=narrow
            )
        else:
            names = ("in_proj_qkv", "in_proj_z")
            self.inputs = builder.linear(names, hidden, self.widths, bias=False, role="qkv")
            names = ("in_proj_b", "in_proj_a")
            self.gates = builder.linear(names, hidden, (heads, heads), bias=False, role="qkv")
        self.conv = builder.causal_conv("conv1d", layer, state, silu=True)
        self.delta = builder.gated_delta("A_log", "dt_bias", layer, state)
        self.norm = builder.rms_norm("norm", state.value_dim, spec.norm_eps)
        self.gated = builder.gated("silu")
        self.out = builder.linear("out_proj", state.values, hidden, bias=False, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        mixed, gate = self.inputs(x, ctx).split_with_sizes(self.widths, 1)
        values = self.delta(self.conv(mixed, ctx), self.gates(x, ctx), ctx)
        normed = self.norm(values.view(-1, *self.heads)).flatten(1)
        return self.out(self.gated(normed, gate), ctx, residual)


def by_key_head(state: StateSpec) -> tuple[list[int], list[int]]:
    """Return the order in which the rows of `in_proj_qkvz` and of `in_proj_ba` are taken, where
    those of a key head follow each other: its q, its k, the values that it serves and their gates;
    b and a of these values."""
    served = state.value_heads // state.key_heads
    values = served * state.value_dim
    wide = _head_by_head(state.key_heads, (state.key_dim, state.key_dim, values, values))
    return wide, _head_by_head(state.key_heads, (served, served))


def _head_by_head(heads: int, parts: tuple[int, ...]) -> list[int]:
    """Return all rows of the first part, then of the second, if those of a head are together."""
    begins = [sum(parts[:i]) for i in range(len(parts))]
    return [
        head * sum(parts) + begin + row
        for begin, size in zip(begins, parts, strict=True)
        for head in range(heads)
        for row in range(size)
    ]


class Qwen35Layer:
    """A delta net or attention, then an MLP or experts; each reads the residual stream normalised
    and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        state = spec.layers[layer].state
        norm = partial(builder.rms_norm, dim=spec.hidden_size, eps=spec.norm_eps, offset=1.0)
        self.mixer_norm = norm("input_layernorm", before="qkv")
        self.mixer: GatedDeltaNet | GatedAttention
        if state is not None:
            self.mixer = GatedDeltaNet(spec, builder.at("linear_attn"), layer, state)
        else:
            self.mixer = GatedAttention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = norm("post_attention_layernorm", before="gate_up")
        self.mlp = shared_experts(spec, builder, layer)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.mixer(self.mixer_norm(x), x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


def qwen3_5(spec: ModelFacts, builder: LayerBuilder) -> Llama:
    """Return the text model; layers that draft and the encoder of images are not read."""
    builder.skip("mtp", "visual", "model.visual")
    return Llama(spec, builder, Qwen35Layer, last_norm, ("model.language_model", "model"))


def qwen3_5_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Delta nets, and attention in each `full_attention_interval`-th layer, or as `layer_types`
    says."""
    key_heads = fields.integer("linear_num_key_heads", 1, MAX_HEADS, 16)
    value_heads = fields.integer("linear_num_value_heads", 1, MAX_HEADS, 32)
    if value_heads % key_heads:
        reason = f"must be a multiple of linear_num_key_heads ({key_heads}), not {value_heads}"
        raise fields.error("linear_num_value_heads", reason)
    state = StateSpec.delta(
        key_heads,
        value_heads,
        fields.integer("linear_key_head_dim", 1, MAX_WIDTH, 128),
        fields.integer("linear_value_head_dim", 1, MAX_WIDTH, 128),
        fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, 4),
    )
    every = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    types = layer_types(fields, layers, every, LINEAR)
    attends = LayerSpec(None, read_rope(fields, positions, fraction=0.25))
    return layers_with_states(fields, attends, LINEAR, LayerSpec(state=state), types)


QWEN3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    "Qwen 3.5, dense",
    qwen3_5,
    layers=qwen3_5_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=256,
    defaults={
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    },
)
# As they are published, with an encoder of images.
QWEN3_5_IMAGES = replace(
    QWEN3_5,
    name="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    models="Qwen 3.5, dense, text of those that read images",
    inside="text_config",
)
EXPERTS_3_5 = partial(
    read_experts, router=normalised_router, shared_width="shared_expert_intermediate_size"
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    models="Qwen 3.5 and 3.6 with experts",
    experts=EXPERTS_3_5,
    defaults={
        **QWEN3_5.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,
    },
)
QWEN3_5_MOE_IMAGES = replace(
    QWEN3_5_MOE,
    name="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    models="Qwen 3.5 and 3.6 with experts, text of those that read images",
    inside="text_config",
)
# Qwen3-Next (Qwen team 2025).
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    models="Qwen 3 Next",
    experts=partial(
        read_experts, router=softmax_router, shared_width="shared_expert_intermediate_size"
    ),
    wiring=lambda fields: BY_KEY_HEAD,
    defaults={
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
)
