"""ModernBERT (Warner et al. 2024, arXiv 2412.13663): an encoder with rotary positions, whose layers
see all keys or those that are near, and whose MLP gates by GELU.

Each reads the residual stream normalised and adds to it; the first attention reads it as it is.
Layers that see near keys turn in their own way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvik.spec.declare import ALL, Architecture, ForwardContext, LayerBuilder, Norm
from kvik.spec.fields import Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types
from kvik.spec.model import ModelFacts
from kvik.spec.pooling import (
    PooledLayer,
    PoolingSpec,
    mean_vectors,
    one_label,
    score_function,
)
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope

if TYPE_CHECKING:
    from torch import Tensor


class ModernBertLayer:
    """Attention and MLP; each reads the residual stream normalised and adds to it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        hidden, eps, dim = spec.hidden_size, spec.norm_eps, spec.head_dim
        facts, inner = spec.layers[layer], builder.at("attn")
        self.attention_norm: Norm | None = None
        if layer > 0:
            self.attention_norm = builder.layer_norm(
                "attn_norm", hidden, eps, before="qkv", bias=False
            )
        heads = (spec.num_heads,) * 3
        self.qkv = inner.heads(("Wqkv",), hidden, heads, dim, bias=spec.qkv_bias, rope=facts.rope)
        self.attend = inner.attention(layer, dim, bidirectional=facts.bidirectional)
        self.o = inner.linear("Wo", hidden, hidden, bias=spec.o_bias, role="o")
        self.mlp_norm = builder.layer_norm("mlp_norm", hidden, eps, before="gate_up", bias=False)
        self.mlp = builder.at("mlp").gated_mlp(
            hidden,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            names=("Wi",),
            down="Wo",
            activation="gelu_and_mul",
        )

    def __call__(self, x: Tensor, rotation: Tensor, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden], rotation [tokens, head_dim] -> x one layer later."""
        q, k, v = self.qkv(x if self.attention_norm is None else self.attention_norm(x), ctx)
        x = self.o(self.attend(q, k, v, ctx, rotation), ctx, x)
        return self.mlp(self.mlp_norm(x), ctx, x)


class ModernBert:
    """The encoder."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder) -> None:
        builder.skip("head", "decoder", "classifier")  # of other uses than this one
        trunk = builder.at("model", "")
        hidden, eps = spec.hidden_size, spec.norm_eps
        below = trunk.at("embeddings")
        self.embed = below.token_embedding("tok_embeddings", spec.vocab_size, hidden, tied=False)
        self.embed_norm = below.layer_norm("norm", hidden, eps, bias=False)
        self.ropes = [builder.rope(rope, width) for rope, width in spec.rotations]
        pairs = [spec.rotation(layer) for layer in spec.layers]
        self.turned = [spec.rotations.index(pair) for pair in pairs if pair is not None]
        self.layers = [
            ModernBertLayer(spec, trunk.at("layers").at(layer), layer)
            for layer in range(spec.num_layers)
        ]
        self.norm = trunk.layer_norm("final_norm", hidden, eps, bias=False)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> hidden [tokens, hidden]."""
        return self.leave(self.blocks(self.enter(ids, ctx), ctx))

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual stream before the first layer, [tokens, hidden]."""
        return self.embed_norm(self.embed(ids))

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> None:
        """Layers read nothing of tokens alone."""

    def blocks(self, x: Tensor, ctx: ForwardContext, span: slice = ALL) -> Tensor:
        """Return the residual stream x [tokens, hidden] -> the same behind the last layer."""
        rotations = [rope.at(ctx.positions) for rope in self.ropes]
        for layer, rope in zip(self.layers[span], self.turned[span], strict=True):
            x = layer(x, rotations[rope], ctx)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] behind the last layer -> normalised."""
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """An encoder has none."""
        raise NotImplementedError


def near_and_far_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every third layer sees all keys, from the first one on, or as `layer_types` says; the others
    those up to half of `local_attention` away."""
    near = fields.integer("local_attention", 2, MAX_POSITIONS, 128) // 2
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
    seen = {FULL: MAX_POSITIONS, SLIDING: near}
    return tuple(LayerSpec(rope=ropes[kind], bidirectional=seen[kind]) for kind in types)


def modernbert_scores(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    one_label(fields)
    function = fields.choice("classifier_activation", ("gelu",), "gelu")
    layers = (
        PooledLayer(
            "head.dense",
            hidden,
            hidden,
            bias=fields.boolean("classifier_bias", False),
            function=function,
        ),
        PooledLayer("head.norm", hidden, hidden, bias=False, norm_eps=eps),
        PooledLayer("classifier", hidden, 1),
    )
    kind = fields.choice("classifier_pooling", ("cls", "mean"), "cls")
    return PoolingSpec(kind, layers, scores=True, function=score_function(fields))


MODERNBERT = Architecture(
    "ModernBertModel",
    "modernbert",
    "ModernBERT, to embed",
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
    models="ModernBERT, to rerank",
    pooled=modernbert_scores,
)
