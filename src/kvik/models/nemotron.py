"""Nemotron-4 (Parmar et al. 2024, arXiv 2402.16819) and Minitron: LayerNorm whose gains are 1 + the
stored values, and MLPs with squared ReLU and no gate; and models with such MLPs: Jais 2, Arcee's
AFM and nanochat."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer, plain_mlp, plain_norm
from kvik.models.gemma import norm_from_one, softcap
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, rotary_layers
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import ForwardContext
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("relu2",)


squared_relu = partial(plain_mlp, up="up_proj", down="down_proj")
_squared = partial(
    Architecture,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    activations=ACTIVATIONS,
    gated_mlp=False,
)


NEMOTRON = _squared(
    "NemotronForCausalLM",
    "nemotron",
    "Nemotron-4 and Minitron",
    partial(
        Decoder,
        make_layer=partial(PreNormLayer, feed=squared_relu, offset=1.0),
        make_norm=norm_from_one,
    ),
    layers=partial(rotary_layers, fraction=0.5),
    rms_norm=False,
    eos_token_ids=(3,),
    keys={"rms_norm_eps": "norm_eps"},
    gguf="nemotron",
)
# Jais 2 (Inception 2025): with biases, and all of a head rotated.
JAIS2 = _squared(
    "Jais2ForCausalLM",
    "jais2",
    "Jais 2",
    partial(Decoder, make_layer=partial(PreNormLayer, feed=squared_relu)),
    rms_norm=False,
    eos_token_ids=(150_024,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={"attention_bias": True, "mlp_bias": True},
    gguf="jais2",
)
ARCEE = _squared(
    "ArceeForCausalLM",
    "arcee",
    "AFM of Arcee",
    partial(Decoder, make_layer=partial(PreNormLayer, feed=squared_relu)),
    defaults={"rms_norm_eps": 1e-5},
    eos_token_ids=(128_001,),
    gguf="arcee",
    gguf_pairs=True,
)


# Heads of q and k are normalised before the rotation, which does not change their length.
NanochatLayer = partial(
    PreNormLayer,
    attention=partial(GroupedQueryAttention, norms=("", "")),
    feed=partial(plain_mlp, up="fc1", down="fc2"),
    norms=("", ""),
)


class NanochatDecoder(Decoder):
    """Norms have no gains, and there is one more after the embedding."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        super().__init__(spec, builder, NanochatLayer, plain_norm)
        self.first_norm = plain_norm(spec, builder)

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the normalised embeddings, [tokens, hidden]."""
        return self.first_norm(super().enter(ids, ctx))


def backward_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Heads are rotated the other way round, and normalised afterwards, whatever the rotation's
    scale."""
    rope = replace(read_rope(fields, positions), backward=True, attention_factor=1.0)
    return (LayerSpec(None, rope),) * layers


def logits_cap(fields: Fields) -> ModelScales:
    return ModelScales(logits_cap=softcap(fields, "final_logit_softcapping", 15.0))


# nanochat (Karpathy 2025).
NANOCHAT = Architecture(
    "NanoChatForCausalLM",
    "nanochat",
    "nanochat",
    NanochatDecoder,
    layers=backward_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    activations=ACTIVATIONS,
    gated_mlp=False,
    scales=logits_cap,
    eos_token_ids=(1,),
)
