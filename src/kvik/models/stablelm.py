"""StableLM 2 (Bellagente et al. 2024, arXiv 2402.17834): a Llama with LayerNorm, in which a quarter
of each head turns; in some, attention and MLP stand side by side."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Layer, Llama, LlamaAttention, LlamaLayer
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import turned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

PARALLEL = "parallel"


class ParallelLayer:
    """Attention and MLP; both read the same normalised residual stream and add to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.norm = builder.layer_norm("input_layernorm", hidden, spec.norm_eps)
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.mlp = builder.at("mlp").gated_mlp(hidden, inner, bias=spec.mlp_bias)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        normalised = self.norm(x)
        return self.mlp(normalised, ctx, self.attention(normalised, x, rotation, ctx))


def stablelm_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    make = ParallelLayer if spec.wiring == PARALLEL else LlamaLayer
    return make(spec, builder, layer)


def stablelm_wiring(fields: Fields) -> str:
    return PARALLEL if fields.boolean("use_parallel_residual", False) else ""


STABLELM = Architecture(
    "StableLmForCausalLM",
    "stablelm",
    "StableLM 2, but for the 12B",
    partial(Llama, make_layer=stablelm_layer),
    layers=partial(turned_layers, fraction=0.25),
    qkv_bias="use_qkv_bias",
    wiring=stablelm_wiring,
    rms_norm=False,
    eos_token_ids=(0,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    fixed={"qk_layernorm": False},
    gguf="stablelm",
)
