"""OPT (Zhang et al. 2022, arXiv 2205.01068): a GPT-2 with ReLU, whose positions begin in the third
row of their table. In the 350M norms stand behind attention and MLP, and vectors of tokens are
narrower than the residual stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.gpt2 import GPT2
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder, LinearLayer, Role
from kvik.spec.fields import Fields
from kvik.spec.layers import unturned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor


POST_NORM = "post-norm"


class OPTLayer:
    """Attention and MLP; each reads the residual stream normalised and adds to it, or adds to it
    and normalises the sum."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, heads, dim = spec.hidden_size, spec.num_heads, spec.head_dim
        self.post_norm = spec.wiring == POST_NORM
        qkv: Role = "" if self.post_norm else "qkv"
        up: Role = "" if self.post_norm else "up"
        norm = partial(builder.layer_norm, dim=hidden, eps=spec.norm_eps)
        self.attention_norm = norm("self_attn_layer_norm", before=qkv)
        inner = builder.at("self_attn")
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv = inner.heads(names, hidden, (heads, heads, heads), dim, bias=spec.qkv_bias)
        self.attend = inner.attention(layer, dim)
        self.o = inner.linear("out_proj", hidden, hidden, bias=spec.o_bias, role="o")
        self.mlp_norm = norm("final_layer_norm", before=up)
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
        q, k, v = self.qkv(x if self.post_norm else self.attention_norm(x), ctx)
        x = self.o(self.attend(q, k, v, ctx), ctx, x)
        if self.post_norm:
            x = self.attention_norm(x)
            return self.mlp_norm(self.mlp(x, ctx, x))
        return self.mlp(self.mlp_norm(x), ctx, x)


class OPTModel(GPT2):
    """The language model."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        scopes = ("model.decoder", "decoder", "")
        super().__init__(
            spec,
            builder,
            OPTLayer,
            scopes,
            ("embed_tokens", "embed_positions", "layers", "final_layer_norm"),
            skipped=2,
            last_norm=spec.wiring != POST_NORM,
        )
        self.widen: LinearLayer | None = None
        self.narrow: LinearLayer | None = None
        narrow, hidden = spec.embedding_size, spec.hidden_size
        if narrow != hidden:
            trunk = builder.at(*scopes)
            self.widen = trunk.linear("project_in", narrow, hidden, bias=False)
            self.narrow = trunk.linear("project_out", hidden, narrow, bias=False)

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        x = self.embed(ids)
        return self.embed_position.add(ctx.positions, x if self.widen is None else self.widen(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        return self.lm_head(hidden if self.narrow is None else self.narrow(hidden))


def opt_wiring(fields: Fields) -> str:
    return "" if fields.boolean("do_layer_norm_before", True) else POST_NORM


OPT = Architecture(
    "OPTForCausalLM",
    "opt",
    "OPT",
    OPTModel,
    layers=unturned_layers,
    wiring=opt_wiring,
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
    keys={
        "intermediate_size": "ffn_dim",
        "hidden_act": "activation_function",
        "embedding_size": "word_embed_proj_dim",
    },
    fixed={"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
)
