"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): an encoder with rotary positions, whose layers
see all keys or only near ones, and whose MLP gates by GELU. Ettin (Weller et al. 2025, arXiv
2507.11412) also has decoders of this form.

Attention and MLP read the normalised residual stream; only the first attention reads it without a
norm. Layers that see near keys have another rotary base.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import QKV, Decoder, GroupedQueryAttention, feed_forward, layer_norms
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, LinearLayer, Norm
from kvik.spec.pooling import PooledLayer, PoolingSpec, classifier, mean_vectors, read_labels
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope
from kvik.spec.visible_keys import Window

if TYPE_CHECKING:
    from torch import Tensor


plain_norms = partial(layer_norms, bias=False)


class ModernBertLayer:
    """Attention, then MLP; each reads the normalised residual stream and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        norm, qkv = plain_norms(spec, builder), ("Wqkv",) if spec.encoder else QKV
        self.attention_norm: Norm | None = None
        if not spec.layers[layer].unnormed:
            self.attention_norm = norm("attn_norm", before="qkv")
        self.attention = GroupedQueryAttention(spec, builder, layer, "attn", qkv, "Wo")
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
    """The encoder; or the decoder, whose LM head reads another layer and norm."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        if spec.encoder:
            builder.skip("head", "decoder", "classifier")  # heads for other tasks
        super().__init__(
            spec,
            builder,
            ModernBertLayer,
            lambda spec, trunk: plain_norms(spec, trunk)("final_norm"),
            names=("embeddings.tok_embeddings", "layers", "", "" if spec.encoder else "decoder"),
        )
        self.entered_norm = plain_norms(spec, builder.at("model", ""))("embeddings.norm")
        self.before_head: tuple[LinearLayer, Norm] | None = None
        if not spec.encoder:
            inner, hidden = builder.at("lm_head"), spec.hidden_size
            dense = inner.linear("dense", hidden, hidden, bias=False, activation="gelu")
            self.before_head = dense, plain_norms(spec, inner)("norm")

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        return self.entered_norm(super().enter(ids, ctx))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> [rows, vocab] fp32, of the decoder."""
        assert self.before_head is not None
        dense, norm = self.before_head
        return super().logits(norm(dense(hidden)))


def near_and_far_layers(
    fields: Fields, layers: int, positions: int, *, causal: bool = False
) -> tuple[LayerSpec, ...]:
    """Every third layer, from the first, sees all keys, or those in `layer_types`; the others see
    keys up to half of `local_attention` away, or if causal as many."""
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
    kinds = {kind: LayerSpec(rope=ropes[kind]) for kind in ropes}
    if causal:
        kinds[SLIDING] = replace(kinds[SLIDING], window=Window(reach))
    else:
        kinds = {
            FULL: replace(kinds[FULL], bidirectional=MAX_POSITIONS),
            SLIDING: replace(kinds[SLIDING], bidirectional=reach),
        }
    return tuple(replace(kinds[kind], unnormed=i == 0) for i, kind in enumerate(types))


def modernbert_classifier(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    bias = fields.boolean("classifier_bias", False)
    function = fields.choice("classifier_activation", ("gelu",), "gelu")
    return classifier(
        fields,
        fields.choice("classifier_pooling", ("cls", "mean"), "cls"),
        PooledLayer("head.dense", hidden, hidden, bias=bias, function=function),
        PooledLayer("head.norm", hidden, hidden, bias=False, norm_eps=eps),
        PooledLayer("classifier", hidden, len(read_labels(fields))),
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
MODERNBERT_CLASSIFIER = replace(
    MODERNBERT,
    name="ModernBertForSequenceClassification",
    models="ModernBERT, for classes",
    pooled=modernbert_classifier,
)
MODERNBERT_DECODER = replace(
    MODERNBERT,
    name="ModernBertDecoderForCausalLM",
    model_type="modernbert-decoder",
    models="Ettin decoders",
    layers=partial(near_and_far_layers, causal=True),
    head_bias="decoder_bias",
    pooled=None,
    tied=True,
    eos_token_ids=(50_282,),
    fixed={**MODERNBERT.fixed, "classifier_bias": False},
    defaults={"decoder_bias": True},
)
