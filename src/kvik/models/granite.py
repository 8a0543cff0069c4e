"""Granite 3 (IBM 2024): a Llama with scales of embedding, attention, residuals and logits; the
smaller ones have routed experts. And Granite 4 (IBM 2025), in which most layers may be Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models import mamba2
from kvik.models.decoder import (
    AttentionBlock,
    Decoder,
    GroupedQueryAttention,
    MakeAttention,
    MakeFeedForward,
    NormedLayer,
    feed_forward,
)
from kvik.spec.declare import (
    EXPERT_NAMES,
    SEPARATE,
    Architecture,
    ExpertNames,
    FeedForward,
    FilePart,
    ForwardContext,
    LayerBuilder,
    gguf_experts,
    separate_wiring,
)
from kvik.spec.experts import MAX_EXPERTS, ExpertsSpec, normalised_router, read_experts
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import LINEAR, LayerSpec, layer_types, layers_with_states
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor


SCOPE = "block_sparse_moe"
ROUTER = f"{SCOPE}.router.layer"
NAMES = ExpertNames(
    router=ROUTER,
    gate_up=(f"{SCOPE}.input_linear.{{}}",),
    down=f"{SCOPE}.output_linear.{{}}",
    shared="shared_mlp",
    shared_gate_up=("input_linear",),
    shared_down="output_linear",
)
SEPARATE_NAMES = ExpertNames(
    router=ROUTER,
    gate_up=(f"{SCOPE}.experts.{{}}.gate_proj", f"{SCOPE}.experts.{{}}.up_proj"),
    down=f"{SCOPE}.experts.{{}}.down_proj",
    shared=NAMES.shared,
)


def granite_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    experts = spec.layers[layer].experts
    if experts is not None:
        names = SEPARATE_NAMES if spec.wiring == SEPARATE else NAMES
        return builder.experts(spec.hidden_size, experts, names)
    return feed_forward(spec, builder, layer)


def shared_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Return the experts, or in layers without experts the shared MLP alone."""
    if spec.layers[layer].experts is not None or spec.wiring == SEPARATE:
        return granite_feed(spec, builder, layer)
    names, down = NAMES.shared_gate_up, NAMES.shared_down
    return feed_forward(spec, builder, layer, NAMES.shared, gate_up=names, down=down)


class GraniteLayer(NormedLayer):
    """Attention, then MLP or experts; each reads the normalised residual stream and adds its scaled
    output."""

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = GroupedQueryAttention,
        feed: MakeFeedForward = granite_feed,
    ) -> None:
        super().__init__(spec, builder, layer, attention, feed)
        self.add = builder.scaled_sum(spec.scales.residual)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, mlp_norm = self.norms
        x = self.add(self.attention(attention_norm(x), None, rotation, ctx), x)
        return self.add(self.mlp(mlp_norm(x), ctx), x)


def granite_scales(fields: Fields) -> ModelScales:
    def number(key: str) -> float:
        return fields.number(key, 1e-6, 1e6, 1.0)

    return ModelScales(
        embedding=number("embedding_multiplier"),
        residual=number("residual_multiplier"),
        attention=number("attention_multiplier"),
        logits=1.0 / number("logits_scaling"),
    )


def file_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts that files store separately, under the usual names."""
    inner = max(layer.experts.inner for layer in spec.layers if layer.experts)
    rows = range(inner), range(inner, 2 * inner)
    gate, up = map(FilePart, SEPARATE_NAMES.gate_up, rows)
    return {NAMES.gate_up[0]: (gate, up), NAMES.down: (FilePart(SEPARATE_NAMES.down),)}


GRANITE = Architecture(
    "GraniteForCausalLM",
    "granite",
    "Granite 3",
    partial(Decoder, make_layer=GraniteLayer),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    scales=granite_scales,
    eos_token_ids=(2,),
    gguf="granite",
    gguf_pairs=True,
    gguf_scales=(
        *("embedding_multiplier", "residual_multiplier"),
        *("attention_multiplier", "logits_scaling"),
    ),
)
GRANITE_MOE = replace(
    GRANITE,
    name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    models="Granite 3 with experts",
    experts=partial(read_experts, inner="intermediate_size", router=normalised_router),
    wiring=separate_wiring,
    gguf="granitemoe",
    gguf_names=gguf_experts("", SEPARATE_NAMES),
    gguf_parts=file_parts,
    gguf_implied=lambda fields: {SEPARATE: True},
)


SHARED = "shared_intermediate_size"
KEYS = {
    mamba2.HEADS: "mamba_n_heads",
    mamba2.HEAD_DIM: "mamba_d_head",
    mamba2.GROUPS: "mamba_n_groups",
    mamba2.SIZE: "mamba_d_state",
    mamba2.TAPS: "mamba_d_conv",
    "shared_expert_intermediate_size": SHARED,
}


def granite4_mixer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    """Return the Mamba-2 mixer or the attention of a layer."""
    state = spec.layers[layer].state
    if state is not None:
        return mamba2.Mamba2(spec, builder.at("mamba"), layer, state)
    return GroupedQueryAttention(spec, builder, layer)


def granite4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Mamba-2, or attention to all keys, with rotary positions if `position_embedding_type` is
    "rope"."""
    turns = fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    attends = LayerSpec(None, read_rope(fields, positions) if turns else None)
    types = layer_types(fields, layers, other=LINEAR)
    if LINEAR not in types:
        return (attends,) * layers
    inner = fields.integer("hidden_size", 1, MAX_WIDTH) * fields.integer("mamba_expand", 1, 64, 2)
    state = mamba2.mamba2_state(fields, KEYS, "mamba_conv_bias", inner)
    return layers_with_states(fields, attends, LINEAR, LayerSpec(state=state), types)


def experts_and_shared(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Layers have experts and a shared MLP, or the MLP alone."""
    if not fields.integer("num_local_experts", 0, MAX_EXPERTS, 8):
        return (None,) * layers
    read = read_experts(fields, layers, inner="intermediate_size", router=normalised_router)
    return tuple(experts and replace(experts, shared=shared_width(fields)) for experts in read)


def shared_width(fields: Fields) -> int:
    return fields.integer(SHARED, 1, MAX_WIDTH, 1024)


def granite4_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts that files store separately, under the usual names."""
    has_experts = any(layer.experts for layer in spec.layers)
    width, names = spec.intermediate_size, EXPERT_NAMES
    rows = range(width), range(width, 2 * width)
    scope = NAMES.shared if has_experts else "mlp"
    parts = {
        f"{NAMES.shared}.{NAMES.shared_gate_up[0]}": tuple(
            FilePart(f"{scope}.{name}", part)
            for name, part in zip(names.shared_gate_up, rows, strict=True)
        ),
        f"{NAMES.shared}.{NAMES.shared_down}": (FilePart(f"{scope}.{names.shared_down}"),),
    }
    return parts | (file_parts(spec) if has_experts else {})


def granite4_extra(spec: ModelFacts) -> dict[str, float | Sequence[int]]:
    """Return what llama.cpp needs: the widths of the MLPs, and that there are no positions."""
    shared = spec.intermediate_size
    experts = (layer.experts.inner for layer in spec.layers if layer.experts)
    return {
        "feed_forward_length": next(experts, shared),
        "expert_shared_feed_forward_length": shared,
        "rope.scaling.finetuned": False,
    }


GRANITE4 = replace(
    GRANITE_MOE,
    name="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    models="Granite 4",
    make=partial(
        Decoder,
        make_layer=partial(GraniteLayer, attention=granite4_mixer, feed=shared_feed),
    ),
    layers=granite4_layers,
    fixed={"mamba_proj_bias": False},
    defaults={"mamba_n_groups": 1, "mamba_d_state": 256},
    experts=experts_and_shared,
    optional_experts=True,
    inner=shared_width,
    keys=KEYS,
    gguf="granitehybrid",
    gguf_names=gguf_experts("", SEPARATE_NAMES) | mamba2.gguf_mamba2("mamba"),
    gguf_parts=granite4_parts,
    gguf_shapes=partial(mamba2.gguf_mamba2_shapes, scope="mamba"),
    gguf_extra=granite4_extra,
)
