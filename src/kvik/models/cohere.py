"""Command R and R7B (Cohere 2024): attention and MLP side by side, LayerNorm without biases. Pairs
of neighbours turn, and logits are scaled."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama, LlamaAttention
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder, Norm
from kvik.spec.fields import Fields
from kvik.spec.layers import mixed_layers, turned_layers
from kvik.spec.model import ModelFacts, ModelScales

if TYPE_CHECKING:
    from torch import Tensor


class CohereLayer:
    """Attention and MLP; both read the same normalised residual stream and add to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.norm = builder.layer_norm("input_layernorm", hidden, spec.norm_eps, bias=False)
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.mlp = builder.at("mlp").gated_mlp(hidden, inner, bias=False)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        normalised = self.norm(x)
        return self.mlp(normalised, ctx, self.attention(normalised, x, rotation, ctx))


def cohere_scales(fields: Fields) -> ModelScales:
    return ModelScales(logits=fields.number("logit_scale", 1e-6, 1e6, 0.0625))


def last_norm(spec: ModelFacts, builder: LayerBuilder) -> Norm:
    """Return the norm behind the last layer, which scales the logits by its gain."""
    return builder.layer_norm(
        "norm", spec.hidden_size, spec.norm_eps, bias=False, scale=spec.scales.logits
    )


COHERE = Architecture(
    "CohereForCausalLM",
    "cohere",
    "Command R",
    partial(Llama, make_layer=CohereLayer, make_norm=last_norm),
    layers=partial(turned_layers, fraction=1.0, interleaved=True),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    rms_norm=False,
    tied=True,
    scales=cohere_scales,
    eos_token_ids=(255001,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    gguf="command-r",
    gguf_scales=("logit_scale",),
    fixed={"use_qk_norm": False},
)
# Command R7B and A: three layers with a window, then one that knows no positions.
COHERE2 = Architecture(
    "Cohere2ForCausalLM",
    "cohere2",
    "Command R7B and A",
    partial(Llama, make_layer=CohereLayer, make_norm=last_norm),
    layers=partial(mixed_layers, every=4, full_turns=False, interleaved=True),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    rms_norm=False,
    tied=True,
    scales=cohere_scales,
    eos_token_ids=(255001,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    gguf="cohere2",
    gguf_scales=("logit_scale",),
)
