"""Qwen3.5 (Qwen team 2026): three gated delta nets to each layer of gated attention.

Gains of norms are 1 + what the checkpoint has, but for that behind a delta net.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.gemma import last_norm
from kvik.models.llama import Llama
from kvik.spec.declare import Architecture, FeedForward, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, layer_types, layers_with_states
from kvik.spec.model import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelFacts
from kvik.spec.rope import read_rope
from kvik.spec.states import MAX_TAPS, StateSpec

if TYPE_CHECKING:
    from torch import Tensor

LINEAR = "linear_attention"


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


MakeMLP = Callable[[ModelFacts, LayerBuilder, int], FeedForward]


def dense_mlp(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    return builder.at("mlp").gated_mlp(spec.hidden_size, spec.intermediate_size, bias=False)


class Qwen35Layer:
    """A delta net or attention, then an MLP; each reads the residual stream normalised and adds to
    it."""

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        make_mlp: MakeMLP = dense_mlp,
    ) -> None:
        state = spec.layers[layer].state
        norm = partial(builder.rms_norm, dim=spec.hidden_size, eps=spec.norm_eps, offset=1.0)
        self.mixer_norm = norm("input_layernorm", before="qkv")
        self.mixer: GatedDeltaNet | GatedAttention
        if state is not None:
            self.mixer = GatedDeltaNet(spec, builder.at("linear_attn"), layer, state)
        else:
            self.mixer = GatedAttention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = norm("post_attention_layernorm", before="gate_up")
        self.mlp = make_mlp(spec, builder, layer)

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
