"""Granite 3 (IBM 2024): a Llama with constants for embedding, attention, residuals and logits; the
smaller ones have routed experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention, feed_forward
from kvik.spec.declare import (
    APART,
    Architecture,
    ExpertNames,
    FilePart,
    ForwardContext,
    LayerBuilder,
    apart_wiring,
)
from kvik.spec.experts import normalised_router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.model import ModelFacts, ModelScales

if TYPE_CHECKING:
    from torch import Tensor


NAMES = ExpertNames(router="router.layer", gate_up=("input_linear.{}",), down="output_linear.{}")
NAMES_APART = ExpertNames(router="router.layer")
SCOPE = "block_sparse_moe"


class GraniteLayer:
    """Attention and MLP, or experts; each reads the residual stream normalised and adds a part of
    what it gives."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = builder.rms_norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = builder.rms_norm("post_attention_layernorm", hidden, eps, before="gate_up")
        scope = "mlp" if spec.layers[layer].experts is None else SCOPE
        names = NAMES_APART if spec.wiring == APART else NAMES
        self.mlp = feed_forward(spec, builder, layer, scope, names)
        self.add = builder.scaled_sum(spec.scales.residual)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.add(self.attention(self.attention_norm(x), None, rotation, ctx), x)
        return self.add(self.mlp(self.mlp_norm(x), ctx), x)


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
    """Return what files have apart, and name as others do."""
    if spec.wiring == APART:
        return {}
    inner = max(layer.experts.inner for layer in spec.layers if layer.experts)
    rows = range(inner), range(inner, 2 * inner)
    gate, up = (
        FilePart(f"{SCOPE}.{name}", own)
        for name, own in zip(NAMES_APART.gate_up, rows, strict=True)
    )
    down = FilePart(f"{SCOPE}.{NAMES_APART.down}")
    return {f"{SCOPE}.{NAMES.gate_up[0]}": (gate, up), f"{SCOPE}.{NAMES.down}": (down,)}


GRANITE = Architecture(
    "GraniteForCausalLM",
    "granite",
    "Granite 3",
    partial(Llama, make_layer=GraniteLayer),
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
    wiring=apart_wiring,
    gguf="granitemoe",
    gguf_names={
        "ffn_gate_inp": f"{SCOPE}.router.layer",
        **{
            f"ffn_{part}_exps": f"{SCOPE}.experts.{{}}.{part}_proj"
            for part in ("gate", "up", "down")
        },
    },
    gguf_parts=file_parts,
    gguf_implied=lambda fields: {APART: True},
)
