"""OPT (Zhang et al. 2022, arXiv 2205.01068): a GPT-2 with ReLU, whose positions begin in the third
row of their table. In the 350M, norms come after attention and MLP, and token embeddings are
narrower than the residual stream. BioGPT (Luo et al. 2022, arXiv 2210.10341) has its layers."""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    NormedSumLayer,
    PreNormLayer,
    plain_mlp,
)
from kvik.models.gpt2 import learned_positions
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import unturned_layers
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import ForwardContext, LinearLayer

if TYPE_CHECKING:
    from torch import Tensor

POST_NORM, HIDDEN = "post-norm", "hidden_size"
opt_layer = partial(
    PreNormLayer,
    attention=partial(GroupedQueryAttention, o="out_proj"),
    feed=partial(plain_mlp, up="fc1", down="fc2", scope=""),
    norms=("self_attn_layer_norm", "final_layer_norm"),
)
opt_positions = partial(learned_positions, name="embed_positions", skipped=2)


class OPTModel(Decoder):
    """The language model."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        post, scopes = spec.wiring == POST_NORM, ("model.decoder", "decoder", "")
        super().__init__(
            spec,
            builder,
            partial(NormedSumLayer, **opt_layer.keywords) if post else opt_layer,
            scopes=scopes,
            names=("embed_tokens", "layers", "" if post else "final_layer_norm", "lm_head"),
            make_positions=opt_positions,
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


def biogpt_scales(fields: Fields) -> ModelScales:
    scaled, hidden = fields.boolean("scale_embedding", True), fields.integer(HIDDEN, 1, MAX_WIDTH)
    return ModelScales(embedding=sqrt(hidden) if scaled else 1.0)


# `layer_norm_eps` of its files is not used.
BIOGPT = Architecture(
    "BioGptForCausalLM",
    "biogpt",
    "BioGPT",
    partial(
        Decoder,
        make_layer=opt_layer,
        scopes=("biogpt", ""),
        names=("embed_tokens", "layers", "layer_norm", "output_projection"),
        make_positions=opt_positions,
    ),
    layers=unturned_layers,
    scales=biogpt_scales,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    activations=("gelu",),
    rms_norm=False,
    gated_mlp=False,
    rotary=False,
    tied=True,
    eos_token_ids=(2,),
    defaults={
        "vocab_size": 42_384,
        HIDDEN: 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 1024,
    },
)
