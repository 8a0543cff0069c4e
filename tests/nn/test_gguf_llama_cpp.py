"""Exported models have the same logits in llama.cpp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.model_cases import H1_FACTORS
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny, tokens
from torch import Tensor

from kvik.gguf.export import model_metadata
from kvik.gguf.reader import write_gguf
from kvik.models.model_spec import read_model_spec
from kvik.nn.checkpoint import open_checkpoint
from kvik.nn.gguf_export import gguf_numbers, gguf_tensors

# Sizes that llama.cpp supports: keys and values of delta nets alike, queries with a rank.
WIDE = {"hidden_size": 64, "intermediate_size": 96}
HEAD = {**WIDE, "head_dim": 16}
SOME = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**SOME, "shared_expert_intermediate_size": 32}
NETS = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT = {
    **WIDE,
    **tiny_models.LATENT,
    **{"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "moe_intermediate_size": 32,
}
HYBRID = {
    "hidden_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "intermediate_size": 32,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
SINGLE = {
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "time_step_min": 1e-30,
}
LAST = ["full_attention"]
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "original_max_position_embeddings": 32}
YARN |= {"factor": 4.0}
GEMMA4 = {
    **HEAD,
    "global_head_dim": 32,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "vocab_size_per_layer_input": 96,
}
CASES: dict[str, dict[str, Any]] = {  # family, and the case in it
    # llama.cpp rounds the range of YaRN; gpt-oss does not.
    "GptOss": {**HEAD, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}
    | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "Qwen3_5": {**HEAD, **NETS},
    "Qwen3_5Moe": {**HEAD, **NETS, **SHARED},
    "Qwen3Next": {**HEAD, **NETS, **SHARED, "norm_topk_prob": True},
    "Jais2": WIDE,
    "Apertus": HEAD,
    "HunYuanDenseV1": HEAD,
    "HunYuanMoEV1": {**HEAD, "num_experts": 6, "moe_topk": 2}
    | {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}
    },
    "Dots1": {**HEAD, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4},  # as many as heads, which llama.cpp requires
    "ExaoneMoe": {**HEAD, "num_hidden_layers": 5, "sliding_window": 9, "num_experts": 6}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 2},
    "Qwen2Moe": {**WIDE, **SHARED, "decoder_sparse_step": 1},
    # llama.cpp ranks groups by their best two; DeepSeek-V2 does not.
    "DeepseekV2": LATENT | {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "DeepseekV3": {**LATENT, "n_group": 4, "topk_group": 2}
    | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "Glm4MoeLite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "Lfm2": {**WIDE, "layer_types": ["conv", "full_attention", "conv"]},
    "Falcon": {"hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2},
    "Gemma2": {**HEAD, "sliding_window": 9, "query_pre_attn_scalar": 16},
    "Gemma4 token inputs": GEMMA4
    | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16},
    "Gemma4 experts": GEMMA4
    | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2}
    | {"num_experts": 4, "moe_intermediate_size": 32, "final_logit_softcapping": 3.0}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "Olmo": WIDE,
    "Olmo3": {**WIDE, "num_hidden_layers": 4, "sliding_window": 9},
    "GraniteMoe": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeShared": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 64},
    "Afmoe": {**HEAD, "num_hidden_layers": 4, "sliding_window": 9, "num_experts": 6}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 2}
    | {"route_scale": 1.7, "mup_enabled": True},
    "GraniteMoeHybrid": {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoeHybrid dense": {**HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0},
    "NemotronH": {**HEAD, **SINGLE, "layers_block_type": ["linear_attention", "mlp"] * 2 + LAST},
    "NemotronH experts": {**HEAD, **SINGLE, "layers_block_type": ["linear_attention", "moe", *LAST]}
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.7},
    "FalconH1": {**HEAD, **H1_FACTORS, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16},
    "Ministral3": HEAD
    | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    | {"llama_4_scaling_beta": 2.0},
    "GPT2": {"n_embd": 64},
    "Bloom": {"hidden_size": 96, "n_head": 6},
    "Mpt": {"d_model": 96, "n_heads": 6, "attn_config": {"clip_qkv": 1.5}},
}
# Measured: 2e-4, and 3e-3, 0.014 (Gemma 2) and 0.024 (Gemma 4 with token inputs) with llama.cpp's
# GELU, a table of fp16 values; logits are about 6.
OFF = {"Falcon": 0.01, "GPT2": 0.01, "Gemma2": 0.05, "Gemma4": 0.05}


def by_llama_cpp(path: Path, ids: list[int]) -> Tensor:
    """Return the logits of every token, [tokens, vocab]."""
    lib: Any = pytest.importorskip("llama_cpp")
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model, "llama.cpp does not load it"
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = 64
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = 0  # fp32
    params.flash_attn_type = 0
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert lib.llama_decode(context, batch) == 0
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = (lib.llama_get_logits_ith(context, i) for i in range(len(ids)))
    logits = np.stack([np.ctypeslib.as_array(row, shape=(size,)).copy() for row in rows])
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return torch.from_numpy(logits)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "family"), [("qwen2vl", "Qwen2"), ("qwen3vl", "Qwen3"), ("qwen3vlmoe", "Qwen3Moe")]
)
def test_the_text_model_of_one_that_reads_images(name: str, family: str, tmp_path: Path) -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {**experts, "norm_topk_prob": True} if family == "Qwen3Moe" else {}
    save_tiny(tmp_path, family, **HEAD, **more)
    spec, path = read_model_spec(tmp_path), tmp_path / "m.gguf"
    metadata = {**model_metadata(spec, "tiny", "F32"), "tokenizer.ggml.model": "none"}
    text = str(metadata["general.architecture"])
    metadata = {re.sub(rf"^{text}\.", f"{name}.", key): value for key, value in metadata.items()}
    sections = [3, 3, 2, 0]  # pairs of a head of 16 in time, height and width
    metadata |= {"general.architecture": name, f"{name}.rope.dimension_sections": sections}
    metadata[f"{name}.n_deepstack_layers"] = 0
    write_gguf(path, metadata, gguf_tensors(open_checkpoint(tmp_path), spec, "F32"))
    ids = tokens(20)
    expected = PagedModel(path).step({0: ids})[0]
    assert (PagedModel(tmp_path).step({0: ids})[0] - expected).abs().max() < 1e-5
    assert float((by_llama_cpp(path, ids) - expected).abs().max()) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_has_the_same_logits(case: str, tmp_path: Path) -> None:
    family = case.partition(" ")[0]
    save_tiny(tmp_path, family, **CASES[case])
    spec, path = read_model_spec(tmp_path), tmp_path / "m.gguf"
    metadata = {**model_metadata(spec, "tiny", "F32"), "tokenizer.ggml.model": "none"}
    checkpoint = open_checkpoint(tmp_path)
    metadata |= gguf_numbers(checkpoint, spec)
    write_gguf(path, metadata, gguf_tensors(checkpoint, spec, "F32"))
    ids = tokens(20)
    expected = PagedModel(tmp_path).step({0: ids})[0]
    assert float((by_llama_cpp(path, ids) - expected).abs().max()) < OFF.get(family, 1e-3)
