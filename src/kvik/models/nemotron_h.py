"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624), Nemotron Nano 2 and Nemotron 3: each layer is
Mamba-2, attention without positions, an MLP, or routed experts. MLPs have no gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models import mamba2
from kvik.models.decoder import AttentionBlock, Decoder, GroupedQueryAttention, layer_norms
from kvik.spec.architecture import Architecture, gguf_experts, gguf_shared_width
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, corrected_router, read_experts
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import BLOCK_KINDS, EXPERTS, FULL, LEGACY_TYPES, LINEAR, MLP, LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward, ForwardContext

if TYPE_CHECKING:
    from torch import Tensor

KINDS = LINEAR, FULL, MLP, EXPERTS
PATTERN, LETTERS = "hybrid_override_pattern", dict(zip("M*-E", KINDS, strict=True))
SHARED, LATENT = "moe_shared_expert_intermediate_size", "moe_latent_size"
NAMES = ExpertNames(gate_up=("experts.{}.up_proj",), gated=False, shared_gate_up=("up_proj",))
KEYS = {
    mamba2.HEADS: "mamba_num_heads",
    mamba2.HEAD_DIM: "mamba_head_dim",
    mamba2.GROUPS: "n_groups",
    mamba2.SIZE: "ssm_state_size",
    mamba2.TAPS: "conv_kernel",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
    "layer_types": BLOCK_KINDS,
    "shared_expert_intermediate_size": SHARED,
}


class NemotronHLayer:
    """One part, which reads the normalised residual stream and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        facts, inner = spec.layers[layer], builder.at("mixer")
        self.norm = layer_norms(spec, builder)("norm", before="up" if facts.feeds else "qkv")
        self.mixer: AttentionBlock | None = None
        self.feed: FeedForward | None = None
        if facts.experts is not None:
            activation = "relu_squared"
            self.feed = inner.experts(spec.hidden_size, facts.experts, NAMES, activation=activation)
        elif facts.feeds:
            self.feed = inner.mlp(
                "up_proj",
                "down_proj",
                spec.hidden_size,
                spec.intermediate_size,
                bias=spec.mlp_bias,
                activation=spec.activation,
            )
        elif facts.state is not None:
            self.mixer = mamba2.Mamba2(spec, inner, layer, facts.state)
        else:
            self.mixer = GroupedQueryAttention(spec, builder, layer, scope="mixer")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        normed = self.norm(x)
        if self.feed is not None:
            return self.feed(normed, ctx, x)
        assert self.mixer is not None
        return self.mixer(normed, x, rotation, ctx)


def nemotron_h(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    """Return the model; multi-token-prediction layers are not read."""
    builder.skip("mtp")
    names = ("embeddings", "layers", "norm_f", "lm_head")
    return Decoder(spec, builder, NemotronHLayer, scopes=("backbone", ""), names=names)


def block_kinds(fields: Fields) -> tuple[str, ...]:
    """Return the kind of each layer, one of `KINDS`: by `layers_block_type`, or by the letters of
    `hybrid_override_pattern`."""
    if BLOCK_KINDS in fields:
        return tuple(LEGACY_TYPES.get(kind, kind) for kind in fields.strings(BLOCK_KINDS))
    return tuple(LETTERS.get(letter, letter) for letter in fields.text(PATTERN))


def nemotron_h_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    key, allowed = (BLOCK_KINDS, KINDS) if BLOCK_KINDS in fields else (PATTERN, LETTERS)
    kinds = block_kinds(fields)
    if len(kinds) != layers:
        raise fields.error(key, f"must have {layers} entries, not {len(kinds)}")
    for kind in kinds:
        if kind not in KINDS:
            raise fields.error(key, f"must hold only {', '.join(allowed)}, not {shown(kind)}")
    if FULL not in kinds:
        raise fields.error(key, "must have a layer with attention at least")
    parts = dict.fromkeys((MLP, EXPERTS), LayerSpec(feeds=True)) | {FULL: LayerSpec()}
    if LINEAR in kinds:
        parts[LINEAR] = LayerSpec(state=mamba2.mamba2_state(fields, KEYS, "use_conv_bias"))
    return tuple(parts[kind] for kind in kinds)


def nemotron_h_inner(fields: Fields) -> int:
    """Return the inner size of MLPs, or of experts if there is no MLP."""
    key = "intermediate_size" if MLP in block_kinds(fields) else "moe_intermediate_size"
    return fields.integer(key, 1, MAX_WIDTH)


def nemotron_h_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    kinds = block_kinds(fields)
    if EXPERTS not in kinds:
        return (None,) * layers
    if fields.raw(LATENT) is not None:
        raise fields.error(LATENT, "must be null: experts read the hidden state here")
    shared = fields.integer(SHARED, 1, MAX_WIDTH, 7688)
    read = read_experts(fields, layers, router=corrected_router)
    return tuple(
        replace(experts, shared=shared) if experts and kind == EXPERTS else None
        for experts, kind in zip(read, kinds, strict=True)
    )


def shared_metadata(spec: ModelFacts) -> dict[str, float | Sequence[int]]:
    """Return the metadata of the MLP for all tokens beside the experts, whose width is free."""
    width = gguf_shared_width(spec)
    return width and {**width, "expert_shared_count": 1}


NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    "nemotron_h",
    "Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano",
    nemotron_h,
    layers=nemotron_h_layers,
    experts=nemotron_h_experts,
    optional_experts=True,
    inner=nemotron_h_inner,
    mlp_bias="mlp_bias",
    activations=("relu2",),
    gated_mlp=False,
    head_dim=128,
    eos_token_ids=(2,),
    fixed={"use_bias": False, "mamba_proj_bias": False, "attention_bias": False},
    keys=KEYS,
    gguf="nemotron_h",
    gguf_experts="nemotron_h_moe",
    gguf_names={
        **mamba2.gguf_mamba2("mixer"),
        **gguf_experts("mixer", NAMES),
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "blk": "backbone.layers",
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
    },
    gguf_shapes=partial(mamba2.gguf_mamba2_shapes, scope="mixer"),
    gguf_extra=shared_metadata,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
    },
)
