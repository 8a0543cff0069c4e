"""Models in the words of GGUF and back."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvik.errors import ModelError
from kvik.gguf.export import model_metadata, rope_divisors, token_id_metadata
from kvik.gguf.facts import model_config
from kvik.gguf.reader import read_gguf
from kvik.gguf.types import BLOCK_TYPES
from kvik.gguf.writer import OutTensor, write_gguf
from kvik.models.model_spec import ModelSpec
from kvik.spec.rope import RopeSpec

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 50,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "bos_token_id": 3,
    "eos_token_id": [4, 6, 5],
}


def spec(name: str, options: dict[str, Any]) -> ModelSpec:
    return ModelSpec.from_config({**SIZES, "architectures": [name], **options})


def there_and_back(model: ModelSpec, path: Path) -> ModelSpec:
    """Through a file without most of its tensors."""

    def zeros(name: str, type: str, *shape: int) -> OutTensor:
        tensor = OutTensor(name, BLOCK_TYPES[type], shape, lambda: [bytes(tensor.size)])
        return tensor

    tensors = [zeros("token_embd.weight", "BF16", model.vocab_size, model.hidden_size)]
    if not model.tie_word_embeddings:
        tensors.append(zeros("output.weight", "BF16", model.vocab_size, model.hidden_size))
    if model.qkv_bias:
        tensors.append(zeros("blk.0.attn_q.bias", "F32", 8))
    if (divisors := rope_divisors(model)) is not None:
        data = struct.pack(f"<{len(divisors)}f", *divisors)
        f32 = BLOCK_TYPES["F32"]
        tensors.append(OutTensor("rope_freqs.weight", f32, (len(divisors),), lambda: [data]))
    metadata = {**model_metadata(model, "x", "BF16"), **token_id_metadata(model)}
    write_gguf(path, metadata, tensors)
    return ModelSpec.from_config(model_config(read_gguf(path)))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
        ("LlamaForCausalLM", {"rope_scaling": YARN}),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 20}}),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
        ("LlamaForCausalLM", {"eos_token_id": None, "bos_token_id": None}),
        ("MistralForCausalLM", {"sliding_window": 512}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ],
)
def test_there_and_back(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = spec(name, options)
    if options.get("eos_token_id", 0) is None:
        model = replace(model, eos_token_ids=())
    assert there_and_back(model, tmp_path / "m.gguf") == model


def test_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    model = spec("MistralForCausalLM", {"sliding_window": None})
    back = there_and_back(model, tmp_path / "m.gguf")
    assert back == replace(model, architecture="LlamaForCausalLM")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"mscale": 1.0}}, "no words for yarn"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"truncate": False}}, "no words for yarn"),
    ],
)
def test_what_gguf_has_no_words_for(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_metadata(spec(name, {"max_window_layers": 1} | options), "x", "BF16")


def test_other_architectures() -> None:
    model = replace(spec("LlamaForCausalLM", {}), architecture="GPT2LMHeadModel", rope=None)
    with pytest.raises(ModelError, match="architectures: must be one of LlamaForCausalLM"):
        model_metadata(model, "x", "BF16")


def test_rope_spec_defaults_are_what_files_leave_out() -> None:
    assert rope_divisors(replace(spec("LlamaForCausalLM", {}), rope=RopeSpec())) is None
