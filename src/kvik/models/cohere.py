"""Command R, R+ and R7B (Cohere 2024): attention and MLP in parallel, LayerNorm without biases.
Pairs of neighbours are rotated, but halves in Compass (2026), and logits are scaled. In R+, q and k
heads are normalised. Command A+ (2026) has routed experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import (
    QKV,
    Decoder,
    GroupedQueryAttention,
    Layer,
    ParallelLayer,
    feed_forward,
    last_norm,
)
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.experts import Router, read_experts, sparse_layers
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.layers import (
    FULL,
    SLIDING,
    LayerSpec,
    layer_types,
    mixed_layers,
    read_window,
    rotary_layers,
    typed_layers,
    typed_windows,
)
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import FeedForward, ForwardContext
from kvik.spec.rope import MAX_POSITIONS, read_rope

if TYPE_CHECKING:
    from torch import Tensor


class HeadNormAttention(GroupedQueryAttention):
    """Grouped-query attention with LayerNorm on each head of q and k.

    Args:
        norms: names of the norms of q and of k.
        shared: each has one gain and one bias for all heads; else a gain for each head, see
            `LayerBuilder.head_norms`.
        qkv, o, by_head: as in `GroupedQueryAttention`.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        norms: tuple[str, str] = ("q_norm", "k_norm"),
        shared: bool = False,
        qkv: tuple[str, ...] = QKV,
        o: str = "o_proj",
        by_head: bool = False,
    ) -> None:
        super().__init__(spec, builder, layer, qkv=qkv, o=o, by_head=by_head)
        inner, counts = builder.at("self_attn"), (spec.num_heads, spec.num_kv_heads)
        makes = [
            inner.layer_norm if shared else partial(inner.head_norms, heads=count)
            for count in counts
        ]
        rope = spec.layers[layer].rope
        self.q_norm, self.k_norm = (
            make(name, dim=spec.head_dim, eps=spec.norm_eps, rope=rope)
            for make, name in zip(makes, norms, strict=True)
        )

    def heads(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x, ctx)
        return self.q_norm(q), self.k_norm(k), v


def cohere_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    attention = HeadNormAttention if spec.qk_norm else GroupedQueryAttention
    return ParallelLayer(spec, builder, layer, attention, norm_bias=False)


def cohere_scales(fields: Fields, default: float = 0.0625) -> ModelScales:
    return ModelScales(logits=fields.number("logit_scale", 1e-6, 1e6, default))


norm_without_bias = partial(last_norm, bias=False)
COHERE = Architecture(
    "CohereForCausalLM",
    "cohere",
    "Command R and R+",
    partial(Decoder, make_layer=cohere_layer, make_norm=norm_without_bias),
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


def compass_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers by `layer_types`; a kind whose rotary positions are null has none."""
    types, ropes = layer_types(fields, layers, every=1), fields.inside("rope_parameters")
    for kind in types:
        if kind not in ropes and not ropes.is_null(kind):
            raise ropes.error(kind, "is missing; null means no positions")
    specs = zip(typed_layers(fields, layers, positions), types, strict=True)
    return tuple(replace(spec, rope=None) if ropes.is_null(kind) else spec for spec, kind in specs)


# The text models of Compass (Cohere 2026), alone or in a model that reads images (North Vision).
COMPASS = replace(
    COHERE2,
    name="CohereCompassForCausalLM",
    model_type="cohere_compass_text",
    models="Cohere Compass, text alone",
    layers=compass_layers,
    scales=partial(cohere_scales, default=1.0),
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
    },
    gguf=None,
)
COMPASS_VISION = replace(
    COMPASS,
    name="CohereCompassForConditionalGeneration",
    model_type="cohere_compass",
    tied=False,
)


AVERAGED = "average"  # wiring with the mean of routed experts and shared expert, else their sum


class AveragedExperts:
    """The mean of routed experts and the shared expert."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        self.experts = feed_forward(spec, builder, layer)
        self.add = builder.scaled_sum(0.5)

    def __call__(
        self, x: Tensor, ctx: ForwardContext | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        assert residual is not None
        return self.add(self.experts(x, ctx), residual)


def cohere2_moe_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    experts = spec.layers[layer].experts
    averaged = experts is not None and experts.shared and spec.wiring == AVERAGED
    return (AveragedExperts if averaged else feed_forward)(spec, builder, layer)


def cohere2_moe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers without experts, which come first, have windows by their own pattern. If that makes
    none of them slide, they have positions although they have no window."""
    rope, window = read_rope(fields, positions, interleaved=True), read_window(fields)
    first = fields.integer("first_k_dense_replace", 0, layers, 0)
    dense_every = fields.integer("prefix_dense_sliding_window_pattern", 1, MAX_POSITIONS, 1)
    every = fields.integer("sliding_window_pattern", 1, MAX_POSITIONS, 4)
    places = *((i, dense_every) for i in range(first)), *((i, every) for i in range(layers - first))
    types = [SLIDING if (i + 1) % step else FULL for i, step in places]
    typed = fields.changed({"layer_types": fields.raw("layer_types") or types})
    windows, sparse = typed_windows(typed, layers, window), sparse_layers(fields, layers)
    key, usual = "prefix_dense_intermediate_size", fields.integer("intermediate_size", 1, MAX_WIDTH)
    inner = fields.integer(key, 1, MAX_WIDTH, usual)
    return tuple(
        LayerSpec(
            layer_window,
            rope if layer_window or (dense_every == 1 and not has_experts) else None,
            inner=None if has_experts else inner,
        )
        for layer_window, has_experts in zip(windows, sparse, strict=True)
    )


def cohere2_moe_router(fields: Fields, experts: int, active: int) -> Router:
    """Softmax over the chosen experts alone, or sigmoid."""
    if fields.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "softmax":
        return Router(experts, active)
    return Router(experts, active, "sigmoid", normalised=fields.boolean("norm_topk_prob", True))


COHERE2_MOE = replace(
    COHERE2,
    name="Cohere2MoeForCausalLM",
    model_type="cohere2_moe",
    models="Command A+",
    make=partial(
        Decoder,
        make_layer=partial(ParallelLayer, feed=cohere2_moe_feed, norm_bias=False),
        make_norm=norm_without_bias,
    ),
    layers=cohere2_moe_layers,
    experts=partial(
        read_experts,
        inner="intermediate_size",
        router=cohere2_moe_router,
        shared="num_shared_experts",
    ),
    wiring=lambda fields: fields.choice(
        "shared_expert_combination_strategy", (AVERAGED, "sum"), AVERAGED
    ),
    rms_norm="rms_norm_eps",
    head_dim=128,
    keys={**COHERE2.keys, "n_shared_experts": "num_shared_experts"},
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    gguf=None,
)
