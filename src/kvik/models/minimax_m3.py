"""MiniMax-M3 (MiniMax 2026): grouped-query attention in which each KV head chooses the blocks of
keys that its queries read, experts as in MiniMax-M2, and the activation of gpt-oss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import (
    Decoder,
    GroupedQueryAttention,
    PreNormLayer,
    feed_forward,
    last_norm,
)
from kvik.models.gpt_oss import check_swiglu
from kvik.models.mixtral import minimax_layers
from kvik.spec.architecture import Architecture
from kvik.spec.declare import GATE_UP, ExpertNames, LayerBuilder
from kvik.spec.experts import (
    DENSE,
    SPARSE,
    ExpertsSpec,
    Router,
    corrected_router,
    read_experts,
)
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.kv import IndexSpec
from kvik.spec.layers import FULL, IN_BLOCKS, LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward, ForwardContext
from kvik.spec.rope import MAX_POSITIONS

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATION = "clamped_swiglu"
MOST_KEYS = 1024  # of a block (csrc/indexer.hpp)
# Keys of config.json, and of `sparse_attention_config` in published files.
OF_INDEX = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
# Names in published checkpoints, and in those that transformers writes.
SCOPES = "mlp", "block_sparse_moe"
CORRECTIONS = "e_score_correction_bias", "gate.e_score_correction_bias"


class BlockIndexer:
    """Computes what chooses blocks of keys: a head for each KV head, and one key for all."""

    def __init__(
        self, spec: ModelFacts, builder: LayerBuilder, layer: int, index: IndexSpec
    ) -> None:
        rope, dim, linear = spec.layers[layer].rope, index.dim, partial(builder.linear, bias=False)
        order: Sequence[int] = (rope and rope.rows(dim)) or range(dim)
        every = [head * dim + channel for head in range(index.heads) for channel in order]
        hidden, heads = spec.hidden_size, index.heads
        q, k = (builder.one_of(f"index_{part}_proj", f"indexer.{part}_proj") for part in "qk")
        self.q = linear(q, hidden, heads * dim, role="q_up", order=every)
        self.k = linear(k, hidden, dim, role="kv_down", order=order)
        self.q_norm, self.k_norm = (
            builder.rms_norm(
                builder.one_of(f"index_{part}_norm", f"indexer.{part}_norm"),
                dim,
                spec.norm_eps,
                offset=1.0,
                rope=rope,
            )
            for part in "qk"
        )
        self.heads = heads

    def __call__(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> queries [tokens, heads * dim], keys [tokens, dim]."""
        q = self.q_norm(self.q(x, ctx).unflatten(1, (self.heads, -1)))
        return q.flatten(1), self.k_norm(self.k(x, ctx))


class MiniMaxM3Attention(GroupedQueryAttention):
    """Grouped-query attention with RMSNorm on each head of q and k, over blocks of keys."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        super().__init__(spec, builder, layer, norms=("q_norm", "k_norm"), offset=1.0)
        index = spec.layers[layer].index
        self.indexer = None
        if index is not None:
            self.indexer = BlockIndexer(spec, builder.at("self_attn"), layer, index)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, head_dim] or None -> [tokens, hidden]."""
        q, k, v = self.qkv(x, ctx)  # [tokens, heads or kv_heads, head_dim]
        indexed = None if self.indexer is None else self.indexer(x, ctx)
        return self.o(self.attend(q, k, v, ctx, rotation, indexed), ctx, residual)


def feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Return the MLP of a layer, or its experts and the one for all tokens."""
    experts = spec.layers[layer].experts
    if experts is None:
        names = gate_up(builder.at("mlp"))
        return feed_forward(spec, builder, layer, gate_up=names, activation=ACTIVATION)
    inside = builder.at(*SCOPES)
    names_of_experts = ExpertNames(
        correction=inside.one_of(*CORRECTIONS),
        shared_gate_up=gate_up(inside.at("shared_experts")),
    )
    if inside.one_of("experts.0.w1", "experts.0.gate_proj").endswith("w1"):
        gate, down = ("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2"
        names_of_experts = replace(names_of_experts, gate_up=gate, down=down)
    return inside.experts(spec.hidden_size, experts, names_of_experts, activation=ACTIVATION)


def gate_up(builder: LayerBuilder) -> tuple[str, ...]:
    """Return the names of gate and up in a scope, where transformers writes one matrix."""
    joined = builder.one_of(GATE_UP[0], "gate_up_proj")
    return GATE_UP if joined in GATE_UP else (joined,)


make_layer = partial(PreNormLayer, attention=MiniMaxM3Attention, feed=feed, offset=1.0)
make_norm = partial(last_norm, offset=1.0)


def m3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers that read all keys, and those in which KV heads choose blocks of keys."""
    check_swiglu(fields)
    read = minimax_layers(fields, layers, positions)
    old = fields.inside("sparse_attention_config")

    def stored(key: str) -> tuple[Fields, str]:
        return (old, OF_INDEX[key]) if OF_INDEX[key] in old else (fields, key)

    def number(key: str, bounds: tuple[int, int], default: int) -> int:
        place, name = stored(key)
        return place.integer(name, *bounds, default)

    heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, 4)
    dim = fields.integer("head_dim", 1, MAX_WIDTH, 128)
    number("index_n_heads", (heads, heads), heads)
    number("index_head_dim", (dim, dim), dim)
    span = number("index_block_size", (1, MOST_KEYS), 128)
    if span & (span - 1):
        place, name = stored("index_block_size")
        raise place.error(name, f"must be a power of 2, not {span}")
    blocks = number("index_topk_blocks", (1, MAX_POSITIONS), 16)
    local = number("index_local_blocks", (0, blocks), 1)
    index = IndexSpec(heads, dim, blocks * span, span=span, local=local)
    return tuple(
        replace(layer, index=index if has_index else None)
        for layer, has_index in zip(read, chooses(fields, old, layers), strict=True)
    )


def chooses(fields: Fields, old: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers choose blocks, by `layer_types` or as in published files."""
    if "layer_types" not in fields and "sparse_attention_freq" in old:
        return tuple(n == 1 for n in each_layer(old, "sparse_attention_freq", (0, 1), layers))
    if "layer_types" not in fields:
        return (False,) * layers
    kinds = each_layer(fields, "layer_types", (FULL, IN_BLOCKS), layers)
    return tuple(kind == IN_BLOCKS for kind in kinds)


def each_layer(
    fields: Fields, key: str, allowed: tuple[object, object], layers: int
) -> list[object]:
    """Return the entries of a list with one of two values for each layer."""
    entries = fields.raw(key)
    known = isinstance(entries, list) and all(entry in allowed for entry in entries)
    if not isinstance(entries, list) or len(entries) != layers or not known:
        first, second = allowed
        reason = f"must have {layers} entries, {first} or {second}, not {shown(entries)}"
        raise fields.error(key, reason)
    return entries


def m3_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Published files say with a number for each layer whether it has experts."""
    key = "moe_layer_freq"
    if isinstance(fields.raw(key), list):
        kinds = [SPARSE if n == 1 else DENSE for n in each_layer(fields, key, (0, 1), layers)]
        fields = fields.changed({key: None, "mlp_layer_types": kinds})
    return read_experts(
        fields,
        layers,
        inner="intermediate_size",
        router=m3_router,
        shared_width="shared_intermediate_size",
        gated=False,
    )


def m3_router(fields: Fields, experts: int, active: int) -> Router:
    return replace(
        corrected_router(fields.changed({"norm_topk_prob": None}), experts, active),
        scale=fields.number("routed_scaling_factor", 0.0, 1e6, 2.0),
    )


MINIMAX_M3 = Architecture(
    "MiniMaxM3VLForCausalLM",
    "minimax_m3_vl_text",
    "MiniMax-M3, text-only models",
    partial(Decoder, make_layer=make_layer, make_norm=make_norm),
    layers=m3_layers,
    indexed=(IN_BLOCKS,),
    experts=m3_experts,
    qk_norm=True,
    head_dim=128,
    inner=lambda fields: fields.integer("dense_intermediate_size", 1, MAX_WIDTH, 12_288),
    eos_token_ids=(200_020,),
    defaults={
        "vocab_size": 200_064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "max_position_embeddings": 524_288,
        "rope_theta": 5e6,
        "rotary_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "shared_intermediate_size": 3072,
    },
)
# As published, with an image encoder.
MINIMAX_M3_IMAGES = replace(
    MINIMAX_M3,
    name="MiniMaxM3SparseForConditionalGeneration",
    model_type="minimax_m3_vl",
    models="MiniMax-M3, text part of models that read images",
)
