"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): an encoder with rotary positions, whose layers
see all keys or only near ones, and whose MLP gates by GELU.

Attention and MLP read the normalised residual stream; only the first attention reads it without a
norm. Layers that see near keys have another rotary base.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder, GroupedQueryAttention, feed_forward, layer_norms
from kvik.spec.declare import Architecture, ForwardContext, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types
from kvik.spec.model import ModelFacts
from kvik.spec.pooling import PooledLayer, PoolingSpec, mean_vectors, scores
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope

if TYPE_CHECKING:
    from torch import Tensor


plain_norms = partial(layer_norms, bias=False)


class ModernBertLayer:
    """Attention, then MLP; each reads the normalised residual stream and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        norm = plain_norms(spec, builder)
        self.attention_norm = norm("attn_norm", before="qkv") if layer > 0 else None
        self.attention = GroupedQueryAttention(spec, builder, layer, "attn", qkv=("Wqkv",), o="Wo")
        self.mlp_norm = norm("mlp_norm", before="gate_up")
        self.mlp = feed_forward(
            spec, builder, layer, gate_up=("Wi",), down="Wo", activation="gelu_and_mul"
        )

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden], rotation [tokens, head_dim] -> x one layer later."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = self.attention(normed, x, rotation, ctx)
        return self.mlp(self.mlp_norm(x), ctx, x)


class ModernBert(Decoder):
    """The encoder."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        builder.skip("head", "decoder", "classifier")  # heads for other tasks
        super().__init__(
            spec,
            builder,
            ModernBertLayer,
            lambda spec, trunk: plain_norms(spec, trunk)("final_norm"),
            names=("embeddings.tok_embeddings", "layers", "", ""),
        )
        self.entered_norm = plain_norms(spec, builder.at("model", ""))("embeddings.norm")

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        return self.entered_norm(super().enter(ids, ctx))


def near_and_far_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every third layer, from the first, sees all keys, or those in `layer_types`; the others see
    keys up to half of `local_attention` away."""
    reach = fields.integer("local_attention", 2, MAX_POSITIONS, 128) // 2
    every = fields.integer("global_attn_every_n_layers", 1, MAX_POSITIONS, 3)
    types: tuple[str, ...] = tuple(SLIDING if i % every else FULL for i in range(layers))
    if "layer_types" in fields:
        types = layer_types(fields, layers)
    stored = fields.inside("rope_parameters")
    keys = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
    ropes: dict[str, RopeSpec] = {}
    for kind, (key, usual) in keys.items():
        if kind in stored:
            ropes[kind] = read_rope(fields, positions, layer_type=kind)
        else:
            theta = usual if fields.is_null(key) else fields.number(key, 1.0, 1e12, usual)
            ropes[kind] = RopeSpec(theta=theta, original_max_position=positions)
    seen = {FULL: MAX_POSITIONS, SLIDING: reach}
    return tuple(LayerSpec(rope=ropes[kind], bidirectional=seen[kind]) for kind in types)


def modernbert_scores(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    bias = fields.boolean("classifier_bias", False)
    function = fields.choice("classifier_activation", ("gelu",), "gelu")
    return scores(
        fields,
        fields.choice("classifier_pooling", ("cls", "mean"), "cls"),
        PooledLayer("head.dense", hidden, hidden, bias=bias, function=function),
        PooledLayer("head.norm", hidden, hidden, bias=False, norm_eps=eps),
        PooledLayer("classifier", hidden, 1),
    )


MODERNBERT = Architecture(
    "ModernBertModel",
    "modernbert",
    "ModernBERT, for embeddings",
    ModernBert,
    layers=near_and_far_layers,
    activations=("gelu",),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    rms_norm=False,
    pooled=mean_vectors,
    keys={"rms_norm_eps": "norm_eps", "hidden_act": "hidden_activation"},
    fixed={"norm_bias": False},
    defaults={"type_vocab_size": 1},
)
MODERNBERT_MASKED = replace(MODERNBERT, name="ModernBertForMaskedLM")
MODERNBERT_SCORES = replace(
    MODERNBERT,
    name="ModernBertForSequenceClassification",
    models="ModernBERT, for reranking",
    pooled=modernbert_scores,
)
