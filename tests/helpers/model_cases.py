"""Tiny models of every architecture and option."""

from __future__ import annotations

from typing import Any

from helpers.tiny_models import DELTA, LATENT, LLAMA4


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def case(family: str, *shared: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    """Return a family and the options of a model, of which later ones replace shared ones."""
    return family, {key: value for part in (*shared, options) for key, value in part.items()}


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

EIGHT_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
SPARSE = {**ROUTED, "intermediate_size": ROUTED["moe_intermediate_size"]}  # in every layer

MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 6.0,
}
LAST_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
}
# Granite 4, whose layers may also be Mamba layers.
ATTENDING: dict[str, Any] = {
    "layer_types": ["attention"] * 3,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,  # required by a check
}
MAMBA: dict[str, Any] = {
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
}
NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "head_dim": 8,
    "ssm_state_size": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "time_step_min": 1e-30,  # prompts clamp steps to it, decoding does not
}

MROPE = rope(rope_type="default", mrope_section=[2, 1, 1])

LONG_PHIMOE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "original_max_position_embeddings": 4,
    **rope(
        rope_type="longrope",
        short_factor=[1.5, 2.0, 4.0, 8.0],  # used by transformers 5.23 at any length
        long_factor=[1.5, 2.0, 4.0, 8.0],
        short_mscale=1.2,
        long_mscale=1.2,
        original_max_position_embeddings=4,
    ),
}

UNDROPPED = {"residual_dropout": 0.0, "attention_dropout": 0.0}
CASES = {
    "llama-gqa": case("Llama"),
    "llama-mha": case("Llama", num_key_value_heads=4),
    "llama-mqa": case("Llama", num_key_value_heads=1),
    "llama-tied": case("Llama", tie_word_embeddings=True),
    "llama-attention-bias": case("Llama", attention_bias=True),
    "llama-mlp-bias": case("Llama", mlp_bias=True),
    "llama-head-dim": case("Llama", head_dim=12),
    "llama-head-dim-16": case("Llama", head_dim=16),
    "llama-eps": case("Llama", rms_norm_eps=0.1),
    "llama-theta": case("Llama", rope(rope_type="default", rope_theta=500000.0)),
    "llama-linear": case("Llama", rope(rope_type="linear", factor=4.0)),
    "llama-dynamic-short": case("Llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-yarn": case("Llama", rope(**YARN, factor=4.0)),
    "llama-yarn-options": case(
        "Llama", rope(**YARN, factor=3.0, beta_fast=8.0, beta_slow=2.0, attention_factor=0.7)
    ),
    "llama-yarn-mscale": case("Llama", rope(**YARN, factor=4.0, mscale=0.8, mscale_all_dim=0.3)),
    "llama-yarn-fractional-range": case(
        "Llama", rope(**YARN, factor=4.0, beta_fast=3.0, truncate=False), head_dim=64
    ),
    "llama-llama3": case("Llama", rope(**LLAMA3)),
    "mistral-full": case("Mistral", sliding_window=None),
    "mistral-window": case("Mistral", sliding_window=9),
    "mistral-window-default": case("Mistral"),
    "mistral-head-dim": case("Mistral", sliding_window=5, head_dim=16),
    "ministral3": case(
        "Ministral3",
        rope(**YARN, factor=4.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=2.0),
        head_dim=16,
    ),
    "ministral3-window": case(
        "Ministral3", rope(**YARN, factor=4.0, llama_4_scaling_beta=0.7), sliding_window=9
    ),
    "ministral": case("Ministral", head_dim=16, sliding_window=9),
    "ministral-types": case(
        "Ministral",
        head_dim=8,
        sliding_window=9,
        layer_types=["full_attention"] + ["sliding_attention"] * 2,
        tie_word_embeddings=True,
    ),
    "cwm": case("Cwm", num_hidden_layers=5, head_dim=16, sliding_window=9),
    "cwm-bias-types": case(
        "Cwm",
        rope(rope_type="default"),
        head_dim=8,
        mlp_bias=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "qwen2": case("Qwen2"),
    "qwen2-tied": case("Qwen2", tie_word_embeddings=True),
    "qwen2-window-unused": case("Qwen2", sliding_window=5, max_window_layers=0),
    "qwen2-window": case("Qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen2-layer-types": case(
        "Qwen2",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2-window-head-dim-16": case(
        "Qwen2", hidden_size=64, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen2-yarn": case("Qwen2", rope(**YARN, factor=4.0)),
    "qwen3": case("Qwen3", head_dim=16),
    "olmo2": case("Olmo2"),
    "olmo2-bias-tied": case("Olmo2", attention_bias=True, tie_word_embeddings=True),
    "qwen3-bias-tied": case("Qwen3", head_dim=8, attention_bias=True, tie_word_embeddings=True),
    "qwen3-window": case("Qwen3", LAST_WINDOW, head_dim=8),
    "smollm3": case("SmolLM3", num_hidden_layers=4),
    "smollm3-biases": case("SmolLM3", attention_bias=True, mlp_bias=True, no_rope_layers=[0, 1, 0]),
    "stablelm": case("StableLm", hidden_size=64),
    "stablelm-bias": case("StableLm", rope(partial_rotary_factor=0.5), use_qkv_bias=True),
    "stablelm-12b": case("StableLm", hidden_size=64, use_parallel_residual=True, qk_layernorm=True),
    "stablelm-head-norms": case("StableLm", rope(partial_rotary_factor=0.5), qk_layernorm=True),
    "stablelm-parallel": case("StableLm", hidden_size=64, use_parallel_residual=True),
    "falcon-7b": case("Falcon", ffn_hidden_size=56),
    "falcon-40b": case(
        "Falcon", hidden_size=64, new_decoder_architecture=True, num_kv_heads=2, bias=True
    ),
    "falcon-2": case(
        "Falcon",
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=False,
    ),
    "falcon-all-heads": case("Falcon", multi_query=False),
    "phi3": case("Phi3"),
    "phi3-window": case("Phi3", sliding_window=7, tie_word_embeddings=True),
    "phi3-partial": case(
        "Phi3", rope(rope_type="default", partial_rotary_factor=0.75), hidden_size=64
    ),
    "phi3-long": case(
        "Phi3",
        rope(
            rope_type="longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.5, 2.0, 4.0, 8.0],
            original_max_position_embeddings=4,
        ),
        original_max_position_embeddings=4,
    ),
    "glm4": case("Glm4", rope(partial_rotary_factor=0.5), head_dim=16),
    "glm4-plain": case("Glm4", head_dim=8, attention_bias=False),
    "olmo3": case("Olmo3", num_hidden_layers=4, sliding_window=9),
    "olmo3-yarn": case(
        "Olmo3",
        num_hidden_layers=4,
        sliding_window=9,
        rope_parameters={
            "full_attention": {"rope_theta": 1e4, **YARN, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "exaone4": case("Exaone4", num_hidden_layers=4, sliding_window=9),
    "exaone4-full": case(
        "Exaone4", sliding_window=None, head_dim=16, layer_types=["full_attention"] * 3
    ),
    "cohere": case("Cohere"),
    "cohere-bias-untied": case(
        "Cohere", attention_bias=True, tie_word_embeddings=False, logit_scale=0.3
    ),
    "cohere-head-norms": case("Cohere", use_qk_norm=True, hidden_size=64),
    "cohere2": case("Cohere2", num_hidden_layers=4, sliding_window=9, hidden_size=64),
    "gemma": case("Gemma", head_dim=16),
    "gemma-untied": case("Gemma", head_dim=8, tie_word_embeddings=False),
    "gemma2": case(
        "Gemma2",
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=9,
        query_pre_attn_scalar=3,
        attn_logit_softcapping=0.2,
        final_logit_softcapping=0.3,
    ),
    "gemma2-uncapped": case(
        "Gemma2",
        head_dim=8,
        attention_bias=True,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma3": case(
        "Gemma3",
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=9,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
    "gemma3-bias": case("Gemma3", head_dim=8, attention_bias=True),
    # E2B: layers share keys and have per-layer token inputs
    "gemma4-token-inputs": case(
        "Gemma4",
        GEMMA4,
        num_hidden_layers=6,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        num_key_value_heads=1,
    ),
    "gemma4-key-is-value": case(  # 31B
        "Gemma4",
        GEMMA4,
        num_hidden_layers=7,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
    ),
    "gemma4-experts": case(  # 26B-A4B
        "Gemma4",
        GEMMA4,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
                "factor": 2.0,
            },
        },
    ),
    "gemma4-small-heads": case(
        "Gemma4", GEMMA4, head_dim=12, global_head_dim=8, attention_bias=True
    ),
    "gemma4-unified": case(  # 12B
        "Gemma4Unified",
        head_dim=16,
        global_head_dim=32,
        sliding_window=9,
        num_hidden_layers=6,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
    ),
    "granite": case("Granite", MULTIPLIERS),
    "granite-biases": case("Granite", attention_bias=True, mlp_bias=True),
    "seed-oss": case("SeedOss", UNDROPPED, head_dim=16),
    "seed-oss-biases": case("SeedOss", UNDROPPED, attention_out_bias=True, mlp_bias=True),
    "neox": case("GPTNeoX", hidden_size=64, num_key_value_heads=4),
    "neox-half-tanh": case(
        "GPTNeoX", rope(partial_rotary_factor=0.5), hidden_act="gelu_new", num_key_value_heads=4
    ),
    "neox-plain": case("GPTNeoX", num_key_value_heads=4, attention_bias=False),
    "starcoder2": case("Starcoder2", sliding_window=None),
    "starcoder2-window": case("Starcoder2", sliding_window=9, use_bias=False),
    "phi": case("Phi", hidden_size=64),
    "phi-tied": case("Phi", hidden_size=64, tie_word_embeddings=True),
    "lfm2": case("Lfm2", layer_types=["conv", "full_attention", "conv"]),
    "lfm2-bias-width": case(
        "Lfm2",
        layer_types=["full_attention", "conv", "conv"],
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "qwen3.5": case("Qwen3_5", DELTA, num_hidden_layers=4, head_dim=16),
    "qwen3.5-bias-tied": case(
        "Qwen3_5",
        rope(partial_rotary_factor=0.5),
        DELTA,
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        linear_conv_kernel_dim=3,
        linear_num_key_heads=4,
    ),
    "lfm2-moe": case(
        "Lfm2Moe",
        EIGHT_EXPERTS,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        routed_scaling_factor=1.7,
    ),
    "lfm2-moe-plain": case(
        "Lfm2Moe",
        EIGHT_EXPERTS,
        layer_types=["full_attention", "conv", "conv"],
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        tie_word_embeddings=False,
    ),
    "ernie4.5": case("Ernie4_5", head_dim=16),
    "ernie4.5-bias-untied": case("Ernie4_5", head_dim=8, use_bias=True, tie_word_embeddings=False),
    "ernie4.5-moe": case("Ernie4_5_Moe", moe_num_experts=8, moe_k=3, moe_intermediate_size=24),
    "ernie4.5-moe-some": case(
        "Ernie4_5_Moe",
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=24,
        moe_num_shared_experts=0,
        moe_layer_interval=2,
        moe_layer_start_index=0,
        moe_layer_end_index=1,
        tie_word_embeddings=False,
    ),
    "nemotron": case("Nemotron", hidden_size=64),
    "nemotron-bias": case(
        "Nemotron", attention_bias=True, mlp_bias=True, head_dim=16, norm_eps=0.1
    ),
    "arcee": case("Arcee", hidden_size=64),
    "arcee-bias": case("Arcee", attention_bias=True, mlp_bias=True, head_dim=12),
    "glm": case("Glm", head_dim=16),
    "glm-plain": case("Glm", head_dim=8, attention_bias=False, tie_word_embeddings=True),
    "qwen2-vl": case("Qwen2VL", MROPE),
    "qwen2.5-vl": case("Qwen2_5_VL", MROPE, tie_word_embeddings=True),
    "qwen3-vl": case("Qwen3VL", rope(rope_type="default", mrope_section=[4, 2, 2]), head_dim=16),
    "opt": case("OPT", ffn_dim=48, word_embed_proj_dim=32),
    "opt-350m": case("OPT", word_embed_proj_dim=20, do_layer_norm_before=False),
    "opt-narrow-untied": case("OPT", word_embed_proj_dim=12, tie_word_embeddings=False),
    "opt-gelu-untied": case(
        "OPT",
        activation_function="gelu",
        word_embed_proj_dim=32,
        enable_bias=False,
        tie_word_embeddings=False,
    ),
    "mixtral": case("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": case("Mixtral", num_local_experts=3, sliding_window=9),
    "qwen3-moe": case(
        "Qwen3Moe", EIGHT_EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3-moe-window": case("Qwen3Moe", EIGHT_EXPERTS, LAST_WINDOW, head_dim=16),
    "qwen3-moe-every-second": case(
        "Qwen3Moe",
        EIGHT_EXPERTS,
        head_dim=8,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "olmoe": case("Olmoe", num_experts=8, num_experts_per_tok=3),
    "olmoe-bias": case("Olmoe", num_experts=8, num_experts_per_tok=3, attention_bias=True),
    "glm4-moe": case(
        "Glm4Moe",
        ROUTED,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=1,
    ),
    "glm4-moe-groups": case(
        "Glm4Moe",
        ROUTED,
        head_dim=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        first_k_dense_replace=0,
    ),
    "dots1": case("Dots1", ROUTED, n_shared_experts=1, first_k_dense_replace=1),
    "dots1-groups-window": case(
        "Dots1",
        ROUTED,
        head_dim=16,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        attention_bias=True,
        sliding_window=9,
        max_window_layers=1,
    ),
    "solar-open": case("SolarOpen", SPARSE, head_dim=16, rms_norm_eps=0.1),
    "solar-open-groups": case(
        "SolarOpen",
        SPARSE,
        rope(**YARN, factor=4.0),
        head_dim=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "granite-moe": case("GraniteMoe", MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2),
    "granite4": case(
        "GraniteMoeHybrid",
        ATTENDING,
        MULTIPLIERS,
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        tie_word_embeddings=True,
    ),
    "granite4-experts": case(
        "GraniteMoeHybrid",
        ATTENDING,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=24,
        residual_multiplier=0.4,
        attention_bias=True,
    ),
    "granite4-h": case(
        "GraniteMoeHybrid",
        MULTIPLIERS,
        MAMBA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
    ),
    "granite4-h-experts": case(
        "GraniteMoeHybrid",
        MAMBA,
        mamba_n_groups=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=24,
    ),
    "lfm3": case(
        "Lfm3",
        num_hidden_layers=4,
        head_dim=16,
        layer_types=["conv", "sliding_attention", "full_attention", "conv"],
        sliding_window=7,
        conv_bias=True,
    ),
    "afmoe": case(
        "Afmoe",
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=7,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        moe_intermediate_size=24,
        route_scale=1.7,
        mup_enabled=True,
    ),
    "afmoe-bias": case(
        "Afmoe",
        num_dense_layers=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        moe_intermediate_size=24,
        attention_bias=True,
    ),
    "mellum": case(
        "Mellum",
        head_dim=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window=7,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
    ),
    "mistral4": case(
        "Mistral4",
        LATENT,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=1.7,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.7,
        },
    ),
    "mistral4-no-rank": case(
        "Mistral4",
        LATENT,
        q_lora_rank=None,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        rope_interleave=False,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "nemotron-h": case("NemotronH", NEMOTRON_H),
    "nemotron-h-experts": case(
        "NemotronH",
        NEMOTRON_H,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        routed_scaling_factor=1.7,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
    ),
    "phimoe": case("Phimoe", LONG_PHIMOE, attention_bias=True, lm_head_bias=True),
    "phimoe-window": case(
        "Phimoe",
        LONG_PHIMOE,
        num_local_experts=4,
        router_jitter_noise=0.3,
        sliding_window=9,
        tie_word_embeddings=True,
    ),
    "qwen2-moe": case(
        "Qwen2Moe", EIGHT_EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=1
    ),
    "qwen2-moe-window": case(
        "Qwen2Moe",
        EIGHT_EXPERTS,
        LAST_WINDOW,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
        qkv_bias=False,
    ),
    "qwen3-next": case(
        "Qwen3Next",
        EIGHT_EXPERTS,
        DELTA,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
    ),
    "qwen3.5-moe": case(
        "Qwen3_5Moe",
        EIGHT_EXPERTS,
        DELTA,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        head_dim=16,
        shared_expert_intermediate_size=24,
    ),
    "gpt-oss": case(
        "GptOss",
        rope(**YARN, factor=4.0, truncate=False),
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=9,
        num_hidden_layers=4,
    ),
    "minimax-m2": case(
        "MiniMaxM2",
        rope(partial_rotary_factor=0.5),
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "llama4": case("Llama4", LLAMA4, rope(**LLAMA3)),
    "llama4-every-second": case(
        "Llama4",
        LLAMA4,
        rope(**{**LLAMA3, "high_freq_factor": 1.0}),
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        use_qk_norm=False,
        attention_bias=True,
        no_rope_layer_interval=2,
    ),
    "llama4-layers": case(
        "Llama4",
        LLAMA4,
        head_dim=8,
        moe_layers=[0, 3],
        no_rope_layers=[0, 1, 1, 0],
        layer_types=["chunked_attention", "full_attention"] * 2,
        attn_temperature_tuning=False,
        tie_word_embeddings=True,
    ),
    "deepseek2": case("DeepseekV2", LATENT, q_lora_rank=None),
    "deepseek2-queries": case(
        "DeepseekV2", LATENT, attention_bias=True, tie_word_embeddings=True, first_k_dense_replace=3
    ),
    "deepseek2-groups": case(
        "DeepseekV2",
        LATENT,
        topk_method="group_limited_greedy",
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.7,
    ),
    "deepseek3": case("DeepseekV3", LATENT),
    "deepseek3-yarn": case(
        "DeepseekV3",
        LATENT,
        rope(**YARN, factor=4.0, mscale=0.7, mscale_all_dim=1.3),
        first_k_dense_replace=3,
        attention_bias=True,
    ),
    "deepseek3-halves": case(
        "DeepseekV3", LATENT, rope_interleave=False, qk_rope_head_dim=8, kv_lora_rank=40
    ),
    "glm4-moe-lite": case("Glm4MoeLite", LATENT, mlp_layer_types=["dense", "sparse", "sparse"]),
    "gptj": case("GPTJ", rotary_dim=4),
    "gptj-tied": case("GPTJ", rotary_dim=4, tie_word_embeddings=True),
    "gptj-head-dim-16": case("GPTJ", n_embd=64, rotary_dim=16, n_inner=40),
    "gpt-neo": case("GPTNeo", attention_types=[[["global", "local"], 1], [["local"], 1]]),
    "gpt-neo-head-dim-16": case(
        "GPTNeo",
        hidden_size=48,
        num_heads=3,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        intermediate_size=40,
        tie_word_embeddings=False,
    ),
    "gpt2": case("GPT2"),
    "gpt2-inner-untied": case("GPT2", n_inner=40, tie_word_embeddings=False),
    "gpt2-head-dim-16": case("GPT2", n_embd=64),
    "gpt2-one-head": case("GPT2", n_head=1, layer_norm_epsilon=0.1),
}
