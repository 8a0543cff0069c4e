"""Tiny random checkpoints made by transformers, kvik's reference."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik import LLM, SamplingParams

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

_GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
    "GPT2": _GPT2,
    "GPTJ": _GPT2,
    "GPTBigCode": _GPT2,
    "CodeGen": _GPT2,
    "OpenAIGPT": _GPT2,
    "Dbrx": {
        "vocab_size": 96,
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"moe_num_experts": 6, "moe_top_k": 2, "ffn_hidden_size": 24},
    },
    "Bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "Mpt": {"vocab_size": 96, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "LongcatFlash": {
        **{"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_layers": 2},
        "max_position_embeddings": 128,
    },
    "GPTNeo": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "max_position_embeddings": 128,
        "window_size": 9,
        "attention_types": [[["global", "local", "global"], 1]],
    },
}


# Families whose text models have their own configuration class.
TEXT_CONFIGS = (
    *("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe", "Llama4"),
    *("MiniMaxM3VL", "CohereCompass"),
)

LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 9,
    "floor_scale": 8,
    "attn_scale": 0.7,
}
GEMMA3N: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 80,  # the last tokens have the first one's vectors
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.9, 0.8, 0.9, 0.0, 0.0, 0.0],
    "final_logit_softcapping": 3.0,
}
LATENT: dict[str, Any] = {  # of DeepSeek
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA = {  # of Qwen 3.5
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 20,
}

KIMI: dict[str, Any] = {  # of Kimi Linear
    **LATENT,
    "q_lora_rank": None,
    "n_routed_experts": None,
    "num_experts": 8,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}

MINIMAX: dict[str, Any] = {  # of MiniMax-Text-01
    **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LONGCAT: dict[str, Any] = {  # of LongCat-Flash: two blocks, of two layers each
    **{"num_layers": 2, "ffn_hidden_size": 56, "q_lora_rank": 24, "kv_lora_rank": 48},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 12, "v_head_dim": 20, "head_dim": 16},
    **{"moe_topk": 4},
    **{"expert_ffn_hidden_size": 24, "n_routed_experts": 6, "zero_expert_num": 5},
}
ZAMBA2: dict[str, Any] = {  # two blocks take turns
    **{"num_hidden_layers": 6, "num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 4},
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
    **{"num_mem_blocks": 2, "adapter_rank": 4, "time_step_min": 1e-30},
}
COMPASS: dict[str, Any] = {  # of Cohere Compass
    "hidden_size": 64,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "rope_parameters": {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    },
}
_ABSENT = ("q_lora_rank", "n_routed_experts")
BAILING: dict[str, Any] = {  # of Ling 3.0
    **{key: value for key, value in LATENT.items() if key not in _ABSENT},
    **{"num_local_experts": 8, "head_dim": 12, "layer_group_size": 3},
}

STEP: dict[str, Any] = {  # of Step 3.7
    "head_dim": 16,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 9,
    "num_sliding_attention_heads": 6,
    "rope_theta": [5e6, 1e4, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 40,
}

INDEXED: dict[str, Any] = {  # of DeepSeek V3.2 and GLM-5: each query reads ten keys
    **LATENT,
    "index_n_heads": 8,
    "index_head_dim": 24,
    "index_topk": 10,
    "head_dim": 16,
}


IN_POOLS: dict[str, Any] = {  # of GLM-5.3: each query reads two pools of four keys, and the last
    **INDEXED,
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 0,
    "linear_num_heads": 3,
    "linear_head_dim": 12,
    "layer_types": [
        *("linear_attention", "indexed_attention", "indexed_attention", "linear_attention"),
    ],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_topk": 8,
    "index_kpool": 4,
    "hc_mult": 3,
}

IN_BLOCKS: dict[str, Any] = {  # of MiniMax-M3: each query reads three blocks of four keys
    "head_dim": 16,
    "rotary_dim": 8,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "dense_intermediate_size": 56,
    "shared_intermediate_size": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}


COMPRESSED: dict[str, Any] = {  # of DeepSeek V4: windows of 16 keys, and of entries five or all
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "layer_types": [
        *("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 5,
    "hc_sinkhorn_iters": 5,
}


# Families that also read images -> their encoders, as small as possible.
_VISION = {"depth": 1, "num_heads": 2, "patch_size": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "Qwen2VL": {**_VISION, "embed_dim": 8, "hidden_size": 32},
    "Qwen2_5_VL": {**_VISION, "hidden_size": 8, "intermediate_size": 8, "out_hidden_size": 32},
    "Qwen3VL": {
        **_VISION,
        "hidden_size": 8,
        "intermediate_size": 8,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    },
}
ENCODERS["Qwen3VLMoe"] = ENCODERS["Qwen3VL"]
ENCODERS["Glm5Next"] = {
    **_VISION,
    **{"hidden_size": 8, "intermediate_size": 8, "out_hidden_size": 32},
    "projection_intermediate_size": 8,
}
ENCODERS["Step3p7"] = {
    **{"hidden_size": 8, "mlp_ratio": 1.0, "num_hidden_layers": 1, "num_attention_heads": 2},
    "image_size": 28,
}


def tiny_config(family: str, **options: Any) -> Any:
    """Return the configuration of a model of a family ("Llama", "Mistral", "Qwen2", "GPT2")."""
    sizes = SIZES.get(family, SIZES["Llama"])
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    name = f"{family}Text" if family in TEXT_CONFIGS else family
    facts = {**sizes, **special, **options}
    head = "LMHeadModel" if family in ("GPT2", "OpenAIGPT") else "ForCausalLM"
    if family in ENCODERS:
        tied = facts.pop("tie_word_embeddings", False)
        facts = {"text_config": facts, "vision_config": ENCODERS[family]}
        facts["tie_word_embeddings"], head = tied, "ForConditionalGeneration"
    config = getattr(transformers, f"{name}Config")(**facts)
    config.architectures = [f"{family}{head}"]
    return config


def tiny_model(family: str, *, seed: int = 0, **options: Any) -> Any:
    """Return a transformers model.

    Every parameter is random, including biases and gains, and large enough that attention is not
    flat; with the initialisation of transformers, half of the options would have no visible effect.
    """
    config = tiny_config(family, **options)
    model = getattr(transformers, config.architectures[0])(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if gain else 0.0, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("tid2eid"):
                drawn = torch.rand(len(buffer), config.n_routed_experts, generator=generator)
                buffer.copy_(drawn.argsort()[:, : buffer.shape[1]])
    return model


def save_tiny(folder: Path, family: str, *, seed: int = 0, **options: Any) -> Any:
    """Make a tiny model, save it to a folder and return the transformers model."""
    model = tiny_model(family, seed=seed, **options)
    model.save_pretrained(folder)
    if family in PUBLISHED:
        _rename_as_published(folder, model.config, PUBLISHED[family])
    if family == "MiniMaxM3VL":
        _separate(folder)
    return model


# Parts of names that transformers 5.23 writes -> as in published checkpoints, which it reads.
PUBLISHED = {
    "DeepseekV4": {
        "model.embed_tokens": "embed",
        "model.hc_head.hc_": "hc_head_",
        "attn.norm": "attn.kv_norm",
        "model.": "",
    },
    "OlmoHybrid": {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
    "HYV4": {
        "hc_pre.hc_attn_layer.hc_": "hc_attn_layer.hc_pre.hc_",
        "hc_pre.hc_mlp_layer.hc_": "hc_mlp_layer.hc_pre.hc_",
        "hc_pre.hc_head.": "hc_head.",
        "mlp.linear_gate": "mlp.gate_proj",
        "shared_experts.linear_gate": "shared_experts.gate_proj",
    },
}


def _separate(folder: Path) -> None:
    """Write the experts of MiniMax-M3, and gates, one by one, as published."""
    path = folder / "model.safetensors"
    named: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        part = name.rpartition(".experts.")[0]
        if part:
            for e, matrix in enumerate(tensor):
                names = ("w1", "w3") if "gate_up" in name else ("w2",)
                parts = zip(names, matrix.chunk(len(names)), strict=True)
                named |= {f"{part}.experts.{e}.{w}.weight": rows for w, rows in parts}
        elif "gate_up_proj" in name:
            gate, up = tensor.chunk(2)
            named |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            named[name.replace("indexer.", "index_")] = tensor
    sparse = {name.rpartition(".experts.")[0] for name in named if ".experts." in name}
    for scope in sparse:
        published = scope.replace(".mlp", ".block_sparse_moe")
        for name in [name for name in named if name.startswith(f"{scope}.")]:
            new = name.replace(scope, published).replace("gate.e_score", "e_score")
            named[new] = named.pop(name)
    stored = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(stored, path, metadata={"format": "pt"})


def _rename_as_published(folder: Path, config: Any, renamed: dict[str, str]) -> None:
    """Rename tensors; transformers also writes the convolutions of OLMo Hybrid in three equal
    parts."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name in [name for name in stored if ".q_conv1d." in name]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        joined = torch.cat([stored[part] for part in names])
        parts = joined.split((keys, keys, len(joined) - 2 * keys))
        stored |= {part: rows.contiguous() for part, rows in zip(names, parts, strict=True)}
    for old, new in renamed.items():
        stored = {name.replace(old, new): tensor for name, tensor in stored.items()}
    save_file(stored, path, metadata={"format": "pt"})


# Names of the text model in checkpoints that read images.
IMAGE_PREFIXES = ("model.language_model", "language_model.model", "model.text_model")


# Families of text models -> family of the checkpoints with images that contain them.
WITH_IMAGES = {
    "Gemma3": "Gemma3ForConditionalGeneration",
    "Gemma3n": "Gemma3nForConditionalGeneration",
    "Ministral3": "Mistral3ForConditionalGeneration",
    "Llama4": "Llama4ForConditionalGeneration",
    "Qwen3_5": "Qwen3_5ForConditionalGeneration",
    "CohereCompass": "CohereCompassForConditionalGeneration",
}


def save_tiny_with_images(folder: Path, prefix: str, family: str = "Gemma3") -> Any:
    """Save a tiny model as the text model of one that reads images, and return the text model."""
    options = {
        "Llama4": LLAMA4,
        "Gemma3n": GEMMA3N,
        "CohereCompass": COMPASS,
        "Qwen3_5": DELTA | {"num_hidden_layers": 4},
    }.get(family, {"sliding_window": 9})
    reference = save_tiny(folder, family, **{"head_dim": 16, "hidden_size": 64, **options})
    stored = load_file(folder / "model.safetensors")
    named = {name.replace("model", prefix, 1): tensor for name, tensor in stored.items()}
    if prefix.startswith("language_model") and "lm_head.weight" in named:
        named["language_model.lm_head.weight"] = named.pop("lm_head.weight")
    others = {
        "Llama4": ("vision_model", "multi_modal_projector"),
        "Gemma3n": ("model.vision_tower", "model.embed_vision", "model.audio_tower"),
        "Qwen3_5": ("model.visual", "mtp"),
        "CohereCompass": ("model.visual",),
    }.get(family, ("vision_tower", "model.vision_tower"))
    for scope in others:
        named[f"{scope}.x.weight"] = torch.ones(3)
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    inner = json.loads((folder / "config.json").read_text())
    outer = {"architectures": [WITH_IMAGES[family]], "dtype": inner.pop("dtype")}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    return reference


def tokens(length: int, seed: int = 0, vocab: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """Return the logits [tokens, vocab] of transformers, fp32."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def reference_greedy(model: Any, ids: list[int], steps: int) -> list[int]:
    """Return the greedy continuation by transformers, over its own cache."""
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return whole[0, len(ids) :].tolist()


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def greedy_and_scores(model: Path, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens of a model, and the log probability of each token of a prompt."""
    options = {"threads": 1, **options}
    with LLM(str(model), device="cpu", num_blocks=32, **options) as llm:
        (output,) = llm.generate([tokens(9)], GREEDY)
        (scored,) = llm.score([tokens(24)])
        scores = [entry.logprob for entry in scored.prompt_logprobs[1:] if entry]
        return output.outputs[0].token_ids, torch.tensor(scores)
