"""OLMo 2 (OLMo team 2024, arXiv 2501.00656): a Llama that normalises what its blocks give.

Section 3.1: RMSNorm stands behind attention and MLP in place of before them, and queries and keys
are normalised over all heads together before they are turned.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


class Olmo2Attention:
    """Grouped-query attention with RMSNorm over all queries and over all keys of a token."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = builder.heads(
            ("q_proj", "k_proj", "v_proj"),
            spec.hidden_size,
            (heads, kv_heads, kv_heads),
            dim,
            bias=spec.qkv_bias,
        )
        self.q_norm = builder.rms_norm("q_norm", heads * dim, spec.norm_eps)
        self.k_norm = builder.rms_norm("k_norm", kv_heads * dim, spec.norm_eps)
        self.attend = builder.attention(layer, dim)
        self.o = builder.linear("o_proj", heads * dim, spec.hidden_size, bias=spec.o_bias, role="o")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden], rotation [tokens, head_dim] -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        q = self.q_norm(q.flatten(1)).view(q.shape)
        k = self.k_norm(k.flatten(1)).view(k.shape)
        return self.o(self.attend(q, k, v, ctx, rotation), ctx)


class Olmo2Layer:
    """Attention and MLP; what each gives is normalised and added to the residual stream."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention = Olmo2Attention(spec, builder.at("self_attn"), layer)
        self.attention_norm = builder.rms_norm("post_attention_layernorm", hidden, eps)
        self.mlp = builder.at("mlp").gated_mlp(hidden, spec.intermediate_size, bias=spec.mlp_bias)
        self.mlp_norm = builder.rms_norm("post_feedforward_layernorm", hidden, eps)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention_norm.add(self.attention(x, rotation, ctx), x)
        return self.mlp_norm.add(self.mlp(x, ctx), x)


OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    "olmo2",
    partial(Llama, make_layer=Olmo2Layer),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    eos_token_ids=(50279,),
    gguf="olmo2",
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
