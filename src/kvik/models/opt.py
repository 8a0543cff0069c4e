"""OPT (Zhang et al. 2022, arXiv 2205.01068): a GPT-2 with ReLU, whose positions begin in the third
row of their table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.gpt2 import GPT2
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, unturned_layers
from kvik.spec.model import ModelFacts
from kvik.spec.rope import MAX_POSITIONS

if TYPE_CHECKING:
    from torch import Tensor


class OPTLayer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, heads, dim = spec.hidden_size, spec.num_heads, spec.head_dim
        self.attention_norm = builder.layer_norm(
            "self_attn_layer_norm", hidden, spec.norm_eps, before="qkv"
        )
        inner = builder.at("self_attn")
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv = inner.heads(names, hidden, (heads, heads, heads), dim, bias=spec.qkv_bias)
        self.attend = inner.attention(layer, dim)
        self.o = inner.linear("out_proj", hidden, hidden, bias=spec.o_bias, role="o")
        self.mlp_norm = builder.layer_norm("final_layer_norm", hidden, spec.norm_eps, before="up")
        self.mlp = builder.mlp(
            "fc1",
            "fc2",
            hidden,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            activation=spec.activation,
        )

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        q, k, v = self.qkv(self.attention_norm(x), ctx)  # [tokens, heads, head_dim]
        x = self.o(self.attend(q, k, v, ctx), ctx, x)
        return self.mlp(self.mlp_norm(x), ctx, x)


def opt_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    hidden = fields.integer("hidden_size", 1, MAX_POSITIONS)
    if fields.integer("word_embed_proj_dim", 1, MAX_POSITIONS, hidden) != hidden:
        raise fields.error("word_embed_proj_dim", f"must be the hidden size, {hidden}")
    return unturned_layers(fields, layers, positions)


OPT = Architecture(
    "OPTForCausalLM",
    "opt",
    "OPT, but for 350M",
    partial(
        GPT2,
        make_layer=OPTLayer,
        scopes=("model.decoder", "decoder", ""),
        names=("embed_tokens", "embed_positions", "layers", "final_layer_norm"),
        skipped=2,
    ),
    layers=opt_layers,
    qkv_bias="enable_bias",
    o_bias="enable_bias",
    mlp_bias="enable_bias",
    activations=("relu", "gelu"),
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    eos_token_ids=(2,),
    defaults={"enable_bias": True},
    keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    fixed={
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
)
