"""Granite 3 (IBM 2024): a Llama with scales of embedding, attention, residuals and logits; the
smaller ones have routed experts. And Granite 4 (IBM 2025), if all its layers have attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, MakeFeedForward, NormedLayer, feed_forward
from kvik.spec.declare import (
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
from kvik.spec.layers import FULL, LayerSpec
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
)


def granite_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    experts = spec.layers[layer].experts
    if experts is not None:
        names = SEPARATE_NAMES if spec.wiring == SEPARATE else NAMES
        return builder.experts(spec.hidden_size, experts, names)
    return feed_forward(spec, builder, layer)


def shared_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Return the experts, or in layers without experts the shared MLP alone."""
    if spec.layers[layer].experts is not None:
        return granite_feed(spec, builder, layer)
    names, down = NAMES.shared_gate_up, NAMES.shared_down
    inside = builder.at(NAMES.shared)
    return inside.gated_mlp(
        spec.hidden_size, spec.intermediate_size, bias=False, names=names, down=down
    )


class GraniteLayer(NormedLayer):
    """Attention, then MLP or experts; each reads the normalised residual stream and adds its scaled
    output."""

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        feed: MakeFeedForward = granite_feed,
    ) -> None:
        super().__init__(spec, builder, layer, feed=feed)
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


def attending_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys, with rotary positions if `position_embedding_type` is "rope"."""
    types = fields.strings("layer_types") or ("mamba",) * layers
    if len(types) != layers or set(types) - {"attention", FULL}:
        reason = f"must be attention in all {layers} layers: mamba layers do not run here"
        raise fields.error("layer_types", reason)
    turns = fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    return (LayerSpec(None, read_rope(fields, positions) if turns else None),) * layers


def experts_and_shared(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Layers have experts and a shared MLP, or the MLP alone."""
    if not fields.integer("num_local_experts", 0, MAX_EXPERTS, 8):
        return (None,) * layers
    read = read_experts(fields, layers, inner="intermediate_size", router=normalised_router)
    return tuple(experts and replace(experts, shared=shared_width(fields)) for experts in read)


def shared_width(fields: Fields) -> int:
    return fields.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024)


GRANITE4 = replace(
    GRANITE_MOE,
    name="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    models="Granite 4 whose layers all attend",
    make=partial(Decoder, make_layer=partial(GraniteLayer, feed=shared_feed)),
    layers=attending_layers,
    experts=experts_and_shared,
    inner=shared_width,
    wiring=None,
    gguf=None,
    gguf_names={},
    gguf_parts=None,
    gguf_implied=None,
)
