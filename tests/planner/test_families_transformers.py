"""Every family compared with the parameters of transformers, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.configs import PUBLIC
from helpers.public_configs import NAMES, config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvik.planner.families import shape_from_config
from kvik.spec.visible_keys import Window

pytestmark = pytest.mark.full  # imports transformers, and makes a module for each config


def tiny(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 211,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    return {k: v for k, v in {**base, **more}.items() if v is not ...}


def falcon(**more: Any) -> dict[str, Any]:
    return tiny("FalconForCausalLM", "falcon", intermediate_size=..., **more)


def opt(**more: Any) -> dict[str, Any]:
    return tiny("OPTForCausalLM", "opt", ffn_dim=160, num_key_value_heads=..., **more)


def moe(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return tiny(architecture, model_type, **{**experts, **more})


def latent(model_type: str, architecture: str, **more: Any) -> dict[str, Any]:
    sizes = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    sizes |= {"n_shared_experts": 2, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1}
    return tiny(architecture, model_type, **{**sizes, **more})


# Families that the public configs lack, and switches set the other way.
TINY: dict[str, dict[str, Any]] = {
    "phimoe": tiny(
        "PhiMoEForCausalLM",
        "phimoe",
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
        lm_head_bias=True,
    ),
    "minimax-m2": tiny(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
    ),
    "qwen2-moe, some layers dense": moe(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        shared_expert_intermediate_size=72,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "qwen3-moe, some layers dense": moe(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=16,
        attention_bias=True,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    ),
    "olmoe with biases": moe(
        "OlmoeForCausalLM", "olmoe", moe_intermediate_size=..., attention_bias=True
    ),
    "glm4-moe with qk norm": moe(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        num_experts=...,
        n_routed_experts=6,
        n_shared_experts=2,
        first_k_dense_replace=2,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "deepseek-v2, dense first": latent(
        "deepseek_v2", "DeepseekV2ForCausalLM", q_lora_rank=32, first_k_dense_replace=2
    ),
    "deepseek-v3 with biases, queries whole": latent(
        "deepseek_v3", "DeepseekV3ForCausalLM", q_lora_rank=None, attention_bias=True
    ),
    "granite with biases": tiny(
        "GraniteForCausalLM", "granite", attention_bias=True, mlp_bias=True
    ),
    "smollm3": tiny("SmolLM3ForCausalLM", "smollm3", attention_bias=True, mlp_bias=True),
    "seed-oss": tiny("SeedOssForCausalLM", "seed_oss", attention_out_bias=True, mlp_bias=True),
    "seed-oss, defaults": tiny("SeedOssForCausalLM", "seed_oss"),
    "glm": tiny("GlmForCausalLM", "glm"),
    "glm4": tiny("Glm4ForCausalLM", "glm4", head_dim=16),
    "olmo3": tiny("Olmo3ForCausalLM", "olmo3"),
    "stablelm, parallel": tiny(
        "StableLmForCausalLM",
        "stablelm",
        use_parallel_residual=True,
        qk_layernorm=True,
        partial_rotary_factor=0.5,
    ),
    "cohere with qk norm": tiny(
        "CohereForCausalLM", "cohere", use_qk_norm=True, attention_bias=True
    ),
    "cohere2": tiny("Cohere2ForCausalLM", "cohere2"),
    "gemma3 text": tiny("Gemma3ForCausalLM", "gemma3_text", head_dim=32, attention_bias=True),
    "falcon, one norm": falcon(
        new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1
    ),
    "falcon, untied": falcon(tie_word_embeddings=False, ffn_hidden_size=200),
    "opt, narrow embedding": opt(word_embed_proj_dim=32),
    "opt without biases": opt(enable_bias=False),
    "gpt-neox without biases": tiny(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        attention_bias=False,
        num_key_value_heads=...,
        rotary_pct=1.0,
    ),
    "starcoder2 without biases": tiny("Starcoder2ForCausalLM", "starcoder2", use_bias=False),
    "llama4 scout": PUBLIC["Llama-4-Scout"]
    | {"model_type": "llama4_text", "attn_temperature_tuning": True},
    "llama4 maverick": PUBLIC["Llama-4-Maverick"] | {"model_type": "llama4_text"},
    "gpt-oss": tiny(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=32,
        tie_word_embeddings=True,
    ),
}
CONFIGS = {name: config(name) for name in NAMES} | TINY


def read_by_transformers(values: dict[str, Any]) -> PreTrainedConfig:
    values = dict(values.get("text_config", values))
    model_type = values.pop("model_type")
    for key in ("architectures", "quantization_config"):
        values.pop(key, None)
    return AutoConfig.for_model(model_type, **values)


def made_by_transformers(values: dict[str, Any]) -> int:
    """Return the parameters, and stored buffers, of the module made by transformers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_by_transformers(values))
    stored = set(model.state_dict())
    tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name in stored)]
    return sum(tensor.numel() for tensor in tensors)


# Some layers have a window.
MIXED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM")


@pytest.mark.filterwarnings("ignore")  # of transformers, about irrelevant defaults
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_transformers_makes(name: str) -> None:
    assert shape_from_config(CONFIGS[name], name).parameters == made_by_transformers(CONFIGS[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [name for name in CONFIGS if CONFIGS[name]["architectures"][0] in MIXED],
)
def test_windows_are_where_transformers_has_them(name: str) -> None:
    known = read_by_transformers(CONFIGS[name]).to_dict()
    kinds = known["layer_types"]
    window = Window(known["sliding_window"])
    windows = [window if k == "sliding_attention" else None for k in kinds]
    found = {c.window: c.layers for c in shape_from_config(CONFIGS[name], name).caches}
    assert found == {window: windows.count(window) for window in windows}
