"""Qwen3 (Yang et al. 2025): a Llama whose query and key heads are normalised before the rotation;
the experts of Qwen 2; and dots.llm1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer, feed_forward
from kvik.spec.architecture import Architecture, gguf_experts
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, corrected_router, read_experts, softmax_router
from kvik.spec.fields import Fields
from kvik.spec.layers import FULL, SLIDING, LayerSpec, read_window, switched_layers, typed_layers
from kvik.spec.model import ModelFacts
from kvik.spec.pooling import PoolingSpec, last_token_classifier
from kvik.spec.rope import MAX_POSITIONS

# RMSNorm on each head of q and k.
Qwen3Attention = partial(GroupedQueryAttention, norms=("q_norm", "k_norm"))


def qwen3(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    return Decoder(spec, builder, partial(PreNormLayer, attention=Qwen3Attention))


QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    "Qwen 3, dense",
    qwen3,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    layers=switched_layers,
    head_dim=128,
    gguf="qwen3",
)


def qwen3_moe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """As `switched_layers`, but without `layer_types` every layer has the window."""
    return switched_layers(fields.changed({"max_window_layers": 0}), layers, positions)


# Qwen3 with routed experts (Yang et al. 2025, section 2).
QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    models="Qwen 3 with experts",
    layers=qwen3_moe_layers,
    head_dim=None,
    defaults={"num_key_value_heads": 4},
    experts=partial(read_experts, router=softmax_router),
    gguf="qwen3moe",
    gguf_implied=lambda fields: {"norm_topk_prob": True},
)


def dots1_experts(fields: Fields, layers: int) -> tuple[ExpertsSpec | None, ...]:
    """As in DeepSeek-V3. Published files have the method of the choice as `scoring_func`."""
    if fields.raw("scoring_func") == "noaux_tc":
        fields = fields.changed({"scoring_func": None})
    return read_experts(fields, layers, router=corrected_router, shared="n_shared_experts")


# dots.llm1 (Huo et al. 2025, arXiv 2506.05767): with the experts of DeepSeek-V3.
DOTS1 = replace(
    QWEN3,
    name="Dots1ForCausalLM",
    model_type="dots1",
    models="dots.llm1",
    experts=dots1_experts,
    head_dim=None,
    defaults={
        "num_key_value_heads": 32,
        "use_sliding_window": True,
        "max_window_layers": 62,
        "norm_topk_prob": False,
    },
    gguf="dots1",
)


def mellum(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    """Return the model; layers that predict several tokens are not read."""
    builder.skip("mtp")
    return qwen3(spec, builder)


# Mellum 2 (JetBrains 2026): Qwen3 with experts, whose layers with a window have their own rotary
# positions.
MELLUM = replace(
    QWEN3_MOE,
    name="MellumForCausalLM",
    model_type="mellum",
    models="Mellum 2",
    make=mellum,
    layers=typed_layers,
    head_dim=128,
    gguf=None,
    defaults={
        "vocab_size": 98_304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 896,
        "norm_topk_prob": True,
        "sliding_window": 1024,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e5},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)


def qwen3_classifier(fields: Fields, hidden: int, eps: float) -> PoolingSpec:
    return replace(last_token_classifier(fields, hidden, eps), template="qwen3")


# Also Qwen3-Reranker (Zhang et al. 2025, arXiv 2506.05176), converted to a classifier of one label.
QWEN3_CLASSIFIER = QWEN3.classifier(qwen3_classifier)
# Qwen1.5 and Qwen2 with routed experts and a gated shared one (Yang et al. 2024).
SHARED = ExpertNames(shared="shared_expert")
shared_experts = partial(feed_forward, names=SHARED)
SHARED_NAMES = gguf_experts("mlp", SHARED)


def qwen2_moe_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """As `switched_layers`, but without `layer_types` every other layer has a window, from the
    first one up to `max_window_layers`."""
    specs = switched_layers(fields, layers, positions)
    if "layer_types" in fields or not fields.boolean("use_sliding_window", False):
        return specs
    end, window = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28), read_window(fields)
    return tuple(
        replace(layer, window=window if i % 2 == 0 and i < end else None)
        for i, layer in enumerate(specs)
    )


QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    "Qwen 1.5 and 2 with experts",
    partial(Decoder, make_layer=partial(PreNormLayer, feed=shared_experts)),
    qkv_bias="qkv_bias",
    defaults={"qkv_bias": True},
    layers=qwen2_moe_layers,
    experts=partial(
        read_experts, router=softmax_router, shared_width="shared_expert_intermediate_size"
    ),
    gguf="qwen2moe",
    gguf_names=SHARED_NAMES,
    gguf_implied=lambda fields: {"norm_topk_prob": False},
)
