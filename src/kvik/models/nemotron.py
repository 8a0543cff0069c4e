"""Nemotron-4 (Parmar et al. 2024, arXiv 2402.16819) and Minitron: LayerNorm whose gains are one
more than what checkpoints have, and MLPs without gates, of squared ReLU; and Arcee's AFM, a Llama
with such MLPs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention, LlamaLayer
from kvik.spec.declare import Architecture, FeedForward, ForwardContext, LayerBuilder, Norm
from kvik.spec.layers import turned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("relu2",)


def squared_relu(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    return builder.at("mlp").mlp(
        "up_proj",
        "down_proj",
        spec.hidden_size,
        spec.intermediate_size,
        bias=spec.mlp_bias,
        activation=spec.activation,
    )


class NemotronLayer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        norm = partial(builder.layer_norm, dim=spec.hidden_size, eps=spec.norm_eps, offset=1.0)
        self.attention_norm = norm("input_layernorm", before="qkv")
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = norm("post_attention_layernorm", before="up")
        self.mlp = squared_relu(spec, builder, layer)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention(self.attention_norm(x), x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


def last_norm(spec: ModelFacts, builder: LayerBuilder) -> Norm:
    return builder.layer_norm("norm", spec.hidden_size, spec.norm_eps, offset=1.0)


NEMOTRON = Architecture(
    "NemotronForCausalLM",
    "nemotron",
    "Nemotron-4 and Minitron",
    partial(Llama, make_layer=NemotronLayer, make_norm=last_norm),
    layers=partial(turned_layers, fraction=0.5),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    activations=ACTIVATIONS,
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(3,),
    keys={"rms_norm_eps": "norm_eps"},
    gguf="nemotron",
)
ARCEE = Architecture(
    "ArceeForCausalLM",
    "arcee",
    "AFM of Arcee",
    partial(Llama, make_layer=partial(LlamaLayer, feed=squared_relu)),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    activations=ACTIVATIONS,
    gated_mlp=False,
    eos_token_ids=(128_001,),
    gguf="arcee",
    gguf_pairs=True,
)
