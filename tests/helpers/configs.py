"""Contents of config.json files: of public models, those of `kvik plan` and others, and of a
small valid one to spoil."""

from __future__ import annotations

from typing import Any

from kvik.planner.families import public_configs

LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def config(
    architecture: str,
    *,
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    positions: int = 4096,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **more,
    }


ENCODER = config(  # a tiny one
    "BertModel", vocab=500, hidden=64, inner=128, layers=2, heads=2, kv_heads=2, positions=128
)

PUBLIC: dict[str, dict[str, Any]] = {
    **{name: dict(fields) for name, fields in public_configs().items()},
    "SmolLM3-3B": config(
        "SmolLM3ForCausalLM",
        vocab=128256, hidden=2048, inner=11008, layers=36, heads=16, kv_heads=4,
        positions=65536, tie_word_embeddings=True,
    ),
    "GLM-4-9B-0414": config(
        "Glm4ForCausalLM",
        vocab=151552, hidden=4096, inner=13696, layers=40, heads=32, kv_heads=2, head_dim=128,
        positions=32768, attention_bias=True,
    ),
    "OLMo-3-7B": config(
        "Olmo3ForCausalLM",
        vocab=100278, hidden=4096, inner=11008, layers=32, heads=32, kv_heads=32,
        positions=65536,
    ),
    "EXAONE-4.0-1.2B": config(
        "Exaone4ForCausalLM",
        vocab=102400, hidden=2048, inner=4096, layers=30, heads=32, kv_heads=8, head_dim=64,
        positions=65536, sliding_window=None, tie_word_embeddings=True,
    ),
    "Phi-4-mini": config(
        "Phi3ForCausalLM",
        vocab=200064, hidden=3072, inner=8192, layers=32, heads=24, kv_heads=8,
        positions=131072, tie_word_embeddings=True, partial_rotary_factor=0.75,
    ),
    "Gemma-2B": config(
        "GemmaForCausalLM",
        vocab=256000, hidden=2048, inner=16384, layers=18, heads=8, kv_heads=1, head_dim=256,
        positions=8192,
    ),
    "Gemma-2-2B": config(
        "Gemma2ForCausalLM",
        vocab=256000, hidden=2304, inner=9216, layers=26, heads=8, kv_heads=4, head_dim=256,
        positions=8192,
    ),
    "Gemma-3-1B": config(
        "Gemma3ForCausalLM",
        vocab=262144, hidden=1152, inner=6912, layers=26, heads=4, kv_heads=1, head_dim=256,
        positions=32768, sliding_window=512,
    ),
    "Gemma-3n-E2B": config(
        "Gemma3nForCausalLM",
        vocab=262400, hidden=2048, inner=8192, layers=30, heads=8, kv_heads=2, head_dim=256,
        positions=32768, hidden_act=None, num_kv_shared_layers=10, tie_word_embeddings=True,
    ),
    "LFM2-1.2B": config(
        "Lfm2ForCausalLM",
        vocab=65536, hidden=2048, inner=12288, layers=16, heads=32, kv_heads=8, positions=128000,
        norm_eps=1e-5, block_multiple_of=256, full_attn_idxs=[2, 5, 8, 10, 12, 14],
    ),
    "Qwen3.5-9B": config(
        "Qwen3_5ForCausalLM",
        vocab=248320, hidden=4096, inner=12288, layers=32, heads=16, kv_heads=4, head_dim=256,
        positions=262144, partial_rotary_factor=0.25,
    ),
    "Llama-4-Scout": config(
        "Llama4ForCausalLM",
        vocab=202048, hidden=5120, inner=8192, layers=48, heads=40, kv_heads=8, head_dim=128,
        positions=10485760, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, no_rope_layers=[], attn_temperature_tuning=4,
        rope_scaling=LLAMA3_SCALING | {"factor": 16.0, "high_freq_factor": 1.0},
    ),
    "Llama-4-Maverick": config(
        "Llama4ForCausalLM",
        vocab=202048, hidden=5120, inner=8192, layers=48, heads=40, kv_heads=8, head_dim=128,
        positions=1048576, intermediate_size_mlp=16384, num_local_experts=128,
        num_experts_per_tok=1, interleave_moe_layer_step=2, use_qk_norm=False,
    ),
    "Granite-3.1-2B": config(
        "GraniteForCausalLM",
        vocab=49155, hidden=2048, inner=8192, layers=40, heads=32, kv_heads=8,
        positions=131072, tie_word_embeddings=True,
    ),
    "Granite-4.0-micro": config(
        "GraniteMoeHybridForCausalLM",
        vocab=100352, hidden=2560, inner=8192, layers=40, heads=40, kv_heads=8,
        positions=131072, tie_word_embeddings=True, layer_types=["attention"] * 40,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=8192,
        position_embedding_type="rope", rope_theta=10000000,
    ),
    "Granite-4.0-350m": config(
        "GraniteMoeHybridForCausalLM",
        vocab=100352, hidden=1024, inner=2048, layers=28, heads=16, kv_heads=4,
        positions=32768, tie_word_embeddings=True, layer_types=["attention"] * 28,
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=2048,
        position_embedding_type="rope", rope_theta=10000000,
    ),
    "Command-R-plus": config(
        "CohereForCausalLM",
        vocab=256000, hidden=12288, inner=33792, layers=64, heads=96, kv_heads=8,
        positions=131072, use_qk_norm=True, logit_scale=0.8333333333333334,
    ),
    "StableLM-2-12B": config(
        "StableLmForCausalLM",
        vocab=100352, hidden=5120, inner=13824, layers=40, heads=32, kv_heads=8,
        qk_layernorm=True, use_parallel_residual=True,
    ),
    "OPT-350M": {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": 50272,
        "hidden_size": 1024,
        "word_embed_proj_dim": 512,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "do_layer_norm_before": False,
        "torch_dtype": "float16",
    },
    "Phi-3.5-MoE": config(
        "PhiMoEForCausalLM",
        vocab=32064, hidden=4096, inner=6400, layers=32, heads=32, kv_heads=8, positions=131072,
        num_local_experts=16, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True,
    ),
    "Qwen3-Next-80B-A3B": config(
        "Qwen3NextForCausalLM",
        vocab=151936, hidden=2048, inner=5120, layers=48, heads=16, kv_heads=2, head_dim=256,
        positions=262144, full_attention_interval=4, linear_num_value_heads=32, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        rope_theta=10000000.0, partial_rotary_factor=0.25,
    ),
    "Qwen3.6-35B-A3B": config(
        "Qwen3_5MoeForCausalLM",
        vocab=248320, hidden=2048, inner=512, layers=40, heads=16, kv_heads=2, head_dim=256,
        positions=262144, full_attention_interval=4, linear_num_value_heads=32, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    ),
    "MiniMax-M2": config(
        "MiniMaxM2ForCausalLM",
        vocab=200064, hidden=3072, inner=1536, layers=62, heads=48, kv_heads=8, head_dim=128,
        positions=196608, num_local_experts=256, num_experts_per_tok=8, rotary_dim=64,
        scoring_func="sigmoid",
    ),
    "GLM-4.7-Flash": config(
        "Glm4MoeLiteForCausalLM",
        vocab=154880, hidden=2048, inner=10240, layers=47, heads=20, kv_heads=20, positions=202752,
        kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4, moe_intermediate_size=1536,
        n_shared_experts=1, topk_method="noaux_tc",
    ),
    "Command-R7B": config(
        "Cohere2ForCausalLM",
        vocab=256000, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, positions=132096,
        sliding_window=4096, logit_scale=0.25, tie_word_embeddings=True,
    ),
    "LFM2-8B-A1B": config(
        "Lfm2MoeForCausalLM",
        vocab=65536, hidden=2048, inner=7168, layers=24, heads=32, kv_heads=8, positions=128000,
        moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4, num_dense_layers=2,
        layer_types=[
            "full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)
        ],
    ),
    "ERNIE-4.5-0.3B": config(
        "Ernie4_5ForCausalLM",
        vocab=103424, hidden=1024, inner=3072, layers=18, heads=16, kv_heads=2, head_dim=128,
        positions=131072, tie_word_embeddings=True,
    ),
    "ERNIE-4.5-21B-A3B": config(
        "Ernie4_5_MoeForCausalLM",
        vocab=103424, hidden=2560, inner=12288, layers=28, heads=20, kv_heads=4, positions=131072,
        moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2,
        moe_layer_start_index=1, tie_word_embeddings=True,
    ),
    "Minitron-4B": config(
        "NemotronForCausalLM",
        vocab=256000, hidden=3072, inner=9216, layers=32, heads=24, kv_heads=8, head_dim=128,
        hidden_act="relu2",
    ),
    "AFM-4.5B": config(
        "ArceeForCausalLM",
        vocab=128004, hidden=2560, inner=18432, layers=36, heads=20, kv_heads=4, head_dim=128,
        positions=65536, hidden_act="relu2",
    ),
    "GLM-4-9B-chat": config(
        "GlmForCausalLM",
        vocab=151552, hidden=4096, inner=13696, layers=40, heads=32, kv_heads=2, head_dim=128,
        positions=131072, attention_bias=True,
    ),
    "Qwen2.5-VL-3B": config(
        "Qwen2_5_VLForConditionalGeneration",
        vocab=151936, hidden=2048, inner=11008, layers=36, heads=16, kv_heads=2, positions=128000,
        tie_word_embeddings=True,
        rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    ),
    "Apertus-8B": config(
        "ApertusForCausalLM",
        vocab=131072, hidden=4096, inner=21504, layers=32, heads=32, kv_heads=8, positions=65536,
        hidden_act="xielu", rope_theta=12e6, rope_scaling=LLAMA3_SCALING,
    ),
    "OLMo-7B": config(
        "OlmoForCausalLM",
        vocab=50304, hidden=4096, inner=11008, layers=32, heads=32, kv_heads=32, positions=2048,
    ),
    "OLMo-Hybrid-7B": config(
        "OlmoHybridForCausalLM",
        vocab=100352, hidden=3840, inner=11008, layers=32, heads=30, kv_heads=30, positions=65536,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "Laguna-XS.2": config(
        "LagunaForCausalLM",
        vocab=100352, hidden=2048, inner=8192, layers=40, heads=48, kv_heads=8, head_dim=128,
        positions=131072, layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 10,
        num_attention_heads_per_layer=[48, 64, 64, 64] * 10,
    ),
    "Kolibri-1": config(
        "Kolibri1ForCausalLM",
        vocab=128000, hidden=2560, inner=512, layers=50, heads=48, kv_heads=4, head_dim=128,
        positions=262144,
    ),
    "Flint": config(
        "FlintForCausalLM",
        vocab=150144, hidden=2048, inner=6144, layers=49, heads=32, kv_heads=4, head_dim=128,
        positions=262144,
    ),
    "BioGPT": config(
        "BioGptForCausalLM",
        vocab=42384, hidden=1024, inner=4096, layers=24, heads=16, kv_heads=16, positions=1024,
        layer_norm_eps=1e-12,
    ),
    "bloom-560m": {
        "architectures": ["BloomForCausalLM"],
        "n_embed": 1024,
        "n_layer": 24,
        "num_attention_heads": 16,
        "seq_length": 2048,
        "vocab_size": 250880,
    },
    "mpt-7b": {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "qk_ln": False},
        "d_model": 4096,
        "max_seq_len": 2048,
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "vocab_size": 50432,
    },
    "falcon-rw-1b": {
        "architectures": ["FalconForCausalLM"],
        "alibi": True,
        "bias": True,
        "hidden_size": 2048,
        "multi_query": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "parallel_attn": False,
        "vocab_size": 50304,
    },
    "GPT": {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "afn": "gelu",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 512,
        "vocab_size": 40478,
    },
    "Ettin-Decoder-150M": config(
        "ModernBertDecoderForCausalLM",
        vocab=50368, hidden=768, inner=1152, layers=22, heads=12, kv_heads=12, positions=7999,
        global_attn_every_n_layers=3, local_attention=128,
    ),
    "FlexOlmo-7x7B": config(
        "FlexOlmoForCausalLM",
        vocab=100352, hidden=4096, inner=11008, layers=32, heads=32, kv_heads=32, positions=4096,
        num_experts=7, num_experts_per_tok=5,
    ),
    "VaultGemma-1B": config(
        "VaultGemmaForCausalLM",
        vocab=256000, hidden=1152, inner=6912, layers=26, heads=4, kv_heads=4, head_dim=256,
        positions=1024, tie_word_embeddings=True, hidden_act=None, sliding_window=512,
    ),
    "Falcon-H1-0.5B": config(
        "FalconH1ForCausalLM",
        vocab=32784, hidden=1024, inner=2048, layers=36, heads=8, kv_heads=2, head_dim=64,
        positions=16384, rope_theta=1e11, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1,
    ),
    "Bamba-9B": config(
        "BambaForCausalLM",
        vocab=128256, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, positions=4096,
        attn_layer_indices=[9, 18, 27], mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
        mamba_n_groups=1,
    ),
    "K-EXAONE-236B-A23B": config(
        "ExaoneMoeForCausalLM",
        vocab=153600, hidden=6144, inner=18432, layers=48, heads=64, kv_heads=8, head_dim=128,
        positions=262144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=2048,
        num_shared_experts=1, first_k_dense_replace=1, sliding_window=128,
    ),
    "HyperCLOVAX-Think-14B": config(
        "HyperCLOVAXForCausalLM",
        vocab=110592, hidden=6144, inner=14336, layers=38, heads=48, kv_heads=8, head_dim=128,
        positions=131072,
    ),
    "MiniCPM3-4B": config(
        "MiniCPM3ForCausalLM",
        vocab=73448, hidden=2560, inner=6400, layers=62, heads=40, kv_heads=40, positions=32768,
    ),
    "A.X-K2-Light": config(
        "AXK2ForCausalLM",
        vocab=163840, hidden=2048, inner=5120, layers=48, heads=32, kv_heads=32, positions=131072,
    ),
    "MiniMax-M3": {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "text_config": {
            "sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57},
            "moe_layer_freq": [0] * 3 + [1] * 57,
        },
    },
    "DeepSeek-V4-Flash": config(
        "DeepseekV4ForCausalLM",
        vocab=129280, hidden=4096, inner=2048, layers=43, heads=64, kv_heads=1, positions=1048576,
    ),
    "GLM-5.3-Flash": {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": {}},
    "Hy4-preview": config(
        "HYV4ForCausalLM",
        vocab=120832, hidden=2816, inner=6912, layers=34, heads=32, kv_heads=32, positions=262144,
    ),
    "Ling-3.0-Flash": config(
        "BailingHybridForCausalLM",
        vocab=157184, hidden=2560, inner=6144, layers=42, heads=32, kv_heads=32, positions=262144,
    ),
    "MiniMax-Text-01": config(
        "MiniMaxText01ForCausalLM",
        vocab=200064, hidden=6144, inner=9216, layers=80, heads=64, kv_heads=8, head_dim=128,
        positions=10240000, num_local_experts=32, num_experts_per_tok=2, rotary_dim=64,
        attn_type_list=([0] * 7 + [1]) * 10, postnorm=True, shared_intermediate_size=0,
        rope_theta=10000000, layernorm_full_attention_alpha=3.5565588200778455,
        layernorm_linear_attention_alpha=3.5565588200778455,
        layernorm_mlp_alpha=3.5565588200778455,
    ),
    "Zamba2-2.7B": config(
        "Zamba2ForCausalLM",
        vocab=32000, hidden=2560, inner=10240, layers=54, heads=32, kv_heads=32,
        n_mamba_heads=80, num_mem_blocks=2, hidden_act="gelu", tie_word_embeddings=True,
    ),
    "LongCat-Flash": {
        "architectures": ["LongcatFlashForCausalLM"],
        "num_layers": 28,
        "zero_expert_num": 256,
        "zero_expert_type": "identity",
    },
    "Compass, usual sizes": {
        "architectures": ["CohereCompassForCausalLM"],
        "rope_parameters": {"full_attention": None},
    },
    "Step-3.7-Flash": {  # of 48 layers the last three predict several tokens
        "architectures": ["Step3p7ForConditionalGeneration"],
        "text_config": {
            "num_hidden_layers": 45,
            "num_nextn_predict_layers": 3,
            "num_attention_groups": 8,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
            "sliding_window": 512,
            "attention_other_setting": {
                **{"attention_type": "sliding_attention", "num_attention_heads": 96},
                **{"num_attention_groups": 8, "head_dim": 128},
            },
            "use_rope_layers": [],
            "yarn_only_types": ["full_attention"],
            "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
            "rope_scaling": LLAMA3_SCALING,
            "moe_layers_enum": ",".join(map(str, range(3, 45))),
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "moe_router_scaling_factor": 3.0,
            "swiglu_limits": [0.0] * 43 + [7.0] * 2 + [0.0] * 3,
            "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
        },
    },
    "A.X-K1": config(
        "AXK1ForCausalLM",
        vocab=163840, hidden=7168, inner=18432, layers=61, heads=64, kv_heads=64, positions=131072,
    ),
    "Hunyuan-A13B": config(
        "HunYuanMoEV1ForCausalLM",
        vocab=128167, hidden=4096, inner=3072, layers=32, heads=32, kv_heads=8, head_dim=128,
        positions=32768, num_experts=64, moe_topk=[8] * 32, moe_intermediate_size=[3072] * 32,
        num_shared_expert=[1] * 32, tie_word_embeddings=True,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "Jais-2-8B": config(
        "Jais2ForCausalLM",
        vocab=150272, hidden=3328, inner=26624, layers=32, heads=26, kv_heads=26, positions=8192,
        hidden_act="relu2",
    ),
    "Mamba-Codestral-7B": {
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
    },
    "mamba-130m": {
        "architectures": ["MambaForCausalLM"],
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "intermediate_size": 1536,
        "state_size": 16,
        "time_step_rank": 48,
    },
    "falcon-mamba-7b": {
        "architectures": ["FalconMambaForCausalLM"],
        "vocab_size": 65024,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "expand": 16,
        "intermediate_size": 8192,
        "state_size": 16,
        "time_step_rank": 256,
        "tie_word_embeddings": False,
    },
    "Jamba-v0.1": config(
        "JambaForCausalLM",
        vocab=65536, hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, positions=262144,
        num_experts=16, num_experts_per_tok=2, mamba_dt_rank=256, rms_norm_eps=1e-6,
    ),
    "Persimmon-8B": config(
        "PersimmonForCausalLM",
        vocab=262144, hidden=4096, inner=16384, layers=36, heads=64, kv_heads=64, positions=16384,
        hidden_act="relu2",
    ),
    "StarCoder-15B": {
        "architectures": ["GPTBigCodeForCausalLM"],
        "vocab_size": 49152,
        "n_embd": 6144,
        "n_inner": 24576,
        "n_layer": 40,
        "n_head": 48,
        "n_positions": 8192,
        "eos_token_id": 0,
    },
    "CodeGen-350M": {
        "architectures": ["CodeGenForCausalLM"],
        "vocab_size": 51200,
        "n_embd": 1024,
        "n_layer": 20,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 32,
    },
    "GPT-Neo-125M": {
        "architectures": ["GPTNeoForCausalLM"],
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "max_position_embeddings": 2048,
        "attention_layers": ["global", "local"] * 6,
    },
}  # fmt: skip


def small(**changes: Any) -> dict[str, Any]:
    """Return a valid Llama config with changes; a value of `...` removes the key."""
    base = config("LlamaForCausalLM", vocab=100, hidden=32, inner=48, layers=4, heads=4, kv_heads=2)
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def small_qwen(**changes: Any) -> dict[str, Any]:
    return small(architectures=["Qwen2ForCausalLM"], **changes)
