"""OLMo Hybrid (Ai2 2026): three layers with a delta net and norms before blocks for each layer of
OLMo 2, whose attention has no positions in the published models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, Layer, PostNormLayer, PreNormLayer
from kvik.models.olmo2 import Olmo2Attention
from kvik.models.qwen3_5 import KEY_DIM, KEY_HEADS, VALUE_DIM, VALUE_HEADS, delta_state
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.kv import StateSpec
from kvik.spec.layers import LINEAR, LayerSpec, layer_types, layers_with_states
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

EVERY = 4  # layers, of which the last one attends
NORM_EPS = 1e-5  # after the delta rule, whatever the others have
NEGATIVE = "states may change their sign"


class OlmoDeltaNet:
    """A short convolution, then the gated delta rule (Yang et al. 2024), in which a token may
    reverse what the state holds for its key (Grazzi et al. 2024, arXiv 2411.12537)."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, state: StateSpec
    ) -> None:
        hidden, keys, values = spec.hidden_size, state.key_heads * state.key_dim, state.values
        self.widths = state.channels, values
        self.heads = state.value_heads, state.value_dim
        linear = partial(builder.linear, inputs=hidden, bias=False)
        names, widths = ("q_proj", "k_proj", "v_proj"), (keys, keys, values)
        self.inputs = linear((*names, "g_proj"), outputs=(*widths, values), role="qkv")
        gates = (state.value_heads,) * 2
        self.gates = linear(("b_proj", "a_proj"), outputs=gates, role="gates")
        parts = dict(zip(("q_conv1d", "k_conv1d", "v_conv1d"), widths, strict=True))
        self.conv = builder.causal_conv("conv1d", layer, state, silu=True, parts=parts)
        scale = 2.0 if spec.wiring == NEGATIVE else 1.0
        self.delta = builder.recurrence("A_log", "dt_bias", layer, state, beta_scale=scale)
        self.norm = builder.rms_norm("o_norm", state.value_dim, NORM_EPS, before="o")
        self.gated = builder.gated("silu")
        self.o = builder.linear("o_proj", values, hidden, bias=False, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        mixed, gate = self.inputs(x, ctx).split_with_sizes(self.widths, 1)
        values = self.delta(self.conv(mixed, ctx), self.gates(x, ctx), ctx)
        normed = self.norm(values.view(-1, *self.heads)).flatten(1)
        return self.o(self.gated(normed, gate), ctx, residual)


def olmo_hybrid_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    """Return a layer. transformers writes other names of norms than those it was published with."""
    state = spec.layers[layer].state
    after = builder.one_of("post_attention_layernorm", "feedforward_layer_norm")
    if state is None:
        norms = (after, "post_feedforward_layernorm")
        return PostNormLayer(spec, builder, layer, Olmo2Attention, norms=norms)
    norms = (builder.one_of("input_layernorm", "attention_layer_norm"), after)
    net = OlmoDeltaNet(spec, builder.at("linear_attn"), layer, state)
    return PreNormLayer(spec, builder, layer, lambda *_: net, norms=norms)


def olmo_hybrid_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Delta nets, and attention in each fourth layer, at least in one, or by `layer_types`."""
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    key_heads = fields.integer(KEY_HEADS, 1, MAX_HEADS, heads)
    key_dim = fields.integer(KEY_DIM, 1, MAX_WIDTH, max(1, 3 * hidden // (4 * key_heads)))
    usual = {KEY_HEADS: key_heads, VALUE_HEADS: heads, KEY_DIM: key_dim, VALUE_DIM: 2 * key_dim}
    defaults = {key: value for key, value in usual.items() if key not in fields}
    types = layer_types(fields, layers, min(EVERY, layers), LINEAR)
    has_rope = not fields.inside("rope_parameters").is_null("rope_theta")
    attends = LayerSpec(None, read_rope(fields, positions) if has_rope else None)
    keeps = LayerSpec(state=delta_state(fields.changed(defaults)))
    return layers_with_states(fields, attends, LINEAR, keeps, types)


OLMO_HYBRID = Architecture(
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    "OLMo Hybrid",
    partial(Decoder, make_layer=olmo_hybrid_layer),
    layers=olmo_hybrid_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    wiring=lambda fields: NEGATIVE if fields.boolean("linear_allow_neg_eigval", True) else "",
    eos_token_ids=(100_257,),
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 3840,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65_536,
    },
)
