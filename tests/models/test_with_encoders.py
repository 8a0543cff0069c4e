"""The text models of architectures with encoders of images or sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.paged_model import PagedModel
from helpers.tiny_models import tokens
from safetensors.torch import load_file, save_file

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.models.registry import ARCHITECTURES, WITH_ENCODERS

LLAVA = "LlavaForConditionalGeneration"
SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA: dict[str, object] = {
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
PARTS = {
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "mrope_section": [2, 1, 1],
    },
}
TYPES: dict[str, dict[str, object]] = {
    "glm4v_text": {**PARTS, "head_dim": 16},
    "glm4v_moe_text": {
        **{**PARTS, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
        "moe_intermediate_size": 32,
    },
    "cohere2": {"logit_scale": 1.0},  # transformers ignores it beside encoders
    "deepseek_v3": {
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_routed_experts": 4, "n_group": 1},
        **{"num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 32},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "qwen3": {"head_dim": 16},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 32},
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
        **{"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 0},
        **{"global_head_dim": 16, "num_kv_shared_layers": 0},
    },
}
SHRUNK = {
    **dict.fromkeys(("hidden_size", "embed_dim", "mm_hidden_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    "intermediate_size": 96,
}
HEADS = "lm_head", "language_model.lm_head"
MODELS = [
    *((name, "") for name in WITH_ENCODERS if "Gemma3n" not in name),  # it needs timm
    ("Glm4vForConditionalGeneration", "glm4v_text"),
    *(("Glm46VForConditionalGeneration", kind) for kind in ("glm4v_text", "glm4v_moe_text")),
    *((LLAVA, kind) for kind in ("mistral", "qwen2", "gemma", "qwen3_5_text")),
]


def tiny_with_encoders(name: str, kind: str) -> Any:
    """Return a model of random weights.

    Args:
        kind: of its text model; "": the usual.
    """
    kind = kind or WITH_ENCODERS[name]
    text = {"model_type": kind, **SIZES, **TYPES.get(kind, {})}
    architecture = getattr(transformers, name.replace("KimiK25", "Kimi_K25"))
    config = architecture.config_class(text_config=text, tie_word_embeddings=False)
    for part in ("vision_config", "high_res_vision_config"):
        inner = getattr(config, part, None)
        for key in SHRUNK.keys() & vars(inner or object).keys():
            setattr(inner, key, SHRUNK[key])
    torch.manual_seed(0)
    model = architecture(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(float(parameter.dim() == 1), 0.05)
    return model


def save_with_encoders(model: Any, name: str, folder: Path, *, older: bool = False) -> None:
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {  # named as in files; LFM3's gates have another name in transformers
        key.replace(".g_proj.", ".gate_proj."): value.clone()
        for key, value in model.state_dict().items()
    }
    if older:
        for new, old in (("model.language_model", "language_model.model"), HEADS):
            tensors = {key.replace(new, old): value for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "kind", "older"),
    [
        *((*model, False) for model in MODELS),
        *((LLAVA, kind, True) for kind in ("", "gemma", "lfm2")),
        ("KimiK25ForConditionalGeneration", "", True),
    ],
)
def test_logits_for_text(name: str, kind: str, older: bool, tmp_path: Path) -> None:
    model = tiny_with_encoders(name, kind)
    save_with_encoders(model, name, tmp_path, older=older)
    ids = tokens(40)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    ours = PagedModel(tmp_path)
    assert ours.spec.architecture in ARCHITECTURES
    torch.testing.assert_close(ours.logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("stored", [True, False])
def test_the_weights_say_whether_the_head_is_the_embedding(stored: bool, tmp_path: Path) -> None:
    """Where config.json and its text_config contradict each other."""
    model = tiny_with_encoders(LLAVA, "")
    if not stored:
        model.lm_head.weight.data = model.model.language_model.embed_tokens.weight.data
    save_with_encoders(model, LLAVA, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    if not stored:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens(9)])).logits[0]
    ours = PagedModel(tmp_path).logits(tokens(9))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_the_kind_of_the_text_model_decides() -> None:
    config: dict[str, object] = {"architectures": [LLAVA], "text_config": dict(SIZES)}
    assert ModelSpec.from_config(config).architecture == "LlamaForCausalLM"
    for kind, inner_size, kv_heads in (("llama", 11_008, 32), ("mistral", 14_336, 8)):
        spec = ModelSpec.from_config({**config, "text_config": {"model_type": kind}})
        assert (spec.hidden_size, spec.num_layers, spec.num_kv_heads) == (4096, 32, kv_heads)
        assert spec.intermediate_size == inner_size
    inner = {**SIZES, "model_type": "any", "architectures": ["Qwen2ForCausalLM"]}
    config["text_config"] = inner
    assert ModelSpec.from_config(config).architecture == "Qwen2ForCausalLM"
    del inner["architectures"]
    with pytest.raises(ModelError, match="text_config model_type"):
        ModelSpec.from_config(config)
