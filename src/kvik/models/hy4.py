"""Hunyuan 4 (Tencent 2026): the attention of DeepSeek-V3.2 with sinks and gates, its experts, and
several residual streams.

Attention, and the MLP or experts, read a sum of the streams, and each stream gets the result times
a weight of its own. All weights depend on the token (hyper-connections, Zhu et al. 2024, arXiv
2409.19606, section 2; its streams themselves are not mixed).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvik.models.decoder import (
    NAMES,
    Decoder,
    MakeAttention,
    MakeFeedForward,
    MakeLayer,
    feed_forward,
    layer_norms,
)
from kvik.models.deepseek import DEEPSEEK32, DeepseekAttention, indexed_layers, one_dense_layer
from kvik.spec.declare import SINKS, ExpertNames, LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import MAX_STREAMS, HyperSpec, LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward, ForwardContext, Mixture

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 10.0  # the only supported limit of the experts' activation, "limited_swiglu"
INDEXERS = "indexer_types"
EVERY = 4  # the first layer has an indexer, and of the others the first of as many
# Begins of the names of what weighs streams, as published and as transformers writes them.
OF_STREAMS = {
    "attention": ("hc_attn_layer.hc_pre.hc_", "hc_pre.hc_attn_layer.hc_"),
    "mlp": ("hc_mlp_layer.hc_pre.hc_", "hc_pre.hc_mlp_layer.hc_"),
    "head": ("hc_head.hc_head_", "hc_pre.hc_head.hc_head_"),
}
OF_MIXED_STREAMS = {  # in DeepSeek-V4 and GLM-5.3
    "attention": ("hc_attn_", "attn_hc."),
    "mlp": ("hc_ffn_", "ffn_hc."),
    "head": ("hc_head_", "hc_head.hc_"),
}
GATES = ("gate_proj", "linear_gate")


def stream_weights(
    spec: ModelFacts, builder: LayerBuilder, of: str, *, writes: bool = True
) -> Mixture:
    """Return the layer that computes weights of all streams for a part of the network in
    `OF_STREAMS`: of what it reads, and if it writes of its results, and of the streams in each
    other if they are mixed."""
    streams = spec.streams
    assert isinstance(streams, HyperSpec)
    count, smallest, mixed = streams.count, streams.smallest, writes and streams.rounds > 0
    scopes = OF_MIXED_STREAMS if streams.rounds else OF_STREAMS
    runs = [(count, 1.0, smallest)]
    if writes:
        runs.append((count, streams.largest, 0.0 if mixed else smallest))
    if mixed:
        runs.append((count**2, 0.0, smallest))
    matrix, biases, gains = (
        builder.one_of(*(f"{scope}{part}" for scope in scopes[of]))
        for part in ("fn", "base", "scale")
    )
    return builder.stream_weights(
        (matrix, biases, gains),
        spec.residual_width,
        runs,
        spec.norm_eps,
        count if mixed else 0,
        streams.rounds,
    )


class HyperConnection:
    """Connects attention, or what follows it, with the residual streams."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, of: str) -> None:
        assert spec.streams is not None
        self.weights = stream_weights(spec, builder, of)
        self.count = spec.streams.count
        self.sum = builder.weighted_sums(self.count)
        self.spread = builder.weighted_sums(1)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, streams * hidden] -> a sum of the streams [tokens, hidden], and the weights of
        what is computed from it [tokens, streams], followed by those of the streams in each other,
        [tokens, streams^2], if they are mixed."""
        weights = self.weights(x)
        return self.sum(x, None, weights[:, : self.count]), weights[:, self.count :]

    def write(self, x: Tensor, made: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, streams * hidden], made [tokens, hidden], and weights as from `read` -> the
        streams."""
        writes, mixes = weights[:, : self.count], weights[:, self.count :]
        return self.spread(made, self.sum(x, None, mixes) if mixes.shape[1] else x, writes)


def hy4_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Return the MLP of a layer, or its experts, of which the shared one has no limits."""
    inside, experts = builder.at("mlp"), spec.layers[layer].experts
    gate_up = inside.one_of(*GATES), "up_proj"
    if experts is None:
        return feed_forward(spec, builder, layer, gate_up=gate_up)
    gate = inside.at("shared_experts").one_of(*GATES)
    names = ExpertNames(shared_gate_up=(gate, "up_proj"))
    return inside.experts(
        spec.hidden_size,
        experts,
        names,
        activation="limited_swiglu",
        shared_activation="silu_and_mul",
    )


def hy4_attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> DeepseekAttention:
    inside = builder.at("self_attn")
    return DeepseekAttention(
        spec,
        builder,
        layer,
        gate=inside.one_of(*reversed(GATES)),
        sink_name=inside.one_of("learnable_sink_param", SINKS),
        turned_last=True,
    )


class StreamsLayer:
    """Attention, then an MLP or experts; each reads a normalised sum of the streams."""

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        attention: MakeAttention = hy4_attention,
        feed: MakeFeedForward = hy4_feed,
        norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    ) -> None:
        norm = layer_norms(spec, builder)
        self.attention_norm = norm(norms[0])
        self.attention = attention(spec, builder, layer)
        self.mlp_norm = norm(norms[1], before="gate_up")
        self.mlp = feed(spec, builder, layer)
        self.of_attention, self.of_mlp = (
            HyperConnection(spec, builder, of) for of in ("attention", "mlp")
        )

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual streams x [tokens, streams * hidden] one layer further."""
        total, weights = self.of_attention.read(x)
        attended = self.attention(self.attention_norm(total), None, rotation, ctx)
        x = self.of_attention.write(x, attended, weights)
        total, weights = self.of_mlp.read(x)
        return self.of_mlp.write(x, self.mlp(self.mlp_norm(total), ctx), weights)


class StreamsDecoder(Decoder):
    """The language model with several residual streams; for other arguments see `Decoder`.

    Args:
        mean: what follows the last layer reads the mean of the streams, else a weighted sum.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        make_layer: MakeLayer = StreamsLayer,
        names: tuple[str, str, str, str] = NAMES,
        mean: bool = False,
    ) -> None:
        super().__init__(spec, builder, make_layer, names=names)
        routers = (layer.experts.router for layer in spec.layers if layer.experts)
        self.routes_tokens = any(router.by_token for router in routers)
        assert spec.streams is not None
        count = spec.streams.count
        self.copies = builder.weighted_sums(1, [1.0] * count)
        self.weights: Mixture | None = None
        if not mean:
            self.weights = stream_weights(spec, builder.at("model", ""), "head", writes=False)
        self.sum = builder.weighted_sums(count, [1 / count] * count if mean else ())

    def enter(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [tokens] -> the residual streams before the first layer, all the same, [tokens,
        streams * hidden]."""
        return self.copies(super().enter(ids, ctx), None)

    def token_inputs(self, ids: Tensor, x: Tensor, ctx: ForwardContext) -> Tensor | None:
        """Return the ids, if layers choose experts by them."""
        return ids if self.routes_tokens else None

    def leave(self, x: Tensor) -> Tensor:
        """x [tokens, streams * hidden] after the last layer -> normalised, [tokens, hidden]."""
        weights = () if self.weights is None else (self.weights(x),)
        return super().leave(self.sum(x, None, *weights))


def hy4(spec: ModelFacts, builder: LayerBuilder) -> StreamsDecoder:
    """Return the language model; heads that predict further tokens are not read."""
    builder.skip("model.mtp_layers")
    return StreamsDecoder(spec, builder)


def read_limit(fields: Fields) -> None:
    """Check the limit of "limited_swiglu"."""
    if (limit := fields.number("swiglu_limit", -1e6, 1e6, LIMIT)) != LIMIT:
        raise fields.error("swiglu_limit", f"must be {LIMIT:g}, not {limit:g}")


def mixed_streams(fields: Fields) -> HyperSpec:
    """Read the facts of streams that are mixed with each other."""
    return HyperSpec(
        fields.integer("hc_mult", 2, MAX_STREAMS, 4),
        largest=2.0,
        smallest=fields.number("hc_eps", 0.0, 1.0, 1e-6),
        rounds=fields.integer("hc_sinkhorn_iters", 1, 1000, 20),
    )


def hy4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Latent attention over the keys that an indexer chooses, which some layers share."""
    read_limit(fields)
    if INDEXERS not in fields:
        kinds = ["shared" if layer % EVERY != 1 and layer else "full" for layer in range(layers)]
        fields = fields.changed({INDEXERS: kinds})
    streams = HyperSpec(
        fields.integer("hc_mult", 2, MAX_STREAMS, 4),
        largest=fields.number("hc_magnitude", 0.0, 1e6, 2.0),
        smallest=fields.number("hc_eps", 0.0, 1.0, 1e-6),
    )
    read = indexed_layers(fields, layers, positions, heads=16, latent_interleaved=False)
    return tuple(replace(layer, hyper=streams) for layer in read)


HY4 = replace(
    DEEPSEEK32,
    name="HYV4ForCausalLM",
    model_type="hy_v4",
    models="Hunyuan 4",
    make=hy4,
    layers=hy4_layers,
    predictor=None,
    experts=one_dense_layer,
    eos_token_ids=(120_025,),
    defaults={
        "vocab_size": 120_832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "routed_scaling_factor": 2.827,
        "q_lora_rank": 1536,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
    },
)
