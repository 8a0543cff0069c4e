"""Facts of GGUF files in the words of config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gguf_files import llama_file, raw, write_with_package

from kvik.errors import ModelError
from kvik.gguf.facts import model_config
from kvik.gguf.reader import read_gguf
from kvik.models.model_spec import ModelSpec
from kvik.spec.rope import RopeSpec


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec.from_config(model_config(read_gguf(path)))


def test_a_llama(tmp_path: Path) -> None:
    values = {
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
    }
    spec = spec_of(llama_file(tmp_path / "m.gguf", values=values))
    assert (spec.architecture, spec.vocab_size, spec.hidden_size) == ("LlamaForCausalLM", 96, 32)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (1, 4, 2, 8)
    assert (spec.intermediate_size, spec.max_position_embeddings) == (64, 64)
    assert spec.norm_eps == 1e-5 and spec.tie_word_embeddings and spec.dtype == "float32"
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))
    assert spec.rope == RopeSpec(theta=500000.0, original_max_position=64)
    assert spec.windows == (None,) and not spec.qkv_bias and not spec.mlp_bias


def test_what_a_file_leaves_out(tmp_path: Path) -> None:
    spec = spec_of(llama_file(tmp_path / "m.gguf", without=["llama.attention.head_count_kv"]))
    assert spec.num_kv_heads == 4 and spec.rope is not None and spec.rope.theta == 10000.0
    assert spec.bos_token_id is None and spec.eos_token_ids == ()  # and not Llama's usual 2


def test_tensors_are_facts_too(tmp_path: Path) -> None:
    tensors = {
        "output.weight": np.zeros((96, 32), np.float32),
        "blk.0.attn_q.bias": np.zeros(32, np.float32),
        "blk.0.ffn_up.bias": np.zeros(64, np.float32),
    }
    spec = spec_of(llama_file(tmp_path / "m.gguf", tensors=tensors))
    assert not spec.tie_word_embeddings and spec.qkv_bias and spec.o_bias and spec.mlp_bias


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_qwen(tmp_path: Path, architecture: str, expected: str) -> None:
    size = {
        f"{architecture}.attention.key_length": 16,
        f"{architecture}.attention.value_length": 16,
    }
    path = llama_file(tmp_path / "m.gguf", architecture=architecture, values=size)
    spec = spec_of(path)
    assert spec.architecture == expected and spec.head_dim == 16
    assert spec.qk_norm == (architecture == "qwen3") and spec.qkv_bias == (architecture == "qwen2")
    assert spec.windows == (None,)


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    key = "llama.attention.sliding_window"
    spec = spec_of(llama_file(tmp_path / "m.gguf", values={key: 32}))
    assert spec.architecture == "MistralForCausalLM" and spec.windows == (32,)
    assert spec_of(llama_file(tmp_path / "n.gguf", values={key: 0})).windows == (None,)


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32,
}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            RopeSpec("linear", factor=2.5, original_max_position=64),
        ),
        (
            {"llama.rope.scale_linear": 2.5},
            RopeSpec("linear", factor=2.5, original_max_position=64),
        ),
        ({"llama.rope.scaling.type": "none"}, RopeSpec(original_max_position=64)),
        (YARN, RopeSpec("yarn", factor=4.0, original_max_position=32)),
        (
            YARN
            | {
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
                "llama.rope.scaling.yarn_attn_factor": 1.5,
            },
            RopeSpec(
                "yarn",
                factor=4.0,
                original_max_position=32,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.5,
            ),
        ),
    ],
)
def test_stretched_positions(tmp_path: Path, values: dict[str, Any], expected: RopeSpec) -> None:
    assert spec_of(llama_file(tmp_path / "m.gguf", values=values)).rope == expected


def test_llama3_positions(tmp_path: Path) -> None:
    theta, size = 10000.0, 64
    divisors = []
    for index in range(size // 2):  # as the paper's code has it
        frequency = theta ** (-2 * index / size)
        wavelength = 2 * math.pi / frequency
        s = (8192 / wavelength - 1) / (4 - 1)
        smooth = frequency / ((1 - s) * frequency / 8 + s * frequency)
        divisors.append(1.0 if wavelength < 2048 else 8.0 if wavelength > 8192 else smooth)
    values = {"llama.attention.key_length": size, "llama.attention.value_length": size}
    factors = {"rope_freqs.weight": np.array(divisors, np.float32)}
    spec = spec_of(llama_file(tmp_path / "m.gguf", values=values, tensors=factors))
    assert spec.rope == RopeSpec(
        "llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        ("F32", "float32"),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("Q8_0", "bfloat16"),
    ],
)
def test_what_is_computed_in(tmp_path: Path, type: str, expected: str) -> None:
    path = llama_file(tmp_path / "plain.gguf")
    values = read_gguf(path).metadata.values
    single = {key: value for key, value in values.items() if not key.startswith("general.")}
    tensors = {name: np.zeros((96, 32), np.float32) for name in ("token_embd.weight", "x")}
    types = dict.fromkeys(tensors, type)
    write_with_package(tmp_path / "m.gguf", "llama", single, tensors, types)
    assert spec_of(tmp_path / "m.gguf").dtype == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count: must be 0"),
        ({"split.count": 2}, "split.count: is more than 1"),
        ({"llama.attention.value_length": 4}, "value_length: must be the size of a head, 8"),
        ({"llama.rope.dimension_count": 4}, "dimension_count: must be the size of a head, 8"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: must be an integer in"),
        ({"llama.embedding_length": 2**31}, "llama.embedding_length: must be an integer in"),
        ({"llama.block_count": "12"}, "llama.block_count: must be an integer in"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base: must be a number in"),
        ({"llama.rope.scaling.type": "longrope"}, "scaling.type: must be one of none, linear"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor: is missing"),
        (
            {"tokenizer.ggml.tokens": ["x"] * 97},
            "tokens: must have at most 96 values by token",
        ),
        ({"tokenizer.ggml.eos_token_id": 96}, "eos_token_id: must hold token ids in"),
    ],
)
def test_wrong_facts(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = llama_file(tmp_path / "m.gguf", values=values)
    with pytest.raises(ModelError, match=message):
        spec_of(path)


def test_other_models_are_named(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="must be one of llama, qwen2, qwen3, olmo2, not 'mamba'"):
        spec_of(path)


def test_a_file_without_a_model(tmp_path: Path) -> None:
    path = write_with_package(tmp_path / "m.gguf", "llama", {}, {})
    with pytest.raises(ModelError, match="llama.embedding_length: is missing"):
        spec_of(path)
    (tmp_path / "n.gguf").write_bytes(raw())
    with pytest.raises(ModelError, match="general.architecture: is missing"):
        spec_of(tmp_path / "n.gguf")
