"""Granite 3 (IBM 2024): a Llama with scales of embedding, attention, residuals and logits; the
smaller ones have routed experts. HyperCLOVA X, with the same scales. Granite Swash, with windows
and learned sinks. And Granite 4 (IBM 2025), in which most layers may be Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models import bamba, mamba2
from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    Layer,
    MakeAttention,
    MakeFeedForward,
    NormedLayer,
    SandwichLayer,
    feed_forward,
)
from kvik.spec.architecture import (
    SEPARATE,
    Architecture,
    FilePart,
    gguf_experts,
    gguf_shared_width,
    separate_wiring,
)
from kvik.spec.declare import EXPERT_NAMES, ExpertNames, LayerBuilder
from kvik.spec.experts import MAX_EXPERTS, ExpertsSpec, normalised_router, read_experts
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import (
    LINEAR,
    LayerSpec,
    layer_types,
    layers_with_states,
    read_window,
    typed_windows,
)
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import FeedForward, ForwardContext
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


def granite_feed(
    spec: ModelFacts, builder: LayerBuilder, layer: int, names: ExpertNames = NAMES
) -> FeedForward:
    experts = spec.layers[layer].experts
    if experts is not None:
        stored = SEPARATE_NAMES if spec.wiring == SEPARATE else names
        return builder.experts(spec.hidden_size, experts, stored)
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
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    wiring=separate_wiring,
    gguf="granitemoe",
    gguf_names=gguf_experts("", SEPARATE_NAMES),
    gguf_parts=file_parts,
    gguf_implied=lambda fields: {SEPARATE: True},
)
NORMS_AFTER = "norms after blocks"  # wiring of HyperCLOVA X


class HyperClovaLayer(NormedLayer):
    """Attention, then MLP; each reads the normalised residual stream, and its output is normalised,
    scaled and added to the stream."""

    usual_norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    before = SandwichLayer.before

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        super().__init__(spec, builder, layer)
        self.add = builder.scaled_sum(spec.scales.residual)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, attended_norm, mlp_norm, fed_norm = self.norms
        attended = self.attention(attention_norm(x), None, rotation, ctx)
        x = self.add(attended_norm(attended), x)
        return self.add(fed_norm(self.mlp(mlp_norm(x), ctx)), x)


def hyperclova_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    make = HyperClovaLayer if spec.wiring == NORMS_AFTER else GraniteLayer
    return make(spec, builder, layer)


def hyperclova_scales(fields: Fields) -> ModelScales:
    """Logits are multiplied, and scores are scaled as usual unless a file says how."""
    scales, usual = granite_scales(fields), "attention_multiplier" not in fields
    return replace(
        scales, attention=None if usual else scales.attention, logits=1.0 / scales.logits
    )


# HyperCLOVA X SEED Think (NAVER 2025).
HYPERCLOVAX = replace(
    GRANITE,
    name="HyperCLOVAXForCausalLM",
    model_type="hyperclovax",
    models="HyperCLOVA X",
    make=partial(Decoder, make_layer=hyperclova_layer),
    wiring=lambda fields: NORMS_AFTER if fields.boolean("use_post_norm", True) else "",
    scales=hyperclova_scales,
    gguf=None,
)
SHARED = "shared_intermediate_size"


def shared_experts(
    fields: Fields, layers: int, low: int = 0, default: int = 0
) -> tuple[ExpertsSpec | None, ...]:
    """Return the experts with the MLP for all tokens beside them.

    Args:
        low, default: of that MLP's width; 0: none.
    """
    width = fields.integer(SHARED, low, MAX_WIDTH, default)
    read = read_experts(fields, layers, inner="intermediate_size", router=normalised_router)
    return tuple(experts and replace(experts, shared=width) for experts in read)


def shared_parts(scope: str, width: int) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts of an MLP for all tokens that files store in a scope."""
    names = EXPERT_NAMES
    rows = range(width), range(width, 2 * width)
    return {
        f"{NAMES.shared}.{NAMES.shared_gate_up[0]}": tuple(
            FilePart(f"{scope}.{name}", part)
            for name, part in zip(names.shared_gate_up, rows, strict=True)
        ),
        f"{NAMES.shared}.{NAMES.shared_down}": (FilePart(f"{scope}.{names.shared_down}"),),
    }


def granite_shared_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts that files store separately, under the usual names."""
    width = max(layer.experts.shared for layer in spec.layers if layer.experts)
    return file_parts(spec) | (shared_parts(NAMES.shared, width) if width else {})


# In some Granite 3.2 models, layers have an MLP for all tokens beside the experts.
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    name="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    models="Granite 3 with experts and a shared MLP",
    experts=shared_experts,
    keys={"shared_expert_intermediate_size": SHARED},
    gguf_marker=("expert_shared_feed_forward_length", 1, ""),
    gguf_parts=granite_shared_parts,
    gguf_extra=gguf_shared_width,
)


def swash_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with a window; each fourth one, from the first on, without. `layer_rope_theta` has the
    rotary base of each layer; 0: no positions."""
    types = layer_types(fields, layers, every=4, first=True)
    typed = fields.changed({"layer_types": types})
    windows = typed_windows(typed, layers, read_window(typed))
    rope, key = read_rope(fields, positions), "layer_rope_theta"
    if key not in fields:
        return tuple(LayerSpec(window, rope) for window in windows)
    thetas = fields.numbers(key, 0.0, 1e12)
    if len(thetas) != layers:
        raise fields.error(key, f"must have {layers} entries, not {len(thetas)}")
    for theta in thetas:
        if 0.0 < theta <= 1.0:
            raise fields.error(key, f"must hold 0 or numbers greater than 1, not {theta:g}")
    return tuple(
        LayerSpec(window, replace(rope, theta=theta) if theta else None)
        for window, theta in zip(windows, thetas, strict=True)
    )


SWASH_NAMES = replace(
    SEPARATE_NAMES,
    router=f"{SCOPE}.router",
    shared_gate_up=NAMES.shared_gate_up,
    shared_down=NAMES.shared_down,
)
swash = partial(
    Decoder,
    make_layer=partial(
        GraniteLayer,
        attention=partial(GroupedQueryAttention, sinks=True),
        feed=partial(granite_feed, names=SWASH_NAMES),
    ),
)
# Granite Swash (IBM 2026): most layers have a window, and each head has a learned sink.
GRANITE_SWA = replace(
    GRANITE,
    name="GraniteSWAForCausalLM",
    model_type="granite_swa",
    models="Granite Swash",
    make=swash,
    layers=swash_layers,
    tied=True,
    eos_token_ids=(100_257,),
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
    },
    gguf=None,
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED,
    name="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    models="Granite Swash with experts",
    make=swash,
    layers=swash_layers,
    wiring=None,
    defaults={**GRANITE_MOE_SHARED.defaults, "sliding_window": 128},
    gguf=None,
)


KEYS = {**bamba.KEYS, "shared_expert_intermediate_size": SHARED}


def granite4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Mamba-2, or attention to all keys, with rotary positions if `position_embedding_type` is
    "rope"."""
    turns = fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    attends = LayerSpec(None, read_rope(fields, positions) if turns else None)
    types = layer_types(fields, layers, other=LINEAR)
    if LINEAR not in types:
        return (attends,) * layers
    keeps = LayerSpec(state=bamba.mixer_state(fields))
    return layers_with_states(fields, attends, LINEAR, keeps, types)


def experts_and_shared(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Layers have experts and a shared MLP, or the MLP alone."""
    if not fields.integer("num_local_experts", 0, MAX_EXPERTS, 8):
        return (None,) * layers
    return shared_experts(fields, layers, low=1, default=1024)


def shared_width(fields: Fields) -> int:
    return fields.integer(SHARED, 1, MAX_WIDTH, 1024)


def granite4_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts that files store separately, under the usual names."""
    has_experts = any(layer.experts for layer in spec.layers)
    scope = NAMES.shared if has_experts else "mlp"
    parts = shared_parts(scope, spec.intermediate_size)
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
        Decoder, make_layer=partial(GraniteLayer, attention=bamba.mamba_mixer, feed=shared_feed)
    ),
    layers=granite4_layers,
    fixed=bamba.FIXED,
    defaults={**GRANITE_MOE.defaults, **bamba.DEFAULTS},
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
