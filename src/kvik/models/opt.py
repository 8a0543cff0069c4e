"""OPT (Zhang et al. 2022, arXiv 2205.01068): a GPT-2 with ReLU, whose positions begin in the third
row of their table. In the 350M, norms come after attention and MLP, and token embeddings are
narrower than the residual stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvik.models.gpt2 import learned_positions
from kvik.models.llama import Llama, LlamaAttention, LlamaLayer, layer_norms, plain_mlp
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder, LinearLayer
from kvik.spec.fields import Fields
from kvik.spec.layers import unturned_layers
from kvik.spec.model import ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

POST_NORM = "post-norm"
OPT_ATTENTION = partial(LlamaAttention, o="out_proj")
OPT_MLP = partial(plain_mlp, up="fc1", down="fc2", scope="")
NORMS = ("self_attn_layer_norm", "final_layer_norm")
PreNormLayer = partial(LlamaLayer, attention=OPT_ATTENTION, feed=OPT_MLP, norms=NORMS)


class PostNormLayer:
    """Attention, then MLP; each adds to the residual stream and normalises the sum."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        self.attention = OPT_ATTENTION(spec, builder, layer)
        self.mlp = OPT_MLP(spec, builder, layer)
        self.attention_norm, self.mlp_norm = map(layer_norms(spec, builder), NORMS)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same, one layer later."""
        x = self.attention_norm(self.attention(x, x, rotation, ctx))
        return self.mlp_norm(self.mlp(x, ctx, x))


class OPTModel(Llama):
    """The language model."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        post, scopes = spec.wiring == POST_NORM, ("model.decoder", "decoder", "")
        super().__init__(
            spec,
            builder,
            PostNormLayer if post else PreNormLayer,
            scopes=scopes,
            names=("embed_tokens", "layers", "" if post else "final_layer_norm", "lm_head"),
            make_positions=partial(learned_positions, name="embed_positions", skipped=2),
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
        assert self.positions is not None
        return self.positions.add(ctx.positions, x if self.widen is None else self.widen(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32."""
        return super().logits(hidden if self.narrow is None else self.narrow(hidden))


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
