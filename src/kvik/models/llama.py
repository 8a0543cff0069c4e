"""Llama 2, 3 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024), and models of the same network
with other facts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvik.models.decoder import Decoder
from kvik.models.eagle3 import WIRINGS, Eagle3Head
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import Fields
from kvik.spec.layers import (
    LayerSpec,
    PredictorSpec,
    layer_types,
    optional_rotary_layers,
    rotary_layers,
    switched_layers,
    windowed_layers,
)
from kvik.spec.model import ModelFacts


def llama(spec: ModelFacts, builder: LayerBuilder) -> Decoder | Eagle3Head:
    return (Eagle3Head if spec.wiring in WIRINGS else Decoder)(spec, builder)


LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    "Llama 2, 3 and 3.x, and models of the same architecture",
    llama,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    eos_token_ids=(2,),
    gguf="llama",
    gguf_pairs=True,
)
# Mistral (Jiang et al. 2023): layers attend to a sliding window of keys (section 2).
MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    "Mistral 7B and its kin",
    Decoder,
    layers=windowed_layers,
    eos_token_ids=(2,),
    defaults={"num_key_value_heads": 8},
    gguf="llama",
    gguf_marker=("attention.sliding_window", 1, ""),
    gguf_pairs=True,
)
# Ministral 8B (Mistral AI 2024): every layer has the window, or those in `layer_types`.
MINISTRAL = replace(
    MISTRAL,
    name="MinistralForCausalLM",
    model_type="ministral",
    models="Ministral 8B",
    layers=switched_layers,
    defaults={"num_key_value_heads": 8, "use_sliding_window": True, "max_window_layers": 0},
    gguf=None,
)
# Ministral 3 (Mistral AI 2025): in long contexts, queries are scaled up by their positions.
MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    "ministral3",
    "Ministral 3, text-only models",
    Decoder,
    layers=partial(windowed_layers, scaled_queries=True),
    head_dim=128,
    eos_token_ids=(2,),
    gguf="mistral3",
    gguf_pairs=True,
    gguf_log_scale=1.0,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)


def cwm_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Layers with a window; each fourth one, from the first on, without."""
    types = layer_types(fields, layers, every=4, first=True)
    return switched_layers(fields.changed({"layer_types": types}), layers, positions)


# Code World Model (Meta 2025).
CWM = Architecture(
    "CwmForCausalLM",
    "cwm",
    "Code World Model",
    Decoder,
    layers=cwm_layers,
    mlp_bias="mlp_bias",
    head_dim=128,
    eos_token_ids=(128_001, 128_008, 128_009),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_sliding_window": True,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
)
# Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v; some layers may have a window.
QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    "Qwen 2 and 2.5",
    Decoder,
    qkv_bias=True,
    layers=switched_layers,
    gguf="qwen2",
)


def mimo(spec: ModelFacts, builder: LayerBuilder) -> Decoder:
    builder.skip("model.mtp_layers")  # multi-token prediction
    return Decoder(spec, builder)


# MiMo (Xiaomi 2025, arXiv 2505.07608).
MIMO = replace(
    QWEN2,
    name="MiMoForCausalLM",
    model_type="mimo",
    models="MiMo 7B",
    make=mimo,
    predictor=PredictorSpec(
        "model.mtp_layers.0",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        norm="final_layernorm",
        hidden_first=True,
    ),
    gguf=None,
)
# SmolLM3 (Bakouch et al. 2025): every fourth layer has no positions (NoPE).
SMOLLM3 = Architecture(
    "SmolLM3ForCausalLM",
    "smollm3",
    "SmolLM3",
    Decoder,
    layers=optional_rotary_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    tied=True,
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
    eos_token_ids=(128001,),
    gguf="smollm3",
    gguf_pairs=True,
)
# Helium (Kyutai 2025): pairs of neighbours are rotated.
HELIUM = Architecture(
    "HeliumForCausalLM",
    "helium",
    "Helium",
    Decoder,
    layers=partial(rotary_layers, interleaved=True),
    qkv_bias="attention_bias",
    mlp_bias="mlp_bias",
    head_dim=128,
    eos_token_ids=(2,),
    defaults={
        "vocab_size": 48_000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
    },
)
# Seed-OSS (ByteDance 2025).
SEED_OSS = Architecture(
    "SeedOssForCausalLM",
    "seed_oss",
    "Seed-OSS",
    Decoder,
    defaults={"attention_bias": True, "num_key_value_heads": 8},
    qkv_bias="attention_bias",
    o_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    head_dim=128,
    eos_token_ids=(2,),
    gguf="seed_oss",
    gguf_names={"post_attention_norm": "post_attention_layernorm"},
)
