"""GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): attention and MLP side by side, each
behind a LayerNorm of its own; q, k and v stand head by head in one matrix, and a quarter of each
head turns."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.llama import Llama
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor


class NeoXAttention:
    """Multi-head attention; q, k and v come from one matrix."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        heads, dim = spec.num_heads, spec.head_dim
        self.qkv = builder.heads(
            ("query_key_value",),
            spec.hidden_size,
            (heads, heads, heads),
            dim,
            bias=spec.qkv_bias,
            rope=spec.layers[layer].rope,
            by_head=True,
        )
        self.attend = builder.attention(layer, dim)
        self.o = builder.linear("dense", heads * dim, spec.hidden_size, bias=spec.o_bias, role="o")
        builder.ignore("bias", "masked_bias", "rotary_emb.inv_freq")

    def __call__(
        self, x: Tensor, residual: Tensor, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads, head_dim]
        return self.o(self.attend(q, k, v, ctx, rotation), ctx, residual)


class NeoXLayer:
    """Attention and MLP; both read the residual stream, normalised apart, and add to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps = spec.hidden_size, spec.norm_eps
        self.attention_norm = builder.layer_norm("input_layernorm", hidden, eps, before="qkv")
        self.attention = NeoXAttention(spec, builder.at("attention"), layer)
        self.mlp_norm = builder.layer_norm("post_attention_layernorm", hidden, eps, before="up")
        self.mlp = builder.at("mlp").mlp(
            "dense_h_to_4h",
            "dense_4h_to_h",
            hidden,
            spec.intermediate_size,
            bias=True,
            activation=spec.activation,
        )

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        fed = self.mlp_norm(x)
        return self.mlp(fed, ctx, self.attention(self.attention_norm(x), x, rotation, ctx))


def neox_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer sees all keys; files have names of their own for the rotary positions."""
    older = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    named = {key: fields.raw(old) for key, old in older.items() if old in fields}
    rope = read_rope(fields.changed(named), positions, fraction=0.25)
    return (LayerSpec(None, rope),) * layers


GPT_NEOX = Architecture(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    "GPT-NeoX and Pythia",
    partial(
        Llama,
        make_layer=NeoXLayer,
        scopes=("gpt_neox", ""),
        names=("embed_in", "layers", "final_layer_norm", "embed_out"),
    ),
    layers=neox_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias=True,
    defaults={"attention_bias": True},
    activations=("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh"),
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(2,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    fixed={"use_parallel_residual": True},
    gguf="gptneox",
    gguf_names={
        "blk": "gpt_neox.layers",
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
