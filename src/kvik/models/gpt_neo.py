"""GPT-Neo (Black et al. 2021): a GPT-2 whose scores are not scaled, and in which every second layer
sees a window."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.gpt2 import GPT2
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.kv import Window
from kvik.spec.layers import LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.rope import MAX_POSITIONS

if TYPE_CHECKING:
    from torch import Tensor

GLOBAL, LOCAL = "global", "local"


class GPTNeoLayer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, heads, dim, eps = spec.hidden_size, spec.num_heads, spec.head_dim, spec.norm_eps
        self.attention_norm = builder.layer_norm("ln_1", hidden, eps, before="qkv")
        inner, names = builder.at("attn.attention"), ("q_proj", "k_proj", "v_proj")
        self.qkv = inner.heads(names, hidden, (heads, heads, heads), dim, bias=False)
        self.attend = inner.attention(layer, dim, scale=1.0)
        self.o = inner.linear("out_proj", hidden, hidden, bias=True, role="o")
        inner.ignore("bias", "masked_bias")  # causal masks that old checkpoints carry
        self.mlp_norm = builder.layer_norm("ln_2", hidden, eps, before="up")
        self.mlp = builder.at("mlp").mlp(
            "c_fc", "c_proj", hidden, spec.intermediate_size, bias=True, activation=spec.activation
        )

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        q, k, v = self.qkv(self.attention_norm(x), ctx)  # [tokens, heads, head_dim]
        x = self.o(self.attend(q, k, v, ctx), ctx, x)
        return self.mlp(self.mlp_norm(x), ctx, x)


def neo_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Local layers have the window of the file."""
    types = fields.strings("attention_layers")
    if len(types) != layers or set(types) - {GLOBAL, LOCAL}:
        reason = f"must have {layers} entries, each {GLOBAL} or {LOCAL}"
        raise fields.error("attention_layers", reason)
    window = Window(fields.integer("window_size", 1, MAX_POSITIONS, 256))
    return tuple(LayerSpec(window if kind == LOCAL else None) for kind in types)


GPT_NEO = Architecture(
    "GPTNeoForCausalLM",
    "gpt_neo",
    "GPT-Neo and TinyStories",
    partial(GPT2, make_layer=GPTNeoLayer),
    layers=neo_layers,
    o_bias=True,
    mlp_bias=True,
    activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    eos_token_ids=(50256,),
    keys={
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)
