"""Models after a calibration pass, dequantised to floats."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_models
from helpers.model_cases import BESIDE, H1_FACTORS
from helpers.tiny_models import BAILING, DELTA, IN_BLOCKS, IN_POOLS, INDEXED, KIMI, MINIMAX, STEP
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.nn.checkpoint import open_checkpoint
from kvik.quantize.calibrate import quantise_blocks
from kvik.quantize.model_blocks import ModelBlocks
from kvik.quantize.quantised import BlockResult
from kvik.quantize.recipe import Recipe
from kvik.quantize.source import keeping_floats

# All experts of a layer are active, and indexers choose all keys, because in a random model a
# different choice matters more than rounding.
LATENT = {
    **tiny_models.LATENT,
    **{"q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"n_routed_experts": 6, "num_experts_per_tok": 6},
}
STATES = {
    **DELTA,
    "head_dim": 8,
    "linear_key_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Olmo": {},
    "Olmo2": {},
    "Phi3": {},
    "Glm4": {"head_dim": 8},
    "Cohere2": {},
    "Gemma3": {"head_dim": 8},
    "Gemma3n": {  # only the first layer has sparse gates; the last reads the cache of the second
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 5,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 80,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.8, 0.0, 0.0],
    },
    "Gemma4": {  # of every kind: the last layer reads the cache of the one before it
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 5,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 4,
        "moe_intermediate_size": 24,
    },
    "GraniteMoeHybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "intermediate_size": 24,
        "shared_intermediate_size": 40,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "head_dim": 8,
        "ssm_state_size": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "time_step_min": 1e-30,
    },
    "FalconH1": {**BESIDE, **H1_FACTORS},
    "Nemotron": {},
    "Apertus": {"head_dim": 8},
    "Arcee": {},
    "Granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0},
    "HyperCLOVAX": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0},
    "Cohere2Moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "Mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "Mamba": {"intermediate_size": 64},
    "FalconMamba": {"intermediate_size": 64, "tie_word_embeddings": False},
    "Jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
        **{"num_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 64},
    },
    "GPTBigCode": {},
    "CodeGen": {"n_embd": 128, "n_head": 8, "rotary_dim": 8},
    "Persimmon": {"num_key_value_heads": 4},
    "GPTNeoX": {"num_key_value_heads": 4},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "Starcoder2": {},
    "OPT": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "Qwen3Moe": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "GPT2": {},
    "DeepseekV2": {**LATENT, "q_lora_rank": None},
    "DeepseekV3": LATENT,
    "AXK1": {**LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    "MiniCPM3": {**LATENT, "dim_model_base": 20},
    "NanoChat": {},
    "HunYuanMoEV1": {
        "head_dim": 8,
        "intermediate_size": 24,
        "num_experts": 6,
        "moe_topk": 6,
    },
    "HYV3": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 24,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Lfm3": {
        "head_dim": 8,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "sliding_window": 5,
    },
    "Laguna": {
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [4, 6, 4],
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "Kolibri1": {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "Flint": {
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "Dbrx": {"ffn_config": {"moe_num_experts": 6, "moe_top_k": 6, "ffn_hidden_size": 24}},
    "BioGpt": {},
    "Bloom": {},
    "Mpt": {},
    "BitNet": {},
    "OpenAIGPT": {},
    "ModernBertDecoder": {"num_key_value_heads": 4, "local_attention": 10},
    "MiMoV2Flash": {
        "head_dim": 24,
        "v_head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 5,
        "num_key_value_heads": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 24,
    },
    "Qwen3_5": STATES,
    "OlmoHybrid": STATES,
    "GlmMoeDsa": {
        **{**LATENT, **INDEXED, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
        **{"v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 6, "head_dim": 8},
        "index_topk": 4096,
    },
    "AXK2": {
        **{**LATENT, **INDEXED, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
        **{"v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 6, "head_dim": 8},
        **{"index_topk": 4096, "gated_norm_rank": 4},
    },
    "MiniMaxM3VL": {**IN_BLOCKS, "num_experts_per_tok": 6, "index_topk_blocks": 1024},
    "HYV4": {
        **{**LATENT, **INDEXED, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8},
        **{"v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 6, "head_dim": 8},
        **{"index_topk": 4096, "hc_mult": 3},
    },
    "Glm5Next": {
        **IN_POOLS,
        **{"q_lora_rank": 16, "kv_lora_rank": 24, "v_head_dim": 10, "linear_head_dim": 16},
        **{"n_routed_experts": 6, "num_experts_per_tok": 6, "index_topk": 4096},
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "KimiLinear": {
        **KIMI,
        **{"kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 10, "linear_head_dim": 16},
        **{"num_experts": 6, "num_experts_per_tok": 6},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "BailingHybrid": {
        **BAILING,
        **{"kv_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 16},
        **{"num_local_experts": 6, "num_experts_per_tok": 6, "layer_group_size": 2},
    },
    "MiniMax": {**MINIMAX, "num_experts_per_tok": 6, "rms_norm_eps": 0.1},
    "Step3p7": {
        **STEP,
        **{"head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 6},
        "query_pre_attn_scalar": 128,  # as gains of norms are about 2
        **{"swiglu_limits": [0.0, 7.0, 0.0], "swiglu_limits_shared": [0.5, 0.5, 0.0]},
    },
    "Qwen3Next": {
        **STATES,
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
}
# One of each kind of block: the fast tier walks whole models of these only, as all families have
# their blocks in `test_factors.py`.
KINDS = (
    *("Llama", "Gemma3n", "Gemma4", "Falcon", "GPT2", "OPT", "Bloom", "DeepseekV3", "MiniMaxM3VL"),
    *("HYV4", "GraniteMoeHybrid", "NemotronH", "Mamba2", "Jamba", "Lfm2", "KimiLinear"),
    *("Qwen3Next", "Laguna"),
)
FAMILIES_BY_TIER = [
    pytest.param(family, marks=() if family in KINDS else pytest.mark.full) for family in FAMILIES
]
# Last components of the names of layers that stay floats, by family.
LEFT: dict[str, set[str]] = {
    "Qwen3Moe": {"gate"},  # the router
    "Gemma3n": {"modality_router", "prediction_coefs", "correction_coefs"},
    "Gemma4": {"proj"},  # router.proj
    "DeepseekV2": {"gate", "kv_b_proj"},
    "DeepseekV3": {"gate", "kv_b_proj"},
    "Glm4MoeLite": {"gate", "kv_b_proj"},
    "AXK1": {"gate", "kv_b_proj"},
    "MiniCPM3": {"kv_b_proj"},
    "HunYuanMoEV1": {"wg"},
    "HYV3": {"gate"},  # router.gate
    "GptOss": {"router"},
    "Cohere2Moe": {"gate"},
    "GraniteMoeHybrid": {"layer"},  # router.layer
    "NemotronH": {"gate"},
    "Mamba": {"x_proj", "dt_proj"},
    "FalconMamba": {"x_proj", "dt_proj"},
    "Jamba": {"x_proj", "dt_proj", "router"},
    "Lfm3": {"gate_proj"},
    "Laguna": {"gate", "g_proj"},
    "Kolibri1": {"gate"},
    "MiMoV2Flash": {"gate"},
    "Flint": {"gate"},
    "Dbrx": {"layer"},  # router.layer
    "Qwen3_5": {"in_proj_a", "in_proj_b"},
    "OlmoHybrid": {"a_proj", "b_proj"},
    "AXK2": {"gate", "kv_b_proj", "weights_proj", "W_down", "W_up"},
    "GlmMoeDsa": {"gate", "kv_b_proj", "weights_proj"},
    "HYV4": {"gate", "kv_b_proj", "weights_proj", "linear_gate"},
    "MiniMaxM3VL": {"gate"},
    "Glm5Next": {
        *("gate", "kv_b_proj", "weights_proj", "b_proj"),
        *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
    },
    "KimiLinear": {
        *("gate", "kv_b_proj", "b_proj"),
        *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"),
    },
    "BailingHybrid": {"gate", "kv_b_proj", "b_proj", "f_proj"},
    "MiniMax": {"gate", "output_gate"},
    "Step3p7": {"gate", "g_proj"},
    "Qwen3_5Moe": {"gate", "shared_expert_gate", "in_proj_a", "in_proj_b"},
    "Qwen3Next": {"gate", "shared_expert_gate", "in_proj_ba"},
}


def quiet(doing: str, share: float) -> None:
    """Ignore progress."""


def calibrated(
    folder: Path, recipe: Recipe, windows: Tensor | None, work: Path, *, first: int = 0
) -> list[BlockResult]:
    """Return the results of all blocks from `first` on."""
    spec = read_model_spec(folder)
    recipe = keeping_floats(recipe, spec)
    return list(quantise_blocks(folder, spec, recipe, windows, work, quiet, first=first))


def save_multiplied_out(folder: Path, results: Iterable[BlockResult], to: Path) -> None:
    """Save a copy of the model in `folder` with the dequantised weights of the results."""
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    linears = read_model_spec(folder).declaration.linears
    transposed = any(linear.transposed for linear in linears)
    for result in results:
        for name, values in result.changed.items():
            assert values.shape == tensors[name].shape
            assert values.dtype == tensors[name].dtype
            tensors[name] = values.contiguous()
        for layer in result.layers:
            if layer.quantised is not None:
                w = layer.quantised.dequantised()
                tensors[f"{layer.name}.weight"] = (w.t() if transposed else w).contiguous()
                scope, experts, _ = layer.name.partition(".experts.")
                if experts:  # the source may have stored them as one tensor
                    for name in ("down_proj", "gate_up_proj", "mlp.w1", "mlp.v1", "mlp.w2"):
                        tensors.pop(f"{scope}{experts}{name}", None)
                scope, _, expert = layer.name.rpartition(".")
                if expert.isdecimal():
                    tensors.pop(f"{scope}.weight", None)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})


def random_windows(windows: int, tokens: int) -> Tensor:
    return torch.randint(0, 96, (windows, tokens), generator=torch.Generator().manual_seed(0))


def relative_error(w: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Return || (W - Q) X || / || W X || from the second moment of X; 0 if X is 0.

    Args:
        w, rounded: [outputs, inputs].
        hessian: [inputs, inputs].
    """
    whole = _energy(w.float(), hessian)
    return (_energy(w.float() - rounded, hessian) / whole) ** 0.5 if whole else 0.0


def _energy(w: Tensor, hessian: Tensor) -> float:
    """Return || W X ||^2 up to the Hessian's factor."""
    return float(((w @ hessian) * w).sum(dtype=torch.float64))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def model_blocks(
    folder: Path,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    spec: ModelSpec | None = None,
) -> ModelBlocks:
    """Open the blocks of a model, for windows of a number of tokens."""
    spec = spec or read_model_spec(folder)
    return ModelBlocks(open_checkpoint(folder), spec, tokens, dtype, torch.device("cpu"))
