"""Invalid config.json files give one clear error that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import LLAMA3_SCALING, PUBLIC, small, small_qwen
from helpers.model_cases import BESIDE
from helpers.tiers import examples
from helpers.tiny_models import IN_BLOCKS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.models.registry import ARCHITECTURES
from kvik.spec.rope import ROPE_KINDS

BLOCKS = {**IN_BLOCKS, "num_hidden_layers": 3, "hidden_act": None}
HEAVY = "heavily_compressed_attention"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["T5Model"]}, "architectures"),
    ({"architectures": ...}, "architectures"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"architectures": [3]}, "architectures"),
    ({"hidden_size": ...}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"hidden_size": 32.0}, "hidden_size"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 10**30}, "hidden_size"),
    ({"hidden_size": 34}, "num_attention_heads"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": 2**40}, "vocab_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"head_dim": 0}, "head_dim"),
    ({"intermediate_size": ...}, "intermediate_size"),
    ({"max_position_embeddings": -1}, "max_position_embeddings"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"attention_bias": "yes"}, "attention_bias"),
    ({"mlp_bias": 1}, "mlp_bias"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
    ({"eos_token_id": 100}, "eos_token_id"),
    ({"eos_token_id": [1, -1]}, "eos_token_id"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ({"bos_token_id": 10**9}, "bos_token_id"),
    ({"quantization_config": "gptq"}, "quantization_config"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": 1}, "rope_theta"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": {"type": "mrope"}}, "rope_scaling type"),
    ({"rope_scaling": {"type": ["yarn"]}}, "rope_scaling type"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling factor"),
    ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "rope_scaling factor"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
        "rope_scaling beta_fast",
    ),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
        "rope_scaling original_max_position_embeddings",
    ),
    (
        {"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 0.5}},
        "rope_scaling high_freq_factor",
    ),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling low_freq_factor"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters partial_rotary_factor",
    ),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ({"head_dim": 578}, "head_dim"),
    ({"hidden_size": 1156, "num_attention_heads": 2}, "num_attention_heads"),
    ({"index_topk": 2048}, "index_topk"),
    ({"layer_types": ["full_attention"] * 3 + ["deepseek_sparse_attention"]}, "layer_types"),
    ({"layer_types": ["heavily_compressed_attention"] * 4}, "layer_types"),
    # of layers that are all alike, too
    ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
]


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    return small(architectures=[f"{architecture}ForCausalLM"], **changes)


def step(**changes: Any) -> dict[str, Any]:
    public = PUBLIC["Step-3.7-Flash"]
    return public | {"text_config": public["text_config"] | changes}


def mpt(**changes: Any) -> dict[str, Any]:
    return {**PUBLIC["mpt-7b"], **changes}


def dbrx(part: str, **changes: Any) -> dict[str, Any]:
    config = PUBLIC["dbrx"]
    return config | {part: config[part] | {"moe_num_experts": 4} | changes}


ATTENDS = {"layer_types": ["attention"] * 4}
MAMBA = {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8}
STRATEGY = "shared_expert_combination_strategy"
WIDTH = "shared_intermediate_size"
LING = {"layer_group_size": 2, "num_experts": 8, "num_expert_group": 1, "topk_group": 1}
MINIMAX = {"attn_type_list": [0, 1, 0, 1]}
MIXER = {"num_local_experts": 4, "num_experts_per_tok": 2}
ALPHA = {"type": "dynamic", "alpha": -1.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BAD_FAMILIES: list[tuple[dict[str, Any], str]] = [
    *(
        (of(name, partial_rotary_factor=0.5), "partial_rotary_factor")
        for name in ("Cohere", "Ernie4_5")
    ),
    (
        of("Glm4", rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.5}),
        "rope_parameters rope_type",
    ),
    (of("Cohere", use_qk_norm="yes"), "use_qk_norm"),
    (of("StableLm", qk_layernorm=1), "qk_layernorm"),
    (of("OPT", word_embed_proj_dim=0), "word_embed_proj_dim"),
    (of("OPT", do_layer_norm_before="no"), "do_layer_norm_before"),
    (of("OPT", _remove_final_layer_norm=True), "_remove_final_layer_norm"),
    (of("GraniteMoeHybrid"), "layer_types"),
    (of("GraniteMoeHybrid", **{**MAMBA, "layer_types": ["mamba"] * 4}), "layer_types"),
    (of("GraniteMoeHybrid", **MAMBA, mamba_n_groups=3), "mamba_n_groups"),
    (of("GraniteMoeHybrid", **MAMBA, mamba_d_head=3), "mamba_d_head"),
    (of("GraniteMoeHybrid", **MAMBA, mamba_proj_bias=True), "mamba_proj_bias"),
    (of("GraniteMoeHybrid", **MAMBA, time_step_limit=[0.0, 0.1]), "time_step_limit"),
    (of("Gemma3n"), "num_kv_shared_layers"),  # 15 by default
    *(
        (of("Gemma3n", **{"num_kv_shared_layers": 1, "hidden_act": None, field: value}), field)
        for field, value in (
            ("layer_types", ["sliding_attention"] * 3),
            ("altup_num_inputs", 1),
            ("altup_active_idx", 4),
            ("altup_correct_scale", "yes"),
            ("laurel_rank", 0),
            ("hidden_size_per_layer_input", 0),
            ("vocab_size_per_layer_input", 0),
            ("activation_sparsity_pattern", [0.95]),
            ("activation_sparsity_pattern", [1.0] * 4),
            ("intermediate_size", [64] * 3),
            ("intermediate_size", [64.5] * 4),
            ("hidden_activation", "silu"),
        )
    ),
    (of("Bamba", mamba_n_heads=8), "attn_layer_indices"),
    (of("Bamba", mamba_n_heads=8, attn_layer_indices=[4]), "attn_layer_indices"),
    (of("Bamba", partial_rotary_factor=1.0), "partial_rotary_factor"),
    (of("FalconH1", **BESIDE, ssm_multipliers=[1.0] * 4), "ssm_multipliers"),
    (of("FalconH1", **BESIDE, mlp_multipliers=[0.0, 1.0]), "mlp_multipliers"),
    (of("FalconH1", **BESIDE, key_multiplier=-1), "key_multiplier"),
    (of("FalconH1", **BESIDE, mlp_bias=True), "mlp_bias"),
    (of("FalconH1", **BESIDE, projectors_bias=True), "projectors_bias"),
    (of("FalconH1", **BESIDE, time_step_limit=[0.0, 0.1]), "time_step_limit"),
    (of("FalconH1", **{**BESIDE, "mamba_d_ssm": 50}), "mamba_d_head"),
    (of("FalconH1", **BESIDE, layer_types=["mamba"] * 4), "layer_types"),
    (
        of("FalconH1", **BESIDE, attention_bias=True, attention_in_multiplier=2.0),
        "attention_in_multiplier",
    ),
    *(
        ({**PUBLIC["Mamba-Codestral-7B"], **changes}, key)
        for changes, key in (
            ({"use_bias": True}, "use_bias"),
            ({"n_groups": 3}, "n_groups"),
            ({"num_heads": 64}, "head_dim"),
            ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        )
    ),
    *(
        ({**PUBLIC["falcon-mamba-7b"], **changes}, key)
        for changes, key in (
            ({"state_size": 0}, "state_size"),
            ({"conv_kernel": 9}, "conv_kernel"),
            ({"time_step_rank": -1}, "time_step_rank"),
            ({"mixer_rms_eps": "small"}, "mixer_rms_eps"),
            ({"intermediate_size": 0}, "intermediate_size"),
        )
    ),
    *(
        ({**PUBLIC["Jamba-v0.1"], **changes}, key)
        for changes, key in (
            ({"attn_layer_period": 0}, "attn_layer_period"),
            ({"attn_layer_offset": 8}, "attn_layer_offset"),
            ({"expert_layer_offset": 2}, "expert_layer_offset"),
            ({"mamba_d_conv": 1}, "mamba_d_conv"),
            ({"mamba_dt_rank": "all"}, "mamba_dt_rank"),
            ({"mamba_proj_bias": True}, "mamba_proj_bias"),
            ({"norm_topk_prob": True}, "norm_topk_prob"),
        )
    ),
    (of("Persimmon", qk_layernorm=1), "qk_layernorm"),
    ({**PUBLIC["StarCoder-15B"], "multi_query": 1}, "multi_query"),
    ({**PUBLIC["StarCoder-15B"], "scale_attn_weights": False}, "scale_attn_weights"),
    ({**PUBLIC["CodeGen-350M"], "n_embd": 1020, "n_head": 6}, "n_head"),
    (of("Olmo", clip_qkv=0.0), "clip_qkv"),
    (of("Olmoe", clip_qkv=8.0), "clip_qkv"),
    (of("OlmoHybrid", linear_num_value_heads=3), "linear_num_value_heads"),
    (of("OlmoHybrid", linear_allow_neg_eigval=1), "linear_allow_neg_eigval"),
    (of("OlmoHybrid", layer_types=["linear_attention"] * 4), "layer_types"),
    (of("DeepseekV32", q_lora_rank=None), "q_lora_rank"),
    (of("DeepseekV32", index_head_dim=32), "index_head_dim"),
    (of("DeepseekV32", index_topk=0), "index_topk"),
    (of("DeepseekV32", layer_types=["full_attention"] * 4), "layer_types"),
    (of("DeepseekV32", compress_ratios=[4]), "compress_ratios"),
    (of("AXK2", gated_norm_rank=0), "gated_norm_rank"),
    *(
        (of("MiniMaxM3VL", **{**BLOCKS, key: value}), key)
        for key, value in (
            *(("index_n_heads", 1), ("index_head_dim", 8), ("index_block_size", 12)),
            *(("index_block_size", 2048), ("index_local_blocks", 4), ("swiglu_alpha", 1.0)),
            *(("layer_types", ["full_attention"]), ("layer_types", ["sliding_attention"] * 2)),
        )
    ),
    *(
        (of("DeepseekV4", **{"o_groups": 2, "head_dim": 32, **changes}), key)
        for key, changes in (
            ("swiglu_limit", {"swiglu_limit": 7.0}),
            ("head_dim", {"head_dim": 34}),
            ("o_groups", {"o_groups": 3}),
            ("hc_sinkhorn_iters", {"hc_sinkhorn_iters": 0}),
            ("compress_rate_csa", {"compress_rate_csa": 3}),
            ("compress_rate_hca", {"sliding_window": 64}),
            ("compress_rates heavily_compressed_attention", {"compress_rates": {HEAVY: 129}}),
            ("compress_ratios", {"compress_ratios": [0, 4, 8, 4]}),
            ("layer_types", {"layer_types": ["sliding_attention"]}),
            ("layer_types", {"layer_types": ["full_attention"] * 4}),
            ("index_head_dim", {"index_head_dim": 2}),
            ("mlp_layer_types", {"mlp_layer_types": ["dense"] * 4}),
            ("n_shared_experts", {"n_shared_experts": 2}),
            ("scoring_func", {"scoring_func": "tanh"}),
        )
    ),
    *(
        (PUBLIC["GLM-5.3-Flash"] | {"text_config": {key: value}}, f"text_config {key}")
        for key, value in (
            ("qk_rope_head_dim", 64),
            ("index_kpool", 1),
            ("index_topk", 2050),
            ("index_kpool_always_select_tail", False),
            ("linear_lower_bound", 0.0),
            ("hc_mult", 1),
            ("swiglu_limit", 7.0),
            ("layer_types", ["sliding_attention"] * 4),
        )
    ),
    *(
        (of("HYV4", **{key: value}), key)
        for key, value in (("swiglu_limit", 7.0), ("hc_mult", 1), ("hc_eps", -1.0))
    ),
    *(
        (of("GlmMoeDsa", **{key: value}), key)
        for key, value in (
            *(("indexer_types", kinds) for kinds in (["full"], ["shared"] + ["full"] * 3, [1] * 4)),
            *(("index_topk_pattern", pattern) for pattern in ("FSS", "SFFF", "FFXX")),
            *(("index_topk_freq", 0), ("index_skip_topk_offset", -1)),
        )
    ),
    (of("KimiLinear", mla_use_nope=False), "mla_use_nope"),
    (of("KimiLinear", moe_router_activation_func="softmax"), "moe_router_activation_func"),
    (of("KimiLinear", num_expert_group=3), "num_expert_group"),
    *(
        (of("KimiLinear", linear_attn_config={key: value}), f"linear_attn_config {key}")
        for key, value in (("num_heads", 0), ("full_attn_layers", [4, 5]), ("full_attn_layers", []))
    ),
    *(
        (of("BailingHybrid", **{**LING, key: value}), key)
        for key, value in (
            ("layer_group_size", 0),
            ("kda_lower_bound", 0.0),
            ("kda_safe_gate", 1),
            ("q_lora_rank", 24),
            ("short_conv_kernel_size", 1),
            ("num_expert_group", 3),
            ("moe_router_activation_func", "softmax"),
        )
    ),
    *(
        (of("MiniMaxText01", **{**MINIMAX, key: value}), key)
        for key, value in (
            ("attn_type_list", [0, 1, 0]),
            ("attn_type_list", [0] * 4),
            ("attn_type_list", [0, 1, 2, 1]),
            ("postnorm", False),
            ("rotary_dim", 1024),
            ("shared_intermediate_size", 64),
        )
    ),
    *(
        (of("MiniMax", **{**MINIMAX, f"{name}_factor": 0.0}), f"{name}_factor")
        for name in ("full_attn_alpha", "linear_attn_beta", "mlp_alpha")
    ),
    *(
        (PUBLIC["Zamba2-2.7B"] | {key: value}, key)
        for key, value in (
            ("layers_block_type", ["mamba"] * 54),
            ("layers_block_type", ["mamba", "hybrid"] * 26),
            ("layers_block_type", ["attention", "hybrid"] * 27),
            ("num_attention_heads", 48),
            ("num_mem_blocks", 0),
            ("adapter_rank", 0),
            ("mamba_headdim", 32),
            ("add_bias_linear", True),
            ("use_long_context", True),
            ("use_shared_attention_adapter", 1),
        )
    ),
    *(
        (PUBLIC["LongCat-Flash"] | {key: value}, key)
        for key, value in (
            ("num_layers", 0),
            ("q_lora_rank", None),
            ("zero_expert_num", 513),
            ("zero_expert_type", "copy"),
            ("mla_scale_q_lora", False),
            ("router_bias", True),
            ("moe_topk", 513),
        )
    ),
    *(
        (step(**{key: value}), f"text_config {key}")
        for key, value in (
            ("layer_types", ["full_attention"] * 46),
            ("layer_types", ["chunked_attention"] * 45),
            ("rope_theta", [1e4 + i for i in range(45)]),
            ("partial_rotary_factors", [1.0] * 2),
            ("moe_layers_enum", "3,x"),
            ("moe_layers_enum", 3),
            ("swiglu_limits", [6.0] * 45),
            ("swiglu_limits", [7.0] * 44),
            ("swiglu_limits_shared", [0.1] * 45),
            ("swiglu_limits_shared", [True] * 45),
            ("num_sliding_attention_heads", 90),
            ("num_nextn_predict_layers", 9),
            ("mlp_bias", True),
            ("use_bidirectional_attention", True),
            ("query_pre_attn_scalar", 0),
            ("use_rope_layers", ["full_attention"]),
            ("yarn_only_types", ["sliding_attention"]),
            ("use_head_wise_attn_gate", False),
            ("norm_expert_weight", False),
            ("moe_router_activation", "softmax"),
        )
    ),
    (of("CohereCompass"), "rope_parameters full_attention"),
    (of("CohereCompass", rope_parameters={"full_attention": None}, logit_scale=0), "logit_scale"),
    (of("CohereCompass", layer_types=["chunked_attention"] * 4), "layer_types"),
    *(
        (step(attention_other_setting={key: 4}), f"text_config attention_other_setting {key}")
        for key in ("num_attention_groups", "head_dim")
    ),
    (of("BailingHybrid"), "layer_types"),  # all four have states
    *(
        (of("Laguna", **{key: value}), key)
        for key, value in (
            ("gating", False),
            ("gating", "per-row"),
            ("moe_apply_router_weight_on_input", True),
            ("moe_router_logit_softcapping", 30.0),
            ("num_attention_heads_per_layer", [4, 4]),
            ("num_attention_heads_per_layer", [4, 4, 3, 4]),
        )
    ),
    *(
        (of("MiMoV2Flash", **{key: value}), key)
        for key, value in (
            ("add_full_attention_sink_bias", True),
            ("add_swa_attention_sink_bias", False),
            ("hybrid_layer_pattern", [0, 1]),
            ("hybrid_layer_pattern", [0, 1, 0.5, 0]),
            ("moe_layer_freq", [0, 1, 1, 2]),
            ("layernorm_epsilon", 1e-6),
            ("swa_num_key_value_heads", 3),
            ("swa_v_head_dim", 256),
            ("v_head_dim", 256),
        )
    ),
    *(
        (dbrx(part, **{key: value}), f"{part} {key}")
        for part, key, value in (
            ("attn_config", "kv_n_heads", 0),
            ("attn_config", "clip_qkv", -1.0),
            ("ffn_config", "moe_top_k", 5),
            ("ffn_config", "moe_normalize_expert_weights", 2.0),
            ("ffn_config", "ffn_hidden_size", None),
        )
    ),
    (dbrx("ffn_config", ffn_act_fn={"name": "gelu"}), "ffn_config ffn_act_fn name"),
    (of("Kolibri1", shared_expert_intermediate_size=0), "shared_expert_intermediate_size"),
    (of("Kolibri1", norm_topk_prob=1), "norm_topk_prob"),
    (of("Cohere2Moe", shared_expert_combination_strategy="max"), STRATEGY),
    (of("Cohere2Moe", expert_selection_fn="tanh"), "expert_selection_fn"),
    (of("Cohere2Moe", rms_norm_eps=-1.0), "rms_norm_eps"),
    (of("Lfm3", layer_types=["conv"] * 4), "layer_types"),
    (of("Lfm3", layer_types=["conv", "chunked_attention", "conv", "conv"]), "layer_types"),
    (of("Lfm3", use_attention_gate=False), "use_attention_gate"),
    (
        of(
            "Mistral4",
            **MIXER,
            rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.3},
        ),
        "rope_parameters partial_rotary_factor",
    ),
    (of("NemotronH"), "hybrid_override_pattern"),
    (of("NemotronH", hybrid_override_pattern="M*-"), "hybrid_override_pattern"),
    (of("NemotronH", hybrid_override_pattern="M*-X"), "hybrid_override_pattern"),
    (of("NemotronH", hybrid_override_pattern="M-M-"), "hybrid_override_pattern"),
    (of("NemotronH", layers_block_type=["mlp", "attention", "conv", "mlp"]), "layers_block_type"),
    (of("NemotronH", hybrid_override_pattern="M*-E", moe_latent_size=8), "moe_latent_size"),
    (of("GraniteMoeHybrid", layer_types=["attention"]), "layer_types"),
    (of("GraniteMoeHybrid", **ATTENDS, position_embedding_type="alibi"), "position_embedding_type"),
    (of("GraniteMoeHybrid", **ATTENDS, num_local_experts=-1), "num_local_experts"),
    (
        of("GraniteMoeHybrid", **ATTENDS, **MIXER, shared_intermediate_size=0),
        WIDTH,
    ),
    (of("PhiMoE", **{**MIXER, "num_experts_per_tok": 3}), "num_experts_per_tok"),
    (of("PhiMoE", **MIXER, router_jitter_noise=2), "router_jitter_noise"),
    (
        of("PhiMoE", **MIXER, rope_scaling={**LONG, "short_mscale": 1.1, "long_mscale": 1.2}),
        "rope_scaling short_mscale",
    ),
    (of("Lfm2Moe", layer_types=["conv"] * 4), "layer_types"),
    (of("Lfm2Moe", layer_types=["full_attention"] * 4, num_dense_layers=-1), "num_dense_layers"),
    (of("Ernie4_5_Moe", moe_num_experts=4, moe_k=5), "moe_k"),
    (of("Ernie4_5_Moe", use_bias=True), "use_bias"),
    (of("Nemotron", hidden_act="silu"), "hidden_act"),
    (of("Apertus", hidden_act="silu"), "hidden_act"),
    (of("Cwm", layer_types=["sliding_attention"]), "layer_types"),
    (of("Ministral", sliding_window=0), "sliding_window"),
    (of("MiniCPM3", scale_depth=0), "scale_depth"),
    (of("MiniCPM3", dim_model_base=0.5), "dim_model_base"),
    (of("NanoChat", hidden_act="relu2", final_logit_softcapping=0), "final_logit_softcapping"),
    (of("AXK1", topk_method=1), "topk_method"),
    *(
        (of("HYV3", **{key: value}), key)
        for key, value in (("route_norm", False), ("mlp_bias", True), ("router_scaling_factor", -1))
    ),
    (of("GraniteSWA", sliding_window=None), "layer_types"),
    (of("GraniteSWA", layer_rope_theta=[1e4]), "layer_rope_theta"),
    (of("GraniteSWA", layer_rope_theta=[0.5] * 4), "layer_rope_theta"),
    (of("GraniteMoeShared", num_local_experts=4, shared_intermediate_size=-1), WIDTH),
    (of("HunYuanDenseV1", rope_scaling={"type": "dynamic", "alpha": 9.0}), "head_dim"),
    (of("HunYuanDenseV1", head_dim=8, rope_scaling=ALPHA), "rope_scaling alpha"),
    (of("HunYuanDenseV1", use_cla=True), "use_cla"),
    (of("HunYuanMoEV1", moe_topk=2), "moe_topk"),
    (of("HunYuanMoEV1", num_experts=[1, 2]), "num_experts"),
    (of("HunYuanMoEV1", num_shared_expert=[1, 1, 1, 2]), "num_shared_expert"),
    (of("HunYuanMoEV1", moe_intermediate_size=[9] * 4), "moe_intermediate_size"),
    (of("HunYuanMoEV1", moe_layer_num_skipped=1), "moe_layer_num_skipped"),
    (of("HyperCLOVAX", use_post_norm=1), "use_post_norm"),
    (of("Exaone4", sliding_window=9, sliding_window_pattern="LLG" * 2), "sliding_window_pattern"),
    (of("SolarOpen", first_k_dense_replace=1), "first_k_dense_replace"),
    (of("SolarOpen", use_qk_norm=True), "use_qk_norm"),
    (of("GPTNeo", num_layers=2, num_heads=4, attention_layers=["global"]), "attention_layers"),
    *(
        (mpt(attn_config={key: value}), f"attn_config {key}")
        for key, value in (
            *(("alibi", False), ("qk_ln", True), ("prefix_lm", True), ("clip_qkv", -1.0)),
            *(("attn_uses_sequence_id", True), ("attn_type", "multiquery_attention")),
            *(("alibi_bias_max", 0), ("softmax_scale", "inv_sqrt_d_model")),
        )
    ),
    (mpt(logit_scale=0.5), "logit_scale"),
    (mpt(norm_type="rmsnorm"), "norm_type"),
    (mpt(no_bias=False), "no_bias"),
    (mpt(expansion_ratio=0), "expansion_ratio"),
    (
        {**PUBLIC["bloom-560m"], "apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    ({**PUBLIC["bloom-560m"], "num_attention_heads": 0}, "n_head"),
    ({**PUBLIC["falcon-rw-1b"], "alibi": False}, "parallel_attn"),
    ({**PUBLIC["falcon-rw-1b"], "new_decoder_architecture": True}, "parallel_attn"),
    (of("GPTJ", n_embd=32, n_head=4, n_layer=2, n_positions=64, rotary_dim=9), "rotary_dim"),
    (
        small(architectures=["Qwen2VLForConditionalGeneration"], rope_scaling={"type": "mropes"}),
        "rope_scaling type",
    ),
]
BAD_QWEN: list[tuple[dict[str, Any], str]] = [
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    ({"use_sliding_window": 1}, "use_sliding_window"),
    ({"max_window_layers": -1}, "max_window_layers"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["chunked"] * 4}, "layer_types"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
]
BAD_LLAMA4: list[tuple[dict[str, Any], str]] = [
    ({"attention_chunk_size": 0}, "attention_chunk_size"),
    ({"attention_chunk_size": None}, "attention_chunk_size"),
    ({"layer_types": ["chunked_attention"]}, "layer_types"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ({"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
    ({"floor_scale": 0}, "floor_scale"),
    ({"attn_scale": -1.0}, "attn_scale"),
    ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
    ({"moe_layers": [0, "1"]}, "moe_layers"),
    ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
    ({"intermediate_size_mlp": "wide"}, "intermediate_size_mlp"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "use_qk_norm"),
]


@pytest.mark.parametrize(
    ("values", "field"),
    [(small(**changes), field) for changes, field in BAD]
    + [(small_qwen(**changes), field) for changes, field in BAD_QWEN]
    + BAD_FAMILIES
    + [(small(architectures=["Llama4ForCausalLM"], **c), field) for c, field in BAD_LLAMA4]
    + [
        ({**PUBLIC["gpt2"], "n_embd": 100}, "n_head"),
        ({**PUBLIC["gpt2"], "activation_function": "relu"}, "activation_function"),
        ({**PUBLIC["gpt2"], "n_inner": 0}, "n_inner"),
        ({**PUBLIC["gpt2"], "scale_attn_weights": False}, "scale_attn_weights"),
    ],
)
def test_an_invalid_value_names_its_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config(values)
    assert caught.value.field == f"config.json {field}"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
    assert caught.value.__cause__ is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = [
    *small(),
    "head_dim",
    "eos_token_id",
    "rope_theta",
    "sliding_window",
    "layer_types",
    "dtype",
]
ROPE_KEYS = ["type", "factor", "rope_theta", "beta_fast", "mscale", "low_freq_factor"]


@settings(max_examples=examples(300))
@given(
    name=st.sampled_from(list(ARCHITECTURES)),
    values=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    scaling=st.none() | st.dictionaries(st.sampled_from(ROPE_KEYS), JSON),
    kind=st.sampled_from(ROPE_KINDS),
)
def test_any_json_is_a_spec_or_a_clear_error(
    name: str, values: dict[str, Any], scaling: dict[str, Any] | None, kind: str
) -> None:
    base = PUBLIC["gpt2"] if name == "GPT2LMHeadModel" else small()
    rope = None if scaling is None else {"rope_type": kind, **scaling}
    try:
        spec = ModelSpec.from_config(
            {**base, "architectures": [name], "rope_scaling": rope, **values}
        )
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        assert spec.num_parameters > 0
        assert len(spec.kv_specs(2)) == len(spec.windows) == spec.num_layers
        assert spec.num_heads % spec.num_kv_heads == 0


def write(folder: Path, name: str, values: object) -> None:
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.json: is not valid JSON"),
        ("{", "config.json: is not valid JSON"),
        ("[" * 100_000, "config.json: is not valid JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "config.json: is not valid JSON"),
        ("[1]", "config.json: must hold a JSON object, not [1]"),
        ("null", "config.json: must hold a JSON object, not None"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "config.json", text)
    with pytest.raises(ModelError) as caught:
        read_model_spec(tmp_path)
    assert str(caught.value) == message


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model: must be a folder with a config\.json"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"^config\.json: is missing"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=r"^config\.json: is not valid JSON"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"^config\.json: cannot be read"):
        read_model_spec(tmp_path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    write(tmp_path, "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(ModelError, match="must not be that of an adapter: name its model"):
        read_model_spec(tmp_path)


def test_generation_config_decides_the_eos_ids(tmp_path: Path) -> None:
    write(tmp_path, "config.json", small(eos_token_id=5))
    assert read_model_spec(tmp_path).eos_token_ids == (5,)
    write(tmp_path, "generation_config.json", {"temperature": 0.6})
    assert read_model_spec(tmp_path).eos_token_ids == (5,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 8, 7]})
    assert read_model_spec(tmp_path).eos_token_ids == (7, 8)
    added = {"9": {"content": "<|im_end|>"}, "3": {"content": "</s>"}, "x": 1}
    for eos in ("<|im_end|>", {"content": "<|im_end|>"}):
        write(tmp_path, "tokenizer_config.json", {"eos_token": eos, "added_tokens_decoder": added})
        assert read_model_spec(tmp_path).eos_token_ids == (7, 8, 9)
    for facts in ({"eos_token": None}, {"eos_token": "x"}, {"added_tokens_decoder": []}):
        write(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": added, **facts})
        assert read_model_spec(tmp_path).eos_token_ids == (7, 8)
    listed = [{"id": 3, "content": "</s>"}, {"id": 9, "content": "<|im_end|>"}, 1, {"content": "x"}]
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    for tokens, ends in ((listed, (7, 8, 9)), ([], (7, 8)), ("", (7, 8)), (None, (7, 8))):
        write(tmp_path, "tokenizer.json", {"version": "1.0", "added_tokens": tokens})
        assert read_model_spec(tmp_path).eos_token_ids == ends
    write(tmp_path, "generation_config.json", {"eos_token_id": 100})
    with pytest.raises(ModelError, match=r"^generation_config\.json eos_token_id: "):
        read_model_spec(tmp_path)
