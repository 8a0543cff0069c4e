"""MiMo-V2-Flash (Xiaomi 2025): heads of values are narrower than those of queries and keys. Most
layers have a short window, more KV heads than the others, and a learned sink in each head; experts
are chosen with a correction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import shown
from kvik.models.decoder import AttentionBlock, Decoder, GroupedQueryAttention, NormedLayer
from kvik.spec.architecture import Architecture
from kvik.spec.declare import SINKS, LayerBuilder
from kvik.spec.experts import DENSE, SPARSE, ExpertsSpec, corrected_router, read_experts
from kvik.spec.fields import MAX_HEAD_DIM, MAX_HEADS, Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, layer_types
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import ForwardContext
from kvik.spec.rope import MAX_POSITIONS, read_rope
from kvik.spec.visible_keys import Window

if TYPE_CHECKING:
    from torch import Tensor

TURNED = 0.334  # part of a head's channels
PATTERN, SPARSE_PATTERN = "hybrid_layer_pattern", "moe_layer_freq"
HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"
KEY_DIM, VALUE_DIM = "head_dim", "v_head_dim"
BEFORE = "sliding_window_size"  # keys before the query's own, which takes precedence
EPS = "layernorm_epsilon"


def attention(spec: ModelFacts, builder: LayerBuilder, layer: int) -> AttentionBlock:
    sink_name = builder.at("self_attn").one_of("attention_sink_bias", SINKS)
    has_sinks = spec.layers[layer].window is not None
    return GroupedQueryAttention(spec, builder, layer, sinks=has_sinks, sink_name=sink_name)


class MimoLayer(NormedLayer):
    """A layer as `PreNormLayer`, whose attention has scaled values."""

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        super().__init__(spec, builder, layer, attention)
        self.sum = builder.scaled_sum(spec.scales.attention_out)

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        attention_norm, mlp_norm = self.norms
        x = self.sum(self.attention(attention_norm(x), None, rotation, ctx), x)
        return self.mlp(mlp_norm(x), ctx, x)


def mimo(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    builder.skip("model.mtp")  # multi-token prediction
    return Decoder(spec, builder, MimoLayer)


def flags(fields: Fields, key: str, layers: int) -> tuple[bool, ...]:
    """Return a number of each layer, 0 or 1, of published files."""
    numbers = fields.numbers(key, 0, 1)
    if len(numbers) != layers or not {*numbers} <= {0, 1}:
        raise fields.error(key, f"must have {layers} entries, 0 or 1, not {shown([*numbers])}")
    return tuple(map(bool, numbers))


def shape(fields: Fields, prefix: str) -> LayerSpec:
    """Return the heads of layers without a window, or of those with one, whose keys have a prefix
    in published files."""
    integer = fields.integer
    kv_heads = integer(KV_HEADS, 1, MAX_HEADS) * (2 if prefix else 1)
    heads = integer(prefix + HEADS, 1, MAX_HEADS, integer(HEADS, 1, MAX_HEADS))
    kv_heads = integer(prefix + KV_HEADS, 1, MAX_HEADS, kv_heads)
    if heads % kv_heads:
        reason = f"must divide {prefix + HEADS} ({heads}), not {kv_heads}"
        raise fields.error(prefix + KV_HEADS, reason)
    dim = integer(prefix + KEY_DIM, 2, MAX_HEAD_DIM, integer(KEY_DIM, 2, MAX_HEAD_DIM))
    value = integer(prefix + VALUE_DIM, 1, dim, integer(VALUE_DIM, 1, MAX_HEAD_DIM))
    return LayerSpec(heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value)


def mimo_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with and without a window: those of `hybrid_layer_pattern` or `layer_types`, else the
    first and every sixth one without."""
    fields.number(EPS, 1e-5, 1e-5, 1e-5)  # files of transformers have `rms_norm_eps`
    if "layer_types" in fields:
        types = layer_types(fields, layers)
    else:
        windowed = tuple(i > 0 and (i + 1) % 6 != 0 for i in range(layers))
        if PATTERN in fields:
            windowed = flags(fields, PATTERN, layers)
        types = tuple(SLIDING if has_window else FULL for has_window in windowed)
    keys = fields.integer("sliding_window", 1, MAX_POSITIONS)
    if BEFORE in fields:
        keys = 1 + fields.integer(BEFORE, 1, MAX_POSITIONS - 1)
    rope = partial(read_rope, max_position_embeddings=positions, fraction=TURNED)
    of_windows = fields.changed({"rope_theta": fields.raw("swa_rope_theta")})
    full = replace(shape(fields, ""), rope=rope(fields, layer_type=FULL))
    turned = rope(of_windows, layer_type=SLIDING)
    sliding = replace(shape(fields, "swa_"), window=Window(keys), rope=turned)
    return tuple(sliding if kind == SLIDING else full for kind in types)


def mimo_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    if isinstance(fields.raw(SPARSE_PATTERN), list):
        sparse = flags(fields, SPARSE_PATTERN, layers)
        kinds = [SPARSE if has_experts else DENSE for has_experts in sparse]
        fields = fields.changed({SPARSE_PATTERN: None, "mlp_layer_types": kinds})
    return read_experts(fields, layers, router=corrected_router, first_dense=1)


def mimo_scales(fields: Fields) -> ModelScales:
    """Return the factor of values, which is that of attention's outputs."""
    return ModelScales(attention_out=fields.number("attention_value_scale", 1e-6, 1e6, 1.0))


MIMO_V2 = Architecture(
    "MiMoV2FlashForCausalLM",
    "mimo_v2_flash",
    "MiMo-V2-Flash",
    mimo,
    layers=mimo_layers,
    experts=mimo_experts,
    qkv_bias="attention_bias",
    scales=mimo_scales,
    fixed={"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True},
    defaults={
        "vocab_size": 152_576,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 48,
        HEADS: 64,
        KV_HEADS: 4,
        KEY_DIM: 192,
        VALUE_DIM: 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
    },
)
