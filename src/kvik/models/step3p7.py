"""Step 3.5 and the text model of Step 3.7 (StepFun 2026): layers with a window have more heads of
queries than the others, and other rotary positions; heads of queries and keys have norms, and
attention a gate for each head. Experts are chosen with a correction; in the last layers SwiGLU has
limits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.errors import shown
from kvik.models.decoder import (
    MAX_PREDICTORS,
    AttentionBlock,
    Decoder,
    GatedOutputAttention,
    PreNormLayer,
    feed_forward,
    last_norm,
    skip_predictors,
)
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import DENSE, SPARSE, ExpertsSpec, Router, corrected_router, read_experts
from kvik.spec.fields import MAX_HEAD_DIM, MAX_HEADS, Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types, typed_layers
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import FeedForward

OFFSET = 1.0  # of all norms' gains
NAMES = ExpertNames(
    router="moe.gate",
    gate_up=("moe.gate_proj.{}", "moe.up_proj.{}"),
    down="moe.down_proj.{}",
    correction="moe.router_bias",
    shared="share_expert",
)
HEADS, KV_HEADS, DIM = "num_attention_heads", "num_key_value_heads", "head_dim"
TYPES, THETA = "layer_types", "rope_theta"
WINDOWED_HEADS, OTHER = "num_sliding_attention_heads", "attention_other_setting"
LIMITS, SHARED_LIMITS = "swiglu_limits", "swiglu_limits_shared"
LEAST_LIMIT, EXPERT_LIMIT = 0.3, 7.0  # SiLU is above -0.28; of "clipped_swiglu"


def attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    return GatedOutputAttention(spec, builder, layer, each_head=True, gate="g_proj", offset=OFFSET)


def feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    experts, plain = spec.layers[layer].experts, "silu_and_mul"
    if experts is None:
        return feed_forward(spec, builder, layer)
    activation = "clipped_swiglu" if experts.clipped else plain
    return builder.experts(
        spec.hidden_size, experts, NAMES, activation=activation, shared_activation=plain
    )


def step(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    skip_predictors(spec, builder)
    layer = partial(PreNormLayer, attention=attention, feed=feed, offset=OFFSET)
    return Decoder(spec, builder, layer, partial(last_norm, offset=OFFSET))


def of_layers(fields: Fields, key: str, layers: int) -> list[object]:
    """Return a list with an entry for each layer. Published files have more, for layers that
    predict several tokens."""
    values, more = fields.raw(key), fields.integer("num_nextn_predict_layers", 0, MAX_PREDICTORS, 0)
    if not isinstance(values, list) or len(values) not in (layers, layers + more):
        raise fields.error(key, f"must be a list of {layers} entries, not {shown(values)}")
    return values[:layers]


def kinds_of(fields: Fields, layers: int) -> tuple[str, ...]:
    if TYPES not in fields:
        return (FULL,) * layers
    return layer_types(fields.changed({TYPES: of_layers(fields, TYPES, layers)}), layers)


def ropes(fields: Fields, kinds: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """Return the rotary positions of each kind of layers as transformers writes them, of files with
    lists for all layers; `rope_scaling` is of those without a window."""
    turned: dict[str, dict[str, object]] = {}
    for key, name in ((THETA, THETA), ("partial_rotary_factors", "partial_rotary_factor")):
        values = [fields.raw(key)] * len(kinds)
        if isinstance(values[0], list):
            values = of_layers(fields, key, len(kinds))
        for kind, value in zip(kinds, values, strict=True):
            if turned.setdefault(kind, {}).setdefault(name, value) != value:
                raise fields.error(key, f"must be equal in all layers of {kind}")
    turned.get(FULL, {}).update(fields.mapping("rope_scaling") or {})
    return turned


def step_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with and without a window, each kind with its own heads and rotary positions."""
    for key, only in (("use_rope_layers", ()), ("yarn_only_types", (FULL,))):
        if key in fields and fields.strings(key) != only:
            raise fields.error(key, f"must be {[*only]}")
    kinds, stored = kinds_of(fields, layers), fields.mapping("rope_parameters") or {}
    if not all(isinstance(stored.get(kind), dict) for kind in kinds):
        stored = ropes(fields, kinds)
    fields = fields.changed(
        {TYPES: [*kinds], "rope_parameters": stored, "rope_scaling": None, THETA: None}
    )
    heads, of_windows = fields.integer(HEADS, 1, MAX_HEADS), fields.inside(OTHER)
    of_windows.choice("attention_type", (SLIDING,), SLIDING)
    kv_heads, dim = fields.integer(KV_HEADS, 1, MAX_HEADS), fields.integer(DIM, 1, MAX_HEAD_DIM)
    for key, value in (("num_attention_groups", kv_heads), (DIM, dim)):
        if of_windows.integer(key, 1, MAX_HEADS, value) != value:
            raise of_windows.error(key, f"must be that of other layers, {value}")
    windowed = of_windows.integer(HEADS, 1, MAX_HEADS, heads)
    windowed = fields.integer(WINDOWED_HEADS, 1, MAX_HEADS, windowed)
    if windowed % kv_heads:
        reason = f"must be a multiple of {KV_HEADS} ({kv_heads}), not {windowed}"
        raise fields.error(WINDOWED_HEADS, reason)
    specs = typed_layers(fields, layers, positions, fraction=1.0)
    rows = zip(specs, kinds, limits(fields, SHARED_LIMITS, layers), strict=True)
    return tuple(
        replace(spec, heads=windowed if kind == SLIDING else heads, limit=limit)
        for spec, kind, limit in rows
    )


def limits(fields: Fields, key: str, layers: int) -> list[float]:
    """Return the limit of each layer; 0: there is none."""
    if key not in fields:
        return [0.0] * layers
    values = [value or 0.0 for value in of_layers(fields, key, layers)]  # they may be null
    read = fields.changed({key: values}).numbers(key, 0.0, 1e6)
    if any(0.0 < value < LEAST_LIMIT for value in read):
        reason = f"must hold 0 or numbers of at least {LEAST_LIMIT}, not {shown(values)}"
        raise fields.error(key, reason)
    return [*read]


def with_experts(fields: Fields, layers: int) -> list[object]:
    """Return whether each layer is "sparse" or "dense"; published files list the former."""
    key, listed = "mlp_layer_types", "moe_layers_enum"
    if key in fields:
        return of_layers(fields, key, layers)
    stored = fields.raw(listed)
    texts = stored.split(",") if isinstance(stored, str) else stored
    if texts is None:
        texts = list(range(3, layers))
    if not isinstance(texts, list) or not all(str(text).strip().isdecimal() for text in texts):
        raise fields.error(listed, f"must hold numbers of layers, not {shown(stored)}")
    sparse = {int(text) for text in texts}
    return [SPARSE if layer in sparse else DENSE for layer in range(layers)]


def step_router(fields: Fields, experts: int, active: int) -> Router:
    scale = fields.number("moe_router_scaling_factor", 0.0, 1e6, 1.0)
    router = corrected_router(fields, experts, active)
    return replace(router, groups=1, kept_groups=1, normalised=True, scale=scale)


def step_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    fields = fields.changed({"mlp_layer_types": with_experts(fields, layers)})
    fields = fields.named({"scoring_func": "moe_router_activation"})
    read = read_experts(
        fields, layers, router=step_router, shared_width="share_expert_dim", gated=False
    )
    routed, shared = (limits(fields, key, layers) for key in (LIMITS, SHARED_LIMITS))
    if not {*routed} <= {0.0, EXPERT_LIMIT}:
        raise fields.error(LIMITS, f"must hold 0 or {EXPERT_LIMIT:g}, not {shown(routed)}")
    return tuple(
        experts and replace(experts, clipped=limit > 0, shared_limit=shared_limit)
        for experts, limit, shared_limit in zip(read, routed, shared, strict=True)
    )


def step_scales(fields: Fields) -> ModelScales:
    dim = fields.integer(DIM, 1, MAX_HEAD_DIM)
    return ModelScales(attention=fields.number("query_pre_attn_scalar", 1e-3, 1e9, dim) ** -0.5)


STEP3P7 = Architecture(
    "Step3p7ForConditionalGeneration",
    "step3p7",
    "Step 3.7, text alone",
    step,
    layers=step_layers,
    experts=step_experts,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    scales=step_scales,
    fixed={
        "mlp_bias": False,
        "use_bidirectional_attention": False,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "norm_expert_weight": True,
    },
    older={
        "num_attention_groups": KV_HEADS,
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "share_expert_dim",
    },
    defaults={
        "vocab_size": 128_815,
        "hidden_size": 4096,
        "intermediate_size": 11_264,
        "num_hidden_layers": 45,
        HEADS: 64,
        KV_HEADS: 8,
        DIM: 128,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "sliding_window": None,
    },
)
# Step 3.5, in files of the same form.
STEP3P5 = replace(STEP3P7, name="Step3p5ForCausalLM", model_type="step3p5", models="Step 3.5")
