"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose checkpoints store q, k and v as one matrix,
and gate and up as another. LongRoPE stretches the positions of its long variants."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, read_window
from kvik.spec.model import ModelFacts
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor


class Phi3Attention:
    """Grouped-query attention; q, k and v come from one matrix."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = builder.heads(
            ("qkv_proj",),
            spec.hidden_size,
            (heads, kv_heads, kv_heads),
            dim,
            bias=False,
            rope=spec.layers[layer].rope,
        )
        self.attend = builder.attention(layer, dim)
        self.o = builder.linear("o_proj", heads * dim, spec.hidden_size, bias=False, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        return self.o(self.attend(q, k, v, ctx, rotation), ctx, residual)


class Phi3Layer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.norm_eps
        self.attention_norm = builder.rms_norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = Phi3Attention(spec, builder.at("self_attn"), layer)
        self.mlp_norm = builder.rms_norm("post_attention_layernorm", hidden, eps, before="gate_up")
        self.mlp = builder.at("mlp").gated_mlp(hidden, inner, bias=False, names=("gate_up_proj",))

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention(self.attention_norm(x), x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


def phi3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has the window of the file, if it has one."""
    window = read_window(fields) if "sliding_window" in fields else None
    return (LayerSpec(window, read_rope(fields, positions, fraction=1.0)),) * layers


PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    "Phi-3 and 3.5 mini, Phi-4 and 4-mini",
    partial(Llama, make_layer=Phi3Layer),
    layers=phi3_layers,
    eos_token_ids=(32000,),
    gguf="phi3",
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
