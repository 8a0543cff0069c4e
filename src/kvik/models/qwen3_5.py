"""Qwen3.5 (Qwen team 2026), dense and with experts, and Qwen3-Next (2025): three gated delta nets
for each layer of gated attention.

Gains of norms are 1 + the stored value, except after a delta net.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer, mixer
from kvik.models.gemma import norm_from_one
from kvik.models.qwen3 import SHARED_NAMES, shared_experts
from kvik.spec.architecture import SEPARATE, Architecture, FilePart
from kvik.spec.declare import LayerBuilder
from kvik.spec.experts import normalised_router, read_experts, softmax_router
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.layers import LINEAR, LayerSpec, PredictorSpec, layer_types, layers_with_states
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, HeadsLayer, LinearLayer
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

# How delta nets are stored: inputs key head by key head; or apart, except for gates; or value heads
# ordered by their index within their key head: the first of every key head, then the second.
BY_KEY_HEAD, BY_VALUE_HEAD = "by key head", "in turns"
WHOLE = "inputs_stored_whole"  # key of config.json that only old GGUF files imply
QKVZ, BA = "in_proj_qkvz", "in_proj_ba"
QKV_Z, B_A = ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")


class GatedAttention(GroupedQueryAttention):
    """Grouped-query attention with RMSNorm on each head of q and k, then rotary positions in a part
    of each head; the output of the heads is gated."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        names = ("q_norm", "k_norm")
        super().__init__(spec, builder, layer, norms=names, offset=1.0, gated=True)
        self.gated = builder.gated("sigmoid")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        q, gate, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        attended = self.attend(q, k, v, ctx, rotation)
        return self.o(self.gated(attended, gate.flatten(1)), ctx, residual)


class GatedDeltaNet:
    """A short convolution, then the gated delta rule (Yang et al. 2024); the output of its heads is
    normalised and gated."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, state: StateSpec
    ) -> None:
        hidden, heads = spec.hidden_size, state.value_heads
        self.widths = state.channels, state.values
        self.heads = heads, state.value_dim
        linear = partial(builder.linear, inputs=hidden, bias=False)
        wide, narrow = by_key_head(state)
        self.joined: LinearLayer | None = None
        self.parts: HeadsLayer | None = None
        if spec.wiring == BY_KEY_HEAD:
            self.joined = linear(QKVZ, outputs=len(wide), order=wide, role="qkv")
        else:  # GGUF files may store them in different types
            self.parts = builder.heads(QKV_Z, hidden, self.widths, 1, bias=False, full_rows=True)
        if spec.wiring in (BY_KEY_HEAD, SEPARATE):
            self.gates = linear(BA, outputs=len(narrow), order=narrow, role="gates")
        else:
            self.gates = linear(B_A, outputs=(heads, heads), role="gates")
        self.conv = builder.causal_conv("conv1d", layer, state, silu=True)
        self.delta = builder.recurrence("A_log", "dt_bias", layer, state)
        self.norm = builder.rms_norm("norm", state.value_dim, spec.norm_eps, before="o")
        self.gated = builder.gated("silu")
        order = by_value_head(state, state.value_dim) if spec.wiring == BY_VALUE_HEAD else []
        back = sorted(range(len(order)), key=order.__getitem__)
        self.out = builder.linear(
            "out_proj", state.values, hidden, bias=False, role="o", columns=back
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        if self.joined is not None:
            mixed, gate = self.joined(x, ctx).split_with_sizes(self.widths, 1)
        else:
            assert self.parts is not None
            mixed, gate = (part.flatten(1) for part in self.parts(x, ctx))
        values = self.delta(self.conv(mixed, ctx), self.gates(x, ctx), ctx)
        normed = self.norm(values.view(-1, *self.heads)).flatten(1)
        return self.out(self.gated(normed, gate), ctx, residual)


def by_key_head(state: StateSpec) -> tuple[list[int], list[int]]:
    """Return the order in which to take the rows of `in_proj_qkvz` and of `in_proj_ba`, which are
    stored key head by key head: q, k, its value heads and their gates; b and a of these value
    heads."""
    served = state.value_heads // state.key_heads
    values = served * state.value_dim
    wide = _head_by_head(state.key_heads, (state.key_dim, state.key_dim, values, values))
    return wide, _head_by_head(state.key_heads, (served, served))


def _head_by_head(heads: int, parts: tuple[int, ...]) -> list[int]:
    """Return the indices of all rows of the first part, then of the second and so on, of rows
    stored head by head."""
    begins = [sum(parts[:i]) for i in range(len(parts))]
    return [
        head * sum(parts) + begin + row
        for begin, size in zip(begins, parts, strict=True)
        for head in range(heads)
        for row in range(size)
    ]


def by_value_head(state: StateSpec, height: int, first: int = 0) -> list[int]:
    """Return the row of a checkpoint at each place in GGUF files, which have the first value head
    of each key head, then the second.

    Args:
        height: rows of a value head.
        first: number of rows before them, which do not move.
    """
    served = state.value_heads // state.key_heads
    heads = [key * served + i for i in range(served) for key in range(state.key_heads)]
    rows = [first + head * height + row for head in heads for row in range(height)]
    return [*range(first), *rows]


def rows_by_value_head(spec: ModelFacts) -> dict[str, list[int]]:
    """Return the row orders of the delta-net tensors that have rows for each value head."""
    state, names = spec.states[0], ("in_proj_z", *B_A)
    keys, values = 2 * state.key_heads * state.key_dim, state.value_dim
    sizes = dict(zip(names, (values, 1, 1), strict=True))
    orders = {f"{name}.weight": by_value_head(state, size) for name, size in sizes.items()}
    orders |= dict.fromkeys(("A_log", "dt_bias"), by_value_head(state, 1))
    behind = by_value_head(state, values, keys)
    orders |= dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), behind)
    return {f"linear_attn.{name}": rows for name, rows in orders.items()}


def columns_by_value_head(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the column order of the delta-net matrix that has columns for each value head."""
    if spec.wiring == BY_VALUE_HEAD:
        return {}
    state, name = spec.states[0], "linear_attn.out_proj"
    return {name: (FilePart(name, columns=by_value_head(state, state.value_dim)),)}


def separate_inputs(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts of the projection that Qwen3-Next stores key head by key head."""
    wide, _ = by_key_head(spec.states[0])
    middle = spec.states[0].channels
    rows = wide[:middle], wide[middle:]
    parts = (
        FilePart(f"linear_attn.{name}", part_rows)
        for name, part_rows in zip(QKV_Z, rows, strict=True)
    )
    return {f"linear_attn.{QKVZ}": tuple(parts)}


def rope_sections(spec: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Return the numbers of pairs rotated by time, height and width in an image."""
    pairs = spec.ropes[0].width(spec.head_dim) // 2
    return {"rope.dimension_sections": (*((pairs + 2 - i) // 3 for i in range(3)), 0)}


GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a.": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **SHARED_NAMES,
}


Qwen35Layer = partial(
    PreNormLayer,
    attention=partial(mixer, attention=GatedAttention, keeper=GatedDeltaNet, scope="linear_attn"),
    feed=shared_experts,
    offset=1.0,
)


def qwen3_5(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    """Return the text model; the image encoder is not read."""
    builder.skip("mtp")
    return Decoder(spec, builder, Qwen35Layer, norm_from_one)


KEY_HEADS, VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
KEY_DIM, VALUE_DIM = "linear_key_head_dim", "linear_value_head_dim"


def delta_state(fields: Fields) -> StateSpec:
    """Return the state of a layer with a delta net."""
    key_heads = fields.integer(KEY_HEADS, 1, MAX_HEADS, 16)
    value_heads = fields.integer(VALUE_HEADS, 1, MAX_HEADS, 32)
    if value_heads % key_heads:
        reason = f"must be a multiple of {KEY_HEADS} ({key_heads}), not {value_heads}"
        raise fields.error(VALUE_HEADS, reason)
    return StateSpec.recurrent(
        key_heads,
        value_heads,
        fields.integer(KEY_DIM, 1, MAX_WIDTH, 128),
        fields.integer(VALUE_DIM, 1, MAX_WIDTH, 128),
        fields.integer("linear_conv_kernel_dim", 2, MAX_TAPS, 4),
    )


def qwen3_5_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Delta nets, and attention in each `full_attention_interval`-th layer, or by `layer_types`."""
    state = delta_state(fields)
    every = fields.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    types = layer_types(fields, layers, every, LINEAR)
    attends = LayerSpec(None, read_rope(fields, positions, fraction=0.25))
    return layers_with_states(fields, attends, LINEAR, LayerSpec(state=state), types)


def qwen3_next_wiring(fields: Fields) -> str:
    """Return how delta nets are stored; old GGUF files store them as checkpoints do."""
    is_joined = fields.boolean(WHOLE, not fields.boolean(SEPARATE, False))
    return BY_KEY_HEAD if is_joined else SEPARATE


QWEN3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    "Qwen 3.5, dense",
    qwen3_5,
    layers=qwen3_5_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    wiring=lambda fields: BY_VALUE_HEAD if fields.boolean(SEPARATE, False) else "",
    head_dim=256,
    predictor=PredictorSpec(
        "mtp",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "fc",
        layer="layers.0",
        norm="norm",
        offset=1.0,
    ),
    gguf="qwen35",
    gguf_names=GGUF_NAMES,
    gguf_rows=rows_by_value_head,
    gguf_parts=columns_by_value_head,
    gguf_extra=rope_sections,
    gguf_implied=lambda fields: {SEPARATE: True},
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
# As published, with an image encoder.
EXPERTS_3_5 = partial(
    read_experts, router=normalised_router, shared_width="shared_expert_intermediate_size"
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    models="Qwen 3.5 and 3.6 with experts",
    experts=EXPERTS_3_5,
    gguf="qwen35moe",
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
# Qwen3-Next (Qwen team 2025).
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    models="Qwen 3 Next",
    experts=partial(
        read_experts, router=softmax_router, shared_width="shared_expert_intermediate_size"
    ),
    wiring=qwen3_next_wiring,
    gguf="qwen3next",
    gguf_names=GGUF_NAMES | {"ssm_in": f"linear_attn.{QKVZ}"},
    gguf_present={"ssm_in": WHOLE},
    gguf_rows=None,
    gguf_parts=separate_inputs,
    gguf_extra=None,
    gguf_implied=lambda fields: {SEPARATE: True, "norm_topk_prob": True},
    defaults={
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
)
