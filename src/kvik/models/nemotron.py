"""Nemotron-4 (Parmar et al. 2024, arXiv 2402.16819) and Minitron: LayerNorm whose gains are 1 + the
stored values, and MLPs with squared ReLU and no gate; and Arcee's AFM, a Llama with such MLPs."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, PreNormLayer, plain_mlp
from kvik.spec.declare import Architecture, LayerBuilder, Norm
from kvik.spec.layers import rotary_layers
from kvik.spec.model import ModelFacts

ACTIVATIONS = ("relu2",)


squared_relu = partial(plain_mlp, up="up_proj", down="down_proj")


def last_norm(spec: ModelFacts, builder: LayerBuilder) -> Norm:
    return builder.layer_norm("norm", spec.hidden_size, spec.norm_eps, offset=1.0)


NEMOTRON = Architecture(
    "NemotronForCausalLM",
    "nemotron",
    "Nemotron-4 and Minitron",
    partial(
        Decoder,
        make_layer=partial(PreNormLayer, feed=squared_relu, offset=1.0),
        make_norm=last_norm,
    ),
    layers=partial(rotary_layers, fraction=0.5),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    activations=ACTIVATIONS,
    rms_norm=False,
    gated_mlp=False,
    eos_token_ids=(3,),
    keys={"rms_norm_eps": "norm_eps"},
    gguf="nemotron",
)
ARCEE = Architecture(
    "ArceeForCausalLM",
    "arcee",
    "AFM of Arcee",
    partial(Decoder, make_layer=partial(PreNormLayer, feed=squared_relu)),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    activations=ACTIVATIONS,
    gated_mlp=False,
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(128_001,),
    gguf="arcee",
    gguf_pairs=True,
)
