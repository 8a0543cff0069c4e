"""Tiny models of most families, with rows of whole blocks of 32 and heads of 16, as GGUF files and
the native kernels require."""

from __future__ import annotations

from typing import Any

from helpers import tiny_models
from helpers.model_cases import MULTIPLIERS

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True},
    "Qwen2": {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True},
    "Olmo2": {"hidden_size": 64, "intermediate_size": 96},
    "Qwen3": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    "GPTNeoX": {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4},
}
HEAD: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
WIDE = {"hidden_size": 64, "intermediate_size": 96}
MORE: dict[str, dict[str, Any]] = {
    "Gemma": HEAD,
    "Gemma3": {**HEAD, "num_hidden_layers": 7, "sliding_window": 9, "query_pre_attn_scalar": 16},
    "Olmo": WIDE,
    "Phi3": {**WIDE, "sliding_window": 7},
    "Phi": WIDE,
    "Starcoder2": {**WIDE, "sliding_window": None},
    "StableLm": {**WIDE, "use_parallel_residual": True, "qk_layernorm": True},
    "Cohere": {**WIDE, "logit_scale": 0.3, "use_qk_norm": True},
    "Cohere2": {**HEAD, "num_hidden_layers": 5, "sliding_window": 9},
    "Granite": {**WIDE, **MULTIPLIERS},
    "Glm4": {
        **HEAD,
        "attention_bias": True,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "Exaone4": {**HEAD, "num_hidden_layers": 5, "sliding_window": 9},
    "Ernie4_5": HEAD,
    "Nemotron": {**WIDE, "mlp_bias": True},
    "Apertus": HEAD,
    "Arcee": WIDE,
    "Jais2": WIDE,
    "HunYuanDenseV1": HEAD,
    "SmolLM3": {**WIDE, "num_hidden_layers": 4},
    "SeedOss": {**HEAD, "residual_dropout": 0.0, "attention_dropout": 0.0},
}
SOME = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {**WIDE, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {**HEAD, **SOME, "num_experts": 12, "norm_topk_prob": True},
    "Olmoe": {**WIDE, "num_experts": 6, "num_experts_per_tok": 3},
    "Glm4Moe": {
        **HEAD,
        **SOME,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
    },
    "ExaoneMoe": {
        **HEAD,
        **SOME,
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "num_experts": 6,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "Dots1": {
        **HEAD,
        **SOME,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
    },
    "HunYuanMoEV1": {**HEAD, "num_experts": 6, "moe_topk": 2},
    "MiniMaxM2": {
        **HEAD,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
MORE |= EXPERTS
# GGUF metadata cannot express other chunks and patterns of positions.
MORE["Llama4"] = {
    **HEAD,
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
}
KINDS = {**HEAD, "global_head_dim": 32, "sliding_window": 9, "vocab_size_per_layer_input": 96}
KINDS |= {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6}
SAME = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0}
GEMMA4: dict[str, dict[str, Any]] = {
    "Gemma4-token-inputs": {
        **KINDS,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "num_key_value_heads": 1,
    },
    "Gemma4-key-is-value": {**KINDS, **SAME},
    "Gemma4-experts": {
        **KINDS,
        **SAME,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
                "factor": 2.0,
            },
        },
    },
}
MORE |= GEMMA4
# Families whose layers have states or latent attention, or are stored differently in files.
STATES = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 32,
}
SHARED = {**SOME, "num_experts": 6, "shared_expert_intermediate_size": 64}
LATENT = {
    **WIDE,
    **tiny_models.LATENT,
    **SOME,
    **{"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
    **{"n_routed_experts": 6, "n_shared_experts": 2, "n_group": 3},
}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "original_max_position_embeddings": 32}
YARN |= {"factor": 4.0}
EVEN = {"mscale": 1.0, "mscale_all_dim": 1.0}
CAPS = {"attn_logit_softcapping": 0.2, "final_logit_softcapping": 0.3}
HYBRID = {
    "hidden_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
SINGLE = {  # layers of one part
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "time_step_min": 1e-30,  # prompts clamp steps to it, decoding does not
}
BESIDE = {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16}  # Falcon-H1
SEPARATE: dict[str, dict[str, Any]] = {
    "GptOss": {
        **HEAD,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "Qwen3_5": {**HEAD, **STATES},
    "Qwen3_5Moe": {**HEAD, **STATES, **SHARED},
    "Qwen3Next": {**HEAD, **STATES, **SHARED, "norm_topk_prob": True},
    "Qwen2Moe": {**WIDE, **SHARED, "decoder_sparse_step": 1},
    "DeepseekV2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {**LATENT, "rope_parameters": {**YARN, **EVEN}},
    "Glm4MoeLite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "Lfm2": {**WIDE, "layer_types": ["conv", "full_attention", "conv"]},
    "Falcon": {"hidden_size": 64, "ffn_hidden_size": 96},
    "Falcon-two-norms": {"hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Gemma2": {**HEAD, **CAPS, "sliding_window": 9, "query_pre_attn_scalar": 16},
    "Olmo3": {**WIDE, "num_hidden_layers": 4, "sliding_window": 9},
    "Lfm2Moe": {
        **WIDE,
        **SOME,
        "num_experts": 12,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "GraniteMoe": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeShared": {
        **WIDE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "GraniteMoeHybrid": {
        **HYBRID,
        **MULTIPLIERS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
    },
    "GraniteMoeHybrid-dense": {**HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0},
    "Afmoe": {
        **HEAD,
        **SOME,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "num_experts": 6,
        "num_shared_experts": 2,
        "route_scale": 1.7,
        "mup_enabled": True,
    },
    "NemotronH": {**HEAD, **SINGLE},
    "NemotronH-experts": {
        **HEAD,
        **SINGLE,
        **SOME,
        "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 1.7,
    },
    "FalconH1": {**HEAD, **BESIDE},  # files have factors in their weights
    "FalconH1-norm": {
        **HEAD,
        **BESIDE,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "Ministral3": {**HEAD, "rope_parameters": {**YARN, **EVEN, "llama_4_scaling_beta": 2.0}},
    "GPT2": {"n_embd": 64},
    "Bloom": {"hidden_size": 96, "n_head": 6},
    "Mpt": {"d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 1.5}},
}
ALL = {**FAMILIES, **MORE, **SEPARATE}
