"""Command R, R+ and R7B (Cohere 2024): attention and MLP in parallel, LayerNorm without biases.
Pairs of neighbours are rotated, and logits are scaled. In R+, q and k heads are normalised."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, GroupedQueryAttention, Layer, ParallelLayer
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder, Norm
from kvik.spec.fields import Fields
from kvik.spec.layers import mixed_layers, rotary_layers
from kvik.spec.model import ModelFacts, ModelScales

if TYPE_CHECKING:
    from torch import Tensor


class HeadNormAttention(GroupedQueryAttention):
    """Llama's attention with LayerNorm on each head of q and k, with separate gains per head.

    Args:
        norms: names of the norms of q and of k, for `LayerBuilder.head_norms`.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        norms: tuple[str, str] = ("q_norm", "k_norm"),
    ) -> None:
        super().__init__(spec, builder, layer)
        norm = partial(
            builder.at("self_attn").head_norms,
            dim=spec.head_dim,
            eps=spec.norm_eps,
            rope=spec.layers[layer].rope,
        )
        self.q_norm = norm(norms[0], spec.num_heads)
        self.k_norm = norm(norms[1], spec.num_kv_heads)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        attended = self.attend(self.q_norm(q), self.k_norm(k), v, ctx, rotation)
        return self.o(attended, ctx, residual)


def cohere_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    attention = HeadNormAttention if spec.qk_norm else GroupedQueryAttention
    return ParallelLayer(spec, builder, layer, attention, norm_bias=False)


def cohere_scales(fields: Fields) -> ModelScales:
    return ModelScales(logits=fields.number("logit_scale", 1e-6, 1e6, 0.0625))


def last_norm(spec: ModelFacts, builder: LayerBuilder) -> Norm:
    """Return the norm after the last layer, whose gain includes the scale of the logits."""
    return builder.layer_norm(
        "norm", spec.hidden_size, spec.norm_eps, bias=False, scale=spec.scales.logits
    )


COHERE = Architecture(
    "CohereForCausalLM",
    "cohere",
    "Command R and R+",
    partial(Decoder, make_layer=cohere_layer, make_norm=last_norm),
    layers=partial(rotary_layers, interleaved=True),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="use_qk_norm",
    rms_norm=False,
    tied=True,
    scales=cohere_scales,
    eos_token_ids=(255001,),
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={"rope_theta": 5e5},
    gguf="command-r",
    gguf_scales=("logit_scale",),
)
# Command R7B and A: three layers with a window, then one without positions.
COHERE2 = replace(
    COHERE,
    name="Cohere2ForCausalLM",
    model_type="cohere2",
    models="Command R7B and A",
    layers=partial(mixed_layers, every=4, full_rotary=False, interleaved=True),
    qk_norm=False,
    defaults={},
    gguf="cohere2",
)
