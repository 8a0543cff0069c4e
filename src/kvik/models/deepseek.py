"""DeepSeek-V2, V2.5, V3 and R1 (DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437): multi-head
latent attention, and routed experts after the first layers; GLM-4.7-Flash and Mistral 4, of the
same form; and DeepSeek-V3.2 (2025, arXiv 2512.02556), GLM-5 and A.X K2, whose queries read some
keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import (
    Decoder,
    Layer,
    NormedLayer,
    PreNormLayer,
    feed_forward,
    layer_norms,
    without_predictors,
)
from kvik.spec.architecture import SEPARATE, Architecture, FilePart, separate_wiring
from kvik.spec.declare import LayerBuilder
from kvik.spec.experts import MAX_EXPERTS, Router, corrected_router, read_experts, read_groups
from kvik.spec.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvik.spec.kv import IndexSpec
from kvik.spec.layers import (
    INDEXED_TYPES,
    LatentSpec,
    LayerSpec,
    PredictorSpec,
    QueryScale,
    latent_layers,
)
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, LinearLayer
from kvik.spec.rope import MAX_POSITIONS

if TYPE_CHECKING:
    from torch import Tensor

LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever config.json says for other norms
# The matrix that computes keys and values from latent vectors, and its parts in GGUF files.
UPS, SEPARATE_UPS = "kv_b_proj", ("k_b_proj", "v_b_proj")


@cache
def queries_order(
    latent: LatentSpec, heads: int, turned: tuple[int, ...], gates: int
) -> tuple[int, ...]:
    """Return the output of a checkpoint's queries at each place: the parts of all heads without
    positions, then the rotated parts of all heads, in the order `turned`, then their gates."""
    begins = [head * (latent.query + gates) for head in range(heads)]
    first = [begin + i for begin in begins for i in range(latent.nope)]
    last = [begin + latent.query + i for begin in begins for i in range(gates)]
    return (*first, *(begin + latent.nope + i for begin in begins for i in turned), *last)


class Indexer:
    """Computes what chooses the keys of a layer (`IndexSpec`).

    Args:
        order: of a head's channels in the checkpoint, those that are rotated first; (): they are.
        eps: of the norm of keys.
    """

    def __init__(
        self,
        builder: LayerBuilder,
        hidden: int,
        q_rank: int,
        index: IndexSpec,
        order: Sequence[int],
        eps: float,
    ) -> None:
        linear, dim = partial(builder.linear, bias=False), index.dim
        every = [head * dim + channel for head in range(index.heads) for channel in order]
        self.q = linear("wq_b", q_rank, index.heads * dim, role="q_up", order=every)
        self.k = linear("wk", hidden, dim, role="kv_down", order=order)
        self.k_norm = builder.layer_norm("k_norm", dim, eps, order=order)
        self.weights = linear("weights_proj", hidden, index.heads, role="gates")
        self.gates = None
        if index.pool:
            self.gates = builder.bare_linear("index_kpool_compress_gate", hidden, dim)
        self.joined = builder.joined()

    def __call__(
        self, x: Tensor, narrow: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden], narrow [tokens, q_rank] -> queries [tokens, heads * dim], keys
        [tokens, dim], or with their gates [tokens, 2 * dim], and weights [tokens, heads]."""
        k = self.k_norm(self.k(x, ctx))
        if self.gates is not None:
            k = self.joined(k, self.gates(x))
        return self.q(narrow, ctx), k, self.weights(x, ctx)


class DeepseekAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds only a latent vector
    per token.

    Args:
        gated: the results of heads are gated. The matrix of queries makes the gates, too, and reads
            what it is computed from both before and after its norm.
        scope: of its names.
        o: name of the output projection.
        gate: name of a matrix that makes the gates from the hidden state; "": there is none.
        each_head: it makes a number for each head, else one for each channel of a head's result.
        sink_name: of the heads' learned sinks; "": they have none.
        turned_last: heads of the indexer have the rotated channels last, and the norm of its keys
            has the model's eps.
        eps: of the norms of latent vectors.
        factors: of these vectors, of queries and of keys and values.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        gated: bool = False,
        scope: str = "self_attn",
        o: str = "o_proj",
        gate: str = "",
        each_head: bool = False,
        sink_name: str = "",
        turned_last: bool = False,
        eps: float = LATENT_EPS,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        builder = builder.at(scope)
        latent, rope = spec.layers[layer].latent, spec.layers[layer].rope
        assert latent is not None
        hidden, heads = spec.hidden_size, spec.num_heads
        self.heads, self.latent = heads, latent
        turned = (rope and rope.rows(latent.rope)) or tuple(range(latent.rope))
        parts = (latent.nope, latent.rope, *((latent.value,) if gated else ()))
        order = queries_order(latent, heads, turned, latent.value if gated else 0)
        queries, bias = heads * sum(parts), spec.qkv_bias
        self.parts = [heads * part for part in parts]
        self.down = None
        if latent.q_rank is None:
            up = partial(builder.linear, "q_proj", hidden)
        else:
            self.down = builder.linear("q_a_proj", hidden, latent.q_rank, bias=bias, role="q_down")
            self.q_norm = builder.rms_norm(
                "q_a_layernorm",
                latent.q_rank,
                eps,
                before="" if gated else "q_up",
                scale=factors[0],
            )
            up = partial(builder.linear, "q_b_proj", latent.q_rank * (2 if gated else 1))
        self.join = builder.joined() if gated else None
        self.gated = builder.gated("sigmoid")
        self.q = up(queries, bias=False, role="q_up", order=order, parts=parts)
        self.kv = builder.linear(
            "kv_a_proj_with_mqa",
            hidden,
            latent.width,
            bias=bias,
            role="kv_down",
            order=[*range(latent.rank), *(latent.rank + i for i in turned)],
        )
        self.kv_norm = builder.rms_norm("kv_a_layernorm", latent.rank, eps, scale=factors[1])
        ups = SEPARATE_UPS if spec.wiring == SEPARATE else (UPS,)
        # The part of YaRN's temperature that is not in the rotation.
        stretch = rope.temperature(rope.mscale_all_dim) if rope and rope.mscale_all_dim else 1.0
        scale = latent.query**-0.5 * stretch**2
        index = spec.layers[layer].index
        self.attend = builder.latent_attention(ups, layer, heads, latent, scale, index, sink_name)
        self.indexer = None
        if index is not None and not index.shared and latent.q_rank is not None:
            order, key_eps = (), LATENT_EPS
            if turned_last:
                plain = index.dim - latent.rope
                order, key_eps = (*range(plain, index.dim), *range(plain)), spec.norm_eps
            inside = builder.at("indexer")
            self.indexer = Indexer(inside, hidden, latent.q_rank, index, order, key_eps)
        self.gate: LinearLayer | None = None
        if gate:
            width = heads * (1 if each_head else latent.value)
            self.gate = builder.linear(gate, hidden, width, bias=False, role="gates")
        self.o = builder.linear(o, heads * latent.value, hidden, bias=spec.o_bias, role="o")
        query_scale = spec.layers[layer].query_scale
        self.scale = None if query_scale is None else builder.query_scale(query_scale)
        builder.ignore("rotary_emb.inv_freq")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden], rotation [tokens, rope] or None -> [tokens, hidden]."""
        latent, heads = self.latent, self.heads
        low = x if self.down is None else self.down(x, ctx)
        narrow = x if self.down is None else self.q_norm(low)
        inputs = narrow if self.scale is None else self.scale(narrow, ctx)
        inputs = inputs if self.join is None else self.join(inputs, low)
        nope, q_rope, *gates = self.q(inputs, ctx).split_with_sizes(self.parts, 1)
        vector, k_rope = self.kv(x, ctx).split_with_sizes((latent.rank, latent.rope), 1)
        attended = self.attend(
            nope.unflatten(1, (heads, latent.nope)),
            q_rope.unflatten(1, (heads, latent.rope)),
            self.kv_norm(vector),
            k_rope[:, None],
            ctx,
            rotation,
            None if self.indexer is None else self.indexer(x, narrow, ctx),
        )
        if self.gate is not None:
            gates = [self.gate(x, ctx)]
        for gate in gates:
            attended = self.gated(attended, gate)
        return self.o(attended, ctx, residual)


def grouped_router(fields: Fields, experts: int, active: int) -> Router:
    """Return a router of softmax scores, grouped by `topk_method` (DeepSeek-V2, section 2.2.2)."""
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups, groups_kept = read_groups(fields, experts, active) if method != "greedy" else (1, 1)
    # Weights are never divided by their sum, whatever `norm_topk_prob` says.
    return Router(
        experts,
        active,
        groups=groups,
        kept_groups=groups_kept,
        normalised=False,
        scale=fields.number("routed_scaling_factor", 0.0, 1e6, 1.0),
    )


def file_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts that files store separately, per head."""
    latent, heads = spec.latent, spec.num_heads
    assert latent is not None
    per_head = latent.nope + latent.value
    rows = [range(head * per_head, (head + 1) * per_head) for head in range(heads)]
    keys = [row for head_rows in rows for row in head_rows[: latent.nope]]
    values = [row for head_rows in rows for row in head_rows[latent.nope :]]
    key, value = (f"self_attn.{name}" for name in SEPARATE_UPS)
    parts = FilePart(key, keys, heads=heads, turned=True), FilePart(value, values, heads=heads)
    return {f"self_attn.{UPS}": parts}


GGUF_NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": f"self_attn.{UPS}",
    "attn_k_b": f"self_attn.{SEPARATE_UPS[0]}",
    "attn_v_b": f"self_attn.{SEPARATE_UPS[1]}",
}


def deepseek2_implied(fields: Fields) -> dict[str, object]:
    """Return the method of choosing groups of experts, if a file has groups."""
    grouped = fields.integer("n_group", 1, MAX_EXPERTS, 1) > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy"}


deepseek = partial(
    without_predictors, make_layer=partial(PreNormLayer, attention=DeepseekAttention)
)


DEEPSEEK2 = Architecture(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    "DeepSeek V2, V2.5, V2-Lite and Coder V2",
    deepseek,
    layers=latent_layers,
    experts=partial(read_experts, router=grouped_router, shared="n_shared_experts"),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    wiring=separate_wiring,
    defaults={"n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407},
    eos_token_ids=(2,),
    gguf="deepseek2",
    gguf_names=GGUF_NAMES,
    gguf_parts=file_parts,
    gguf_log_scale=0.1,
    gguf_implied=deepseek2_implied,
)
DEEPSEEK3 = replace(
    DEEPSEEK2,
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    models="DeepSeek V3, V3.1 and R1",
    layers=partial(latent_layers, interleaved="rope_interleave"),
    experts=partial(
        read_experts, router=corrected_router, shared="n_shared_experts", first_dense=3
    ),
    mlp_bias=False,
    predictor=PredictorSpec(),
    defaults={
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    eos_token_ids=(1,),
    gguf_marker=("expert_gating_func", 2, "expert_weights_norm"),
    gguf_implied=None,
)


def indexed_layers(
    fields: Fields,
    layers: int,
    positions: int,
    *,
    interleaved: bool = False,
    heads: int = 64,
    latent_interleaved: bool = True,
) -> tuple[LayerSpec, ...]:
    """Every layer has latent attention over the keys that an indexer chooses.

    Args:
        interleaved, heads: see `IndexSpec`; the latter if config.json has none.
        latent_interleaved: see `latent_layers`.
    """
    read = latent_layers(fields, layers, positions, interleaved=latent_interleaved)
    latent = read[0].latent
    assert latent is not None
    index = read_index(fields, latent, heads, interleaved=interleaved)
    shared = replace(index, shared=True)
    return tuple(
        replace(layer, index=shared if shares else index)
        for layer, shares in zip(read, sharing(fields, layers), strict=True)
    )


def read_index(
    fields: Fields, latent: LatentSpec, heads: int, *, interleaved: bool = False, pool: int = 0
) -> IndexSpec:
    """Return the indexer of layers with latent attention; for the arguments see `IndexSpec`."""
    rope = "qk_rope_head_dim"
    if latent.q_rank is None:
        raise fields.error("q_lora_rank", "must be a number: indexers read what it is the width of")
    dim = fields.integer("index_head_dim", 1, MAX_WIDTH, 128)
    if dim < latent.rope or dim % 2:
        reason = f"must be an even number of at least {rope} ({latent.rope}), not {dim}"
        raise fields.error("index_head_dim", reason)
    top = fields.integer("index_topk", 1, MAX_POSITIONS, 2048)
    if pool and top % pool:
        raise fields.error("index_topk", f"must be a multiple of index_kpool ({pool}), not {top}")
    heads = fields.integer("index_n_heads", 1, MAX_HEADS, heads)
    return IndexSpec(heads, dim, top, interleaved, pool=pool)


def sharing(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers read the keys that an earlier one has chosen: by `indexer_types`, by a
    pattern, or all but some at equal distances."""
    types, pattern = "indexer_types", "index_topk_pattern"
    key = types if types in fields else pattern
    if key not in fields:
        every = fields.integer("index_topk_freq", 1, MAX_LAYERS, 1)
        offset = fields.integer("index_skip_topk_offset", 0, MAX_LAYERS, 2)
        return tuple(max(layer - offset + 1, 0) % every != 0 for layer in range(layers))
    stored = fields.raw(key)
    kinds = tuple(stored) if isinstance(stored, str) else fields.strings(key)
    known = {"full": False, "F": False, "shared": True, "S": True}
    if len(kinds) != layers or not known.keys() >= {*kinds} or known[kinds[0]]:
        reason = f"must have {layers} entries, full or shared, and begin with full"
        raise fields.error(key, f"{reason}, not {shown(stored)}")
    return tuple(known[kind] for kind in kinds)


# DeepSeek-V3.2 (DeepSeek-AI 2025), also its first version, V3.2-Exp.
DEEPSEEK32 = replace(
    DEEPSEEK3,
    name="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    models="DeepSeek V3.2",
    layers=indexed_layers,
    indexed=INDEXED_TYPES,
    gguf=None,
)
# GLM-5 (Z.ai 2026).
GLM5 = replace(
    DEEPSEEK32,
    name="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    models="GLM-5",
    layers=partial(indexed_layers, interleaved=True, heads=32),
    eos_token_ids=(),
    defaults={
        **DEEPSEEK3.defaults,
        "hidden_size": 6144,
        "intermediate_size": 12_288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "vocab_size": 154_880,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 2048,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
    },
)


class SelfGated:
    """A norm over the residual stream, whose result is multiplied by a sigmoid of two small
    matrices of it."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, rank: int) -> None:
        linear, hidden = partial(builder.linear, bias=False), spec.hidden_size
        self.norm = layer_norms(spec, builder)("norm")
        self.down = linear("W_down", hidden, rank, role="gates")
        self.up = linear("W_up", rank, hidden, role="wide_gates")
        self.gated = builder.gated("sigmoid")

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        normed = self.norm(x)
        low = self.down(normed, ctx)
        return self.gated(normed, self.up(self.gated(low, low), ctx))  # SiLU: x sigmoid(x)


class SelfGatedLayer:
    """A layer as `PreNormLayer`, with gated norms before attention and before experts."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        facts, second = spec.layers[layer], "post_attention_layernorm"
        self.first = SelfGated(spec, builder.at("input_layernorm"), facts.norm_rank)
        self.second: SelfGated | None = None
        if facts.experts is not None:
            self.second = SelfGated(spec, builder.at(second), facts.norm_rank)
        else:
            self.plain = layer_norms(spec, builder)(second, before="gate_up")
        self.attention = DeepseekAttention(spec, builder, layer, gated=True)
        self.mlp = feed_forward(spec, builder, layer)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        x = self.attention(self.first(x, ctx), x, rotation, ctx)
        fed = self.plain(x) if self.second is None else self.second(x, ctx)
        return self.mlp(fed, ctx, x)


def axk2_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    rank = fields.integer("gated_norm_rank", 1, MAX_WIDTH, 16)
    read = indexed_layers(fields, layers, positions, heads=16)
    return tuple(replace(layer, norm_rank=rank) for layer in read)


one_dense_layer = partial(
    read_experts, router=corrected_router, shared="n_shared_experts", first_dense=1
)
# A.X K2 (SK Telecom 2026).
AXK2 = replace(
    DEEPSEEK32,
    name="AXK2ForCausalLM",
    model_type="axk2",
    models="A.X K2",
    make=partial(without_predictors, make_layer=SelfGatedLayer),
    layers=axk2_layers,
    predictor=None,
    experts=one_dense_layer,
    eos_token_ids=(163_691,),
    defaults={
        "vocab_size": 163_840,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 128,
        "q_lora_rank": 384,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
)
# GLM-4.7-Flash (Z.ai 2026), whose files are read like DeepSeek-V3's.
GLM4_MOE_LITE = replace(
    DEEPSEEK3,
    name="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    experts=one_dense_layer,
    defaults={
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
    },
)
# Youtu-LLM (Tencent 2025): small, without experts.
YOUTU = replace(
    DEEPSEEK3,
    name="YoutuForCausalLM",
    model_type="youtu",
    models="Youtu-LLM",
    experts=None,
    predictor=None,
    tied=True,
    eos_token_ids=(128_001,),
    gguf=None,
    defaults={},
)


class NormedExpertsLayer(NormedLayer):
    """Attention, then experts; each reads the normalised residual stream and adds to it, the
    experts after another norm."""

    usual_norms = ("input_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    before = ("qkv", "gate_up", "")

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, mlp_norm, fed_norm = self.norms
        x = self.attention(attention_norm(x), x, rotation, ctx)
        return fed_norm.add(self.mlp(mlp_norm(x), ctx), x)


def axk1_layer(spec: ModelFacts, builder: LayerBuilder, layer: int) -> Layer:
    if spec.layers[layer].experts is not None:
        return NormedExpertsLayer(spec, builder, layer, DeepseekAttention)
    builder.ignore("post_mlp_layernorm")  # checkpoints have it in every layer
    return PreNormLayer(spec, builder, layer, DeepseekAttention)


def axk1_router(fields: Fields, experts: int, active: int) -> Router:
    """As in DeepSeek-V3, but published checkpoints have no correction: then `topk_method` is not
    "noaux_tc"."""
    key, corrected = "topk_method", not fields.is_null("topk_method")
    if key in fields:
        corrected = fields.text(key) == "noaux_tc"
    router = corrected_router(fields.changed({key: None}), experts, active)
    return replace(router, corrected=corrected)


# A.X K1 (SK Telecom 2025).
AXK1 = replace(
    DEEPSEEK3,
    name="AXK1ForCausalLM",
    model_type="axk1",
    models="A.X K1",
    make=partial(without_predictors, make_layer=axk1_layer),
    experts=partial(read_experts, router=axk1_router, shared="n_shared_experts", first_dense=1),
    predictor=None,
    eos_token_ids=(163_691,),
    gguf=None,
    defaults={**DEEPSEEK3.defaults, "n_routed_experts": 192},
)


def mistral4_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Latent attention, whose queries are scaled up by their positions in long contexts."""
    rope, key = fields.inside("rope_parameters"), "partial_rotary_factor"
    turned, nope = (
        fields.integer(f"qk_{part}_head_dim", 1, MAX_WIDTH, 64) for part in ("rope", "nope")
    )
    share = turned / (turned + nope)
    if abs(rope.number(key, 0.0, 1.0, share) - share) > 1e-6:
        raise rope.error(key, f"must be qk_rope_head_dim's share of a head, {share:g}")
    stored = {k: v for k, v in (fields.mapping("rope_parameters") or {}).items() if k != key}
    read = latent_layers(
        fields.changed({"rope_parameters": stored}),
        layers,
        positions,
        interleaved="rope_interleave",
    )
    weight, spec = rope.number("llama_4_scaling_beta", 0.0, 1e6, 0.0), read[0].rope
    assert spec is not None
    scale = QueryScale(spec.original_max_position, weight, first=0) if weight else None
    return tuple(replace(layer, query_scale=scale) for layer in read)


def mistral4_router(fields: Fields, experts: int, active: int) -> Router:
    """Return a router of softmax scores, in groups that are ranked by their best two."""
    groups, groups_kept = read_groups(fields, experts, active)
    return Router(
        experts,
        active,
        groups=groups,
        kept_groups=groups_kept,
        group_by="best two",
        normalised=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 0.0, 1e6, 1.0),
    )


# Mistral 4 (Mistral AI 2026), alone or in a model that reads images.
MISTRAL4 = replace(
    DEEPSEEK3,
    name="Mistral4ForCausalLM",
    model_type="mistral4",
    models="Mistral 4",
    make=partial(Decoder, make_layer=partial(PreNormLayer, attention=DeepseekAttention)),
    layers=mistral4_layers,
    experts=partial(read_experts, router=mistral4_router, shared="n_shared_experts"),
    predictor=None,
    eos_token_ids=(2,),
    gguf=None,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 1_048_576,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)
