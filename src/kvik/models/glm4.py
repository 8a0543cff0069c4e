"""GLM-4 (Zhipu AI 2024): a Llama in which half of each head turns, in pairs of neighbours;
GLM-4-0414 (Z.ai 2025), whose blocks are normalised before and behind; and GLM-4.5 to 4.7, with
routed experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import AttentionBlock, Llama, LlamaAttention, LlamaLayer
from kvik.models.qwen3 import Qwen3Attention
from kvik.spec.declare import Architecture, FeedForward, ForwardContext, LayerBuilder
from kvik.spec.experts import corrected_router, read_experts
from kvik.spec.layers import turned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


def glm_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Gate and up are one matrix."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return builder.at("mlp").gated_mlp(hidden, inner, bias=False, names=("gate_up_proj",))


class Glm4Layer:
    """Attention and MLP; each reads the residual stream normalised, and what it gives is normalised
    again and added to that."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = builder.rms_norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = LlamaAttention(spec, builder.at("self_attn"), layer)
        self.attended_norm = builder.rms_norm("post_self_attn_layernorm", hidden, eps)
        self.mlp_norm = builder.rms_norm("post_attention_layernorm", hidden, eps, before="gate_up")
        self.mlp = glm_feed(spec, builder, layer)
        self.fed_norm = builder.rms_norm("post_mlp_layernorm", hidden, eps)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        attended = self.attention(self.attention_norm(x), None, rotation, ctx)
        x = self.attended_norm.add(attended, x)
        return self.fed_norm.add(self.mlp(self.mlp_norm(x), ctx), x)


GLM4 = Architecture(
    "Glm4ForCausalLM",
    "glm4",
    "GLM-4-0414",
    partial(Llama, make_layer=Glm4Layer),
    layers=partial(turned_layers, fraction=0.5, interleaved=True),
    qkv_bias="attention_bias",
    head_dim=128,
    defaults={"attention_bias": True},
    eos_token_ids=(151329, 151336, 151338),
    gguf="glm4",
    gguf_names={
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)

GLM = replace(
    GLM4,
    name="GlmForCausalLM",
    model_type="glm",
    models="GLM-4 and GLM-Edge",
    make=partial(Llama, make_layer=partial(LlamaLayer, feed=glm_feed)),
    gguf=None,
    gguf_names={},
)


MAX_PREDICTORS = 8  # layers that predict further tokens, behind the last one


def glm4_moe_attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    """Heads of q and k are normalised in the larger models alone."""
    make = Qwen3Attention if spec.qk_norm else LlamaAttention
    return make(spec, builder, layer)


def glm4_moe(spec: ModelFacts, builder: LayerBuilder) -> Llama:
    for layer in range(spec.num_layers, spec.num_layers + MAX_PREDICTORS):
        builder.skip(f"model.layers.{layer}")
    return Llama(spec, builder, partial(LlamaLayer, attention=glm4_moe_attention))


# GLM-4.5 (GLM-4.5 team 2025, arXiv 2508.06471).
GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    "GLM-4.5 to 4.7, with experts",
    glm4_moe,
    layers=partial(turned_layers, fraction=0.5),
    experts=partial(
        read_experts, router=corrected_router, shared="n_shared_experts", first_dense=1
    ),
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    eos_token_ids=(151329, 151336, 151338),
    gguf="glm4moe",
    gguf_names={"post_attention_norm": "post_attention_layernorm"},
)
