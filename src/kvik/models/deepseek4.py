"""DeepSeek-V4 (DeepSeek-AI 2026): attention over a window and over entries that sum up earlier
tokens, several residual streams that are mixed with each other, and experts of which the first
layers choose some by the token alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.hy4 import StreamsDecoder, StreamsLayer, mixed_streams, read_limit
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, Router, expert_count
from kvik.spec.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.kv import ENTRY_TOKENS, CompressedSpec, IndexSpec
from kvik.spec.layers import (
    COMPRESSED_TYPES,
    MAX_QUERY_RANK,
    SLIDING,
    LayerSpec,
)
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward, ForwardContext
from kvik.spec.rope import MAX_POSITIONS, RopeSpec, read_rope
from kvik.spec.visible_keys import Window

if TYPE_CHECKING:
    from torch import Tensor

SPARSE, HEAVY = COMPRESSED_TYPES
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # in `compress_ratios`, of files without `layer_types`
TYPES, BY_TOKEN, BY_SCORE = "mlp_layer_types", "hash_moe", "moe"
NAMES = ExpertNames(
    gate_up=("experts.{}.w1", "experts.{}.w3"),
    down="experts.{}.w2",
    correction="gate.bias",
    shared_gate_up=("w1", "w3"),
    shared_down="w2",
)


class V4Attention:
    """Attention with one vector per token as key and value of all heads, over a window and over
    entries, if the layer has any."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        builder, facts = builder.at("attn"), spec.layers[layer]
        of, rope, window = facts.compressed, facts.rope, facts.window
        assert of is not None and rope is not None and window is not None
        hidden, heads, dim, eps = spec.hidden_size, spec.num_heads, spec.head_dim, spec.norm_eps
        linear = partial(builder.linear, bias=False)
        self.heads, self.joined = heads, builder.joined()
        self.q_down = linear("wq_a", hidden, of.q_rank, role="q_down")
        self.q_down_norm = builder.rms_norm("q_norm", of.q_rank, eps)
        parts = (heads // of.groups * dim,)  # heads are divided among processes by their groups
        self.q = linear("wq_b", of.q_rank, heads * dim, role="q_up", parts=parts)
        self.q_norm = builder.plain_norm(dim, eps)
        self.kv = linear("wkv", hidden, dim, role="kv_down")
        self.kv_norm = builder.rms_norm(builder.one_of("kv_norm", "norm"), dim, eps)
        scopes, dims = ("compressor", "indexer.compressor"), of.dims(dim)
        names, norms = [], []
        self.makers = []
        for scope, width in zip(scopes, dims, strict=False):
            inside, size = builder.at(scope), (1 + of.overlap) * width
            pair = "wkv", "wgate"
            self.makers.append(
                inside.linear(pair, hidden, (size, size), bias=False, role="kv_down")
            )
            norms.append(inside.rms_norm("norm", width, eps))
            names.append(f"{scope}.ape")
        self.index_q = self.index_weights = None
        if of.index is not None:
            inside, count = builder.at("indexer"), of.index.heads
            linear = partial(inside.linear, bias=False)
            self.index_q = linear("wq_b", of.q_rank, count * of.index.dim, role="q_up")
            self.index_weights = linear("weights_proj", hidden, count, role="gates")
        numbers = layer, *spec.entries_of(layer)
        self.attend = builder.compressed_attention(
            numbers, heads, dim, of, window.keys, rope, names, norms, "wo_a", "attn_sink"
        )
        self.o = builder.linear("wo_b", of.groups * of.group_rank, hidden, bias=False, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, rope] -> [tokens, hidden]."""
        assert rotation is not None
        low = self.q_down_norm(self.q_down(x, ctx))
        q = self.q_norm(self.q(low, ctx).unflatten(1, (self.heads, -1)))
        inputs = indexed = None
        for maker in self.makers:
            made = maker(x, ctx)
            inputs = made if inputs is None else self.joined(inputs, made)
        if self.index_q is not None and self.index_weights is not None:
            indexed = self.index_q(low, ctx), self.index_weights(x, ctx)
        attended = self.attend(q, self.kv_norm(self.kv(x, ctx)), inputs, indexed, rotation, ctx)
        return self.o(attended, ctx, residual)


def v4_feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    experts = spec.layers[layer].experts
    assert experts is not None
    inside, hidden = builder.at("ffn"), spec.hidden_size
    return inside.experts(
        hidden, experts, NAMES, activation="limited_swiglu", vocab=spec.vocab_size
    )


def v4(spec: ModelFacts, builder: LayerBuilder) -> StreamsDecoder:
    """Return the language model; heads that predict further tokens are not read."""
    builder.skip("mtp")
    embed = builder.at("model", "").one_of("embed_tokens", "embed")
    head, norms = builder.one_of("lm_head", "head"), ("attn_norm", "ffn_norm")
    make = partial(StreamsLayer, attention=V4Attention, feed=v4_feed, norms=norms)
    return StreamsDecoder(spec, builder, make, (embed, "layers", "norm", head))


def v4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with a window, some of them with entries."""
    read_limit(fields)
    dim = fields.integer("head_dim", ENTRY_TOKENS, MAX_HEAD_DIM, 512)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    _whole(fields, "head_dim", dim)
    groups = fields.integer("o_groups", 1, heads, 8)
    if heads % groups:
        raise fields.error("o_groups", f"must divide num_attention_heads ({heads}), not {groups}")
    main, compress, turned = read_ropes(fields, positions, dim)
    window = Window(fields.integer("sliding_window", 1, MAX_POSITIONS, 128))
    plain = CompressedSpec(
        fields.integer("q_lora_rank", 1, MAX_QUERY_RANK, 1024),
        turned,
        groups,
        fields.integer("o_lora_rank", 1, MAX_WIDTH, 1024),
    )
    base = LayerSpec(window, main, compressed=plain, hyper=mixed_streams(fields))
    rates = fields.inside("compress_rates")

    def with_entries(kind: str, old: str, usual: int) -> LayerSpec:
        place, key = (rates, kind) if kind in rates else (fields, old)
        overlap = kind == SPARSE
        every = place.integer(key, ENTRY_TOKENS, window.keys // (1 + overlap), usual)
        index = read_index(fields, turned) if overlap else None
        entries = replace(plain, every=every, overlap=overlap, index=index)
        return replace(base, rope=compress, compressed=entries)

    types = kinds_of(fields, layers)
    kinds = {SLIDING: base}
    if SPARSE in types:
        kinds[SPARSE] = with_entries(SPARSE, "compress_rate_csa", 4)
    if HEAVY in types:
        kinds[HEAVY] = with_entries(HEAVY, "compress_rate_hca", 128)
    return tuple(kinds[kind] for kind in types)


def kinds_of(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer; files may list more."""
    types, ratios = fields.strings("layer_types"), "compress_ratios"
    key = "layer_types" if types else ratios
    if not types and ratios in fields:
        numbers = [int(ratio) for ratio in fields.numbers(ratios, 0, MAX_POSITIONS)]
        if unknown := [ratio for ratio in numbers if ratio not in RATIOS]:
            listed = ", ".join(map(str, RATIOS))
            raise fields.error(ratios, f"must hold only {listed}, not {unknown[0]}")
        types = tuple(RATIOS[ratio] for ratio in numbers)
    elif not types:
        return tuple(SPARSE if i > 1 and i % 2 else HEAVY for i in range(layers))
    if len(types) < layers:
        raise fields.error(key, f"must have {layers} entries, not {len(types)}")
    for kind in types:
        if kind not in (SLIDING, *COMPRESSED_TYPES):
            listed = ", ".join((SLIDING, *COMPRESSED_TYPES))
            raise fields.error(key, f"must hold only {listed}, not {shown(kind)}")
    return types[:layers]


def read_ropes(fields: Fields, positions: int, dim: int) -> tuple[RopeSpec, RopeSpec, int]:
    """Return the rotary positions of layers without and with entries, and the rotated channels of
    a head."""
    key, theta = "rope_parameters", "rope_theta"
    rope = fields.mapping("rope_scaling") or fields.mapping(key) or {}
    if not {"main", "compress"} <= rope.keys():
        base = fields.number("compress_rope_theta", 1.0, 1e12, 160_000.0)
        main: Mapping[str, object] = {theta: fields.number(theta, 1.0, 1e12, 10_000.0)}
        rope = {"main": main, "compress": {**rope, theta: base}}
    fields = fields.changed({key: rope, "rope_scaling": None})
    turned = fields.integer("qk_rope_head_dim", 2, dim, max(2, dim // 8))
    read = partial(read_rope, fields, positions, fraction=turned / dim, interleaved=True)
    main_rope, compress = read(layer_type="main"), read(layer_type="compress")
    turned = int(dim * compress.fraction)
    if compress.kind == "yarn" and compress.attention_factor is None:
        compress = replace(compress, attention_factor=1.0)
    # Of a head, what is rotated is the whole of what these know.
    return replace(main_rope, fraction=1.0), replace(compress, fraction=1.0), turned


def read_index(fields: Fields, turned: int) -> IndexSpec:
    dim = fields.integer("index_head_dim", turned, MAX_WIDTH, 128)
    _whole(fields, "index_head_dim", dim)
    heads = fields.integer("index_n_heads", 1, MAX_HEADS, 64)
    return IndexSpec(heads, dim, fields.integer("index_topk", 1, MAX_POSITIONS, 512), True)


def _whole(fields: Fields, key: str, dim: int) -> None:
    if dim % ENTRY_TOKENS:
        raise fields.error(key, f"must be a multiple of {ENTRY_TOKENS}, not {dim}")


def v4_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Every layer has experts, the first ones by the token alone."""
    count = expert_count(fields)
    scores = fields.choice("scoring_func", ("sqrtsoftplus", "sigmoid", "softmax"), "sqrtsoftplus")
    width = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    scale = fields.number("routed_scaling_factor", 0.0, 1e6, 1.5)
    active = fields.integer("num_experts_per_tok", 1, count)
    fields.integer("n_shared_experts", 1, 1, 1)
    router = Router(count, active, scores, corrected=True, scale=scale)  # type: ignore[arg-type]
    by_score = ExpertsSpec(router, width, width)
    by_token = ExpertsSpec(replace(router, corrected=False, by_token=True), width, width)
    types = fields.strings(TYPES)
    if TYPES not in fields:
        first = fields.integer("num_hash_layers", 0, MAX_LAYERS, 3)
        types = tuple(BY_TOKEN if layer < first else BY_SCORE for layer in range(layers))
    if len(types) < layers:
        raise fields.error(TYPES, f"must have {layers} entries, not {len(types)}")
    kinds = {BY_TOKEN: by_token, BY_SCORE: by_score}
    if unknown := [kind for kind in types if kind not in kinds]:
        raise fields.error(TYPES, f"must hold {BY_TOKEN} or {BY_SCORE}, not {shown(unknown[0])}")
    return tuple(kinds[kind] for kind in types[:layers])


DEEPSEEK4 = Architecture(
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    "DeepSeek V4",
    v4,
    layers=v4_layers,
    experts=v4_experts,
    indexed=COMPRESSED_TYPES,
    head_dim=512,
    kv_heads=lambda fields: 1,
    inner=lambda fields: fields.integer("moe_intermediate_size", 1, MAX_WIDTH),
    eos_token_ids=(1,),
    fixed={"attention_bias": False, "mlp_bias": False},
    defaults={
        "vocab_size": 129_280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "max_position_embeddings": 1_048_576,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
    },
)
