"""GGUF metadata as keys of config.json."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.gguf_files import llama_file, raw, write_with_package
from helpers.tiny_families import ALL
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvik.errors import ModelError
from kvik.gguf.facts import (
    KEYS,
    LAST_N,
    SCHEMES,
    gguf_model_spec,
    model_config,
    sampling_config,
    sampling_metadata,
    stored_quantization,
)
from kvik.gguf.names import gguf_name, hf_name
from kvik.gguf.reader import read_gguf
from kvik.gguf.rope import llama3_divisors, llama3_scaling
from kvik.gguf.types import BLOCK_TYPES
from kvik.models.model_spec import ModelSpec
from kvik.models.registry import ARCHITECTURES
from kvik.spec.architecture import SEPARATE
from kvik.spec.layers import LatentSpec
from kvik.spec.rope import RopeSpec
from kvik.spec.stored_weights import BLOCK_LAYOUTS
from kvik.spec.visible_keys import Window
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import loaded_kind


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
    assert spec.ropes[0] == RopeSpec(theta=500000.0, original_max_position=64)
    assert spec.windows == (None,) and not spec.qkv_bias and not spec.mlp_bias


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<s>", "a", "<|end|>", "</s>", "<|endoftext|>"], (3, 2, 4)),  # Phi 3
        (["<|start|>", "<|end|>", "<|call|>", "<|return|>", "a"], (3, 2)),  # Harmony
        (["a", "b<|end|>", "<|im_start|>", "</s>"], (3,)),
    ],
)
def test_tokens_that_end_an_answer_by_their_spelling(
    tmp_path: Path, tokens: list[str], ends: tuple[int, ...]
) -> None:
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3}
    assert spec_of(llama_file(tmp_path / "m.gguf", values=values)).eos_token_ids == ends


def test_defaults_of_missing_keys(tmp_path: Path) -> None:
    spec = spec_of(llama_file(tmp_path / "m.gguf", without=["llama.attention.head_count_kv"]))
    assert spec.num_kv_heads == 4 and spec.ropes[0].theta == 10000.0
    assert spec.bos_token_id is None and spec.eos_token_ids == ()  # not Llama's defaults of 2


def test_facts_from_tensors(tmp_path: Path) -> None:
    tensors = {
        "output.weight": np.zeros((96, 32), np.float32),
        "blk.0.attn_q.bias": np.zeros(32, np.float32),
        "blk.0.ffn_up.bias": np.zeros(64, np.float32),
    }
    spec = spec_of(llama_file(tmp_path / "m.gguf", tensors=tensors))
    assert not spec.tie_word_embeddings and spec.qkv_bias and spec.o_bias and spec.mlp_bias


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2vl", "Qwen2ForCausalLM"),  # the text model of one that reads images
        ("qwen3", "Qwen3ForCausalLM"),
        ("qwen3vl", "Qwen3ForCausalLM"),
    ],
)
def test_qwen(tmp_path: Path, architecture: str, expected: str) -> None:
    size = {
        f"{architecture}.attention.key_length": 16,
        f"{architecture}.attention.value_length": 16,
    }
    path = llama_file(tmp_path / "m.gguf", architecture=architecture, values=size)
    spec = spec_of(path)
    assert spec.architecture == expected and spec.head_dim == 16
    is_third = "qwen3" in architecture
    assert spec.qk_norm == is_third and spec.qkv_bias == (not is_third)
    assert spec.windows == (None,)


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    key = "llama.attention.sliding_window"
    spec = spec_of(llama_file(tmp_path / "m.gguf", values={key: 32}))
    assert spec.architecture == "MistralForCausalLM" and spec.windows == (Window(32),)
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
    assert spec_of(llama_file(tmp_path / "m.gguf", values=values)).ropes[0] == expected


def test_llama3_positions(tmp_path: Path) -> None:
    theta, size = 10000.0, 64
    divisors = []
    for index in range(size // 2):  # as in the paper's code
        frequency = theta ** (-2 * index / size)
        wavelength = 2 * math.pi / frequency
        s = (8192 / wavelength - 1) / (4 - 1)
        smooth = frequency / ((1 - s) * frequency / 8 + s * frequency)
        divisors.append(1.0 if wavelength < 2048 else 8.0 if wavelength > 8192 else smooth)
    values = {"llama.attention.key_length": size, "llama.attention.value_length": size}
    factors = {"rope_freqs.weight": np.array(divisors, np.float32)}
    spec = spec_of(llama_file(tmp_path / "m.gguf", values=values, tensors=factors))
    assert spec.ropes[0] == RopeSpec(
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
def test_the_dtype_of_computation(tmp_path: Path, type: str, expected: str) -> None:
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
        ({"llama.expert_count": 8}, "llama.expert_used_count: is missing"),
        ({"llama.expert_count": 1025}, "llama.expert_count: must be an integer in"),
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


WITHIN = {"deepseek2.attention.kv_lora_rank": 48, "deepseek2.attention.key_length": 64}
EXPERTS = {
    "deepseek2.expert_count": 4,
    "deepseek2.expert_used_count": 2,
    "deepseek2.expert_feed_forward_length": 24,
}
NETS = {
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 8,
    "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 4,
    "qwen35.ssm.inner_size": 80,
}


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("qwen35", {"qwen35.ssm.inner_size": 81}, "inner_size:"),
        ("qwen35", {"qwen35.ssm.conv_kernel": 99}, "linear_conv_kernel_dim:"),
        (
            "qwen35",
            {"qwen35.block_count": 3, "qwen35.attention.recurrent_layers": [True, False]},
            "qwen35.attention.recurrent_layers:",
        ),
        ("lfm2", {"lfm2.block_count": 3, "lfm2.attention.head_count_kv": [2, 0]}, "head_count_kv:"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0]}, "all equal except zeros"),
        ("deepseek2", {**EXPERTS, "deepseek2.attention.value_length": 8}, "key_length:"),
        (
            "deepseek2",
            {**EXPERTS, **WITHIN, "deepseek2.attention.value_length": 8}
            | {"deepseek2.rope.dimension_count": 64},
            "dimension_count:",
        ),
    ],
)
def test_wrong_facts_of_other_layers(
    tmp_path: Path, architecture: str, values: dict[str, Any], message: str
) -> None:
    usual = {"deepseek2": {"deepseek2.attention.kv_lora_rank": 48}, "qwen35": NETS}
    usual["lfm2"] = {"lfm2.shortconv.l_cache": 3}
    values = usual[architecture] | values
    without = ["llama.attention.head_count_kv"] if architecture == "lfm2" else []
    path = llama_file(
        tmp_path / "m.gguf", architecture=architecture, values=values, without=without
    )
    with pytest.raises(ModelError, match=message):
        spec_of(path)


def test_old_files_of_deepseek_have_one_matrix_for_keys_and_values(tmp_path: Path) -> None:
    values = {
        **EXPERTS,
        **WITHIN,
        "deepseek2.attention.value_length": 32,
        "deepseek2.rope.dimension_count": 16,
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": 4.0,
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
    }
    spec = spec_of(llama_file(tmp_path / "m.gguf", architecture="deepseek2", values=values))
    assert spec.architecture == "DeepseekV2ForCausalLM" and spec.wiring == ""
    assert spec.latent == LatentSpec(48, 16, 48, 32)
    assert spec.ropes[0].mscale == spec.ropes[0].mscale_all_dim == 0.707
    more = {"deepseek2.attention.key_length_mla": 24, "deepseek2.attention.value_length_mla": 8}
    more |= {"deepseek2.expert_gating_func": 2, "deepseek2.attention.q_lora_rank": 12}
    spec = spec_of(llama_file(tmp_path / "n.gguf", architecture="deepseek2", values=values | more))
    assert spec.architecture == "DeepseekV3ForCausalLM" and spec.wiring == SEPARATE
    assert spec.latent == LatentSpec(48, 16, 8, 8, 12)
    router = next(layer.experts.router for layer in spec.layers if layer.experts)
    assert (router.groups, router.scale) == (1, 1.0)  # defaults of missing keys


@pytest.mark.parametrize(
    ("more", "family"),
    [
        ({}, "DeepseekV2"),
        ({"deepseek2.expert_weights_norm": False}, "DeepseekV2"),
        ({"deepseek2.expert_weights_norm": True, "deepseek2.expert_gating_func": 1}, "DeepseekV2"),
        ({"deepseek2.expert_weights_norm": True}, "DeepseekV3"),  # GLM-4.7-Flash
        ({"deepseek2.expert_gating_func": 2}, "DeepseekV3"),
    ],
)
def test_routers_of_files_that_do_not_name_their_scores(
    tmp_path: Path, more: dict[str, Any], family: str
) -> None:
    sizes = {"deepseek2.attention.value_length": 32, "deepseek2.rope.dimension_count": 16}
    values = {**EXPERTS, **WITHIN, **sizes, **more}
    spec = spec_of(llama_file(tmp_path / "m.gguf", architecture="deepseek2", values=values))
    assert spec.architecture == f"{family}ForCausalLM"


def test_other_models_are_named(tmp_path: Path) -> None:
    path = llama_file(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ModelError, match=r"must be one of llama, .*qwen2, .*olmo2.*, not 'mamba'"):
        spec_of(path)


def test_a_file_without_a_model(tmp_path: Path) -> None:
    path = write_with_package(tmp_path / "m.gguf", "llama", {}, {})
    with pytest.raises(ModelError, match="llama.embedding_length: is missing"):
        spec_of(path)
    (tmp_path / "n.gguf").write_bytes(raw())
    with pytest.raises(ModelError, match="general.architecture: is missing"):
        spec_of(tmp_path / "n.gguf")


# Divisors of frequencies, and their config.json.

CASES = [
    (500_000.0, 64, (32.0, 1.0, 4.0, 8192)),  # Llama 3.2
    (500_000.0, 128, (8.0, 1.0, 4.0, 8192)),  # Llama 3.1
    (500_000.0, 128, (16.0, 1.0, 1.0, 8192)),  # Llama 4 Scout
    (10_000.0, 128, (5.0, 1.0, 3.0, 2048)),
    (10_000.0, 64, (3.0, 2.0, 9.0, 4096)),
    (10_000.0, 8, (8.0, 1.0, 4.0, 32)),  # one divisor between 1 and 8
    (10_000.0, 8, (8.0, 1.0, 4.0, 1024)),  # none
    (10_000.0, 8, (8.0, 1.0, 4.0, 4)),  # all are 8
    (10_000.0, 2, (8.0, 1.0, 4.0, 16)),
]


def original_divisors(theta: float, head_dim: int, scaling: dict[str, object]) -> torch.Tensor:
    """Return the divisors of transformers."""
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return plain / frequencies


@pytest.mark.parametrize(("theta", "head_dim", "numbers"), CASES)
def test_scaling_is_recovered_from_divisors(
    theta: float, head_dim: int, numbers: tuple[float, float, float, int]
) -> None:
    factor, low, high, original = numbers
    scaling: dict[str, object] = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    divisors = original_divisors(theta, head_dim, scaling)
    rope = RopeSpec("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    ours = torch.tensor(llama3_divisors(rope, head_dim))
    torch.testing.assert_close(ours, divisors, rtol=2e-5, atol=0)
    found = llama3_scaling(divisors.tolist(), theta, head_dim)
    assert found["rope_type"] == "llama3"
    again = original_divisors(theta, head_dim, dict(found))
    torch.testing.assert_close(again, divisors, rtol=1e-4, atol=0)
    if (low, high, original) == (1.0, 4.0, 8192):
        assert dict(found) == scaling


def test_no_stretching() -> None:
    assert llama3_scaling([1.0] * 4, 10_000.0, 8) is None


@pytest.mark.parametrize(
    "divisors",
    [
        [1.0, 2.0, 3.0, 1.0],  # not such an increase
        [1.0, 8.0, 1.0, 8.0],
        [0.5, 1.0, 1.0, 8.0],
        [1.0, 1.0, 1.0],
        [1.0, 1.0, 1.0, float("nan")],
        [1.0, 1.0, 1.0, float("inf")],
        [],
    ],
)
def test_other_divisors_are_refused(divisors: list[float]) -> None:
    with pytest.raises(ModelError, match=r"^rope_freqs\.weight: must hold"):
        llama3_scaling(divisors, 10_000.0, 8)


def test_layers_with_a_window_as_a_file_lists_them(tmp_path: Path) -> None:
    values = {
        "exaone4.block_count": 3,
        "exaone4.attention.sliding_window": 8,
        "exaone4.attention.sliding_window_pattern": [False, True, True],
    }
    path = llama_file(tmp_path / "m.gguf", architecture="exaone4", values=values)
    assert gguf_model_spec(read_gguf(path)).windows == (None, Window(8), Window(8))
    path = llama_file(
        tmp_path / "n.gguf", architecture="exaone4", values={**values, "exaone4.block_count": 4}
    )
    with pytest.raises(ModelError, match="sliding_window_pattern: must have 4 values, not 3"):
        gguf_model_spec(read_gguf(path))


def test_clipping_in_a_file(tmp_path: Path) -> None:
    values = {"olmo.attention.layer_norm_epsilon": 1e-5, "olmo.attention.clamp_kqv": 0.0}
    path = llama_file(tmp_path / "m.gguf", architecture="olmo", values=values)
    assert gguf_model_spec(read_gguf(path)).norm_eps == pytest.approx(1e-5)
    assert gguf_model_spec(read_gguf(path)).scales.qkv_limit is None
    values["olmo.attention.clamp_kqv"] = 8.0
    path = llama_file(tmp_path / "n.gguf", architecture="olmo", values=values)
    assert gguf_model_spec(read_gguf(path)).scales.qkv_limit == 8.0


def test_longrope_is_read_from_two_tensors(tmp_path: Path) -> None:
    original = {
        "phi3.rope.scaling.original_context_length": 16,
        "phi3.rope.scaling.attn_factor": 1.25,
    }
    slower = {"long": [1.5, 2.0, 4.0, 8.0], "short": [1.0, 1.1, 1.2, 1.3]}
    tensors = {f"rope_factors_{k}.weight": np.array(v, np.float32) for k, v in slower.items()}

    def read(values: dict, tensors: dict) -> ModelSpec:
        path = llama_file(tmp_path / "m.gguf", architecture="phi3", values=values, tensors=tensors)
        return gguf_model_spec(read_gguf(path))

    (rope,) = read(original, tensors).ropes
    assert (rope.kind, rope.original_max_position) == ("longrope", 16)
    assert (rope.long_factors, rope.short_factors) == tuple(map(tuple, slower.values()))
    assert (rope.attention_factor, rope.factor) == (1.25, 4.0)
    one = {"rope_factors_long.weight": tensors["rope_factors_long.weight"]}
    with pytest.raises(ModelError, match="must have a vector rope_factors_short.weight of F32"):
        read(original, one)
    with pytest.raises(ModelError, match="original_context_length"):
        read({}, tensors)


# Names of tensors, compared with those of transformers in the same models.


# Some of their tensors are split, joined or named otherwise in files.
APART = {"Falcon", "Gemma4-experts", "GptOss", "GraniteMoe", "Lfm2Moe", "Llama4"}
APART |= {"GraniteMoeShared", "GraniteMoeHybrid", "GraniteMoeHybrid-dense"}
NAMED = {**ALL, "StableLm": {"use_qkv_bias": True}}


@pytest.mark.parametrize("family", sorted(NAMED.keys() - APART))
def test_tensors_have_the_names_of_the_public_package(family: str, tmp_path: Path) -> None:
    """Those of all experts of a layer share one name."""
    options, (family, _, variant) = NAMED[family], family.partition("-")
    row = ARCHITECTURES[f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"]
    kind = row.gguf_experts if variant == "experts" and row.gguf_experts else row.gguf or "llama"
    architecture = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    known = gguf.get_tensor_name_map(architecture, 7)
    save_tiny(tmp_path, family, **options)
    experts, own = re.compile(r"experts\.(\d+)"), row.gguf_names
    names = list(load_file(tmp_path / "model.safetensors"))
    names = [name for name in names if not name.endswith(tuple(row.gguf_numbers.values()))]
    assert len(names) >= 20
    for name in names:
        usual = experts.sub("experts", name).replace("correction_bias", "correction.bias")
        usual = usual.replace("dt_bias", "dt_proj.bias")  # as in the converter
        usual = usual.replace("layer_scalar", "layer_scalar.weight")
        usual = usual.replace("mlp.expert_bias", "mlp.expert_bias.bias")
        if "mixer.experts" in usual:
            usual = usual.replace("backbone", "model").replace("mixer", "mlp")
        spelled = usual, usual.removeprefix("transformer.")  # as in files of BLOOM
        named = (known.get_name(one, try_suffixes=(".weight", ".bias")) for one in spelled)
        expected = next(filter(None, named))
        assert gguf_name(name, own) == expected
        number = experts.search(name)
        found = hf_name(expected, own)
        assert found.format(number and number[1]) == name


def test_other_names_have_none() -> None:
    others = ("rope_freqs.weight", "blk.0.attn_qkv.weight", "blk.x.attn_q.weight", "blk.1.", "")
    for name in (*others, "blk.0.attn_q.scale"):
        assert hf_name(name, {}) is None
    for name in ("self_attn.rotary_emb.inv_freq", "mlp.up_proj.qweight", "x"):
        assert gguf_name(f"model.layers.0.{name}", {}) is None and gguf_name(name, {}) is None
    assert hf_name("blk.01.attn_q.weight", {}) is None  # two names would be the same
    assert hf_name("blk.0.output.weight", {"output": "lm_head"}) is None  # the model has it once


# Sampling defaults, written and read.

GENERAL = gguf.Keys.General


def test_keys_are_those_of_the_public_package() -> None:
    assert set(KEYS.values()) == {
        GENERAL.SAMPLING_TEMP,
        GENERAL.SAMPLING_TOP_K,
        GENERAL.SAMPLING_TOP_P,
        GENERAL.SAMPLING_MIN_P,
        GENERAL.SAMPLING_PENALTY_REPEAT,
    }
    assert LAST_N == GENERAL.SAMPLING_PENALTY_LAST_N


def test_sampling_defaults_survive_a_round_trip(tmp_path: Path) -> None:
    config = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    stored = sampling_metadata({**config, "max_new_tokens": 5})
    assert stored[LAST_N] == -1  # all of them, as in kvik
    file = read_gguf(llama_file(tmp_path / "m.gguf", values={**stored, LAST_N: 64}))
    assert sampling_config(file.metadata) == config
    assert sampling_metadata({}) == {}
    assert sampling_config(read_gguf(llama_file(tmp_path / "n.gguf")).metadata) == {}


# Types of a file's tensors, and the schemes of its layers.

MINIMA = WeightKind("int4", 32, "minima")
LOADED = {
    "Q8_0": WeightKind("int8", 32),
    "Q4_0": WeightKind("int4", 32),
    "Q4_1": MINIMA,
    "Q5_0": WeightKind("int8", 32),
    "Q5_1": None,
    "Q2_K": WeightKind("int4", 16, "minima"),
    "Q3_K": WeightKind("int4", 16),
    "Q4_K": MINIMA,
    "Q5_K": None,
    "Q6_K": WeightKind("int8", 16),
    "IQ4_NL": WeightKind("iq4", 32),
    "IQ4_XS": WeightKind("iq4", 32),
    "MXFP4": WeightKind("mxfp4", 32),
}


def test_every_type_of_blocks_has_a_scheme() -> None:
    floats = {"F32", "F16", "BF16"}
    assert set(SCHEMES) == set(BLOCK_TYPES) - floats == set(BLOCK_LAYOUTS) == set(LOADED)
    assert all(scheme.layout == name for name, scheme in SCHEMES.items())


@pytest.mark.parametrize("type", LOADED)
def test_types_that_run_as_stored(type: str) -> None:
    assert loaded_kind(SCHEMES[type], 4096) == LOADED[type]


def test_layers_by_name(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": np.zeros((64, 32), np.float32),
        "blk.0.attn_q.weight": np.zeros((32, 32), np.float32),
        "blk.0.attn_k.weight": np.zeros((32, 32), np.float32),
        "blk.0.something.weight": np.zeros((32, 32), np.float32),
    }
    types = dict(zip(tensors, ("Q8_0", "Q4_0", "BF16", "Q5_0"), strict=True))
    file = read_gguf(write_with_package(tmp_path / "m.gguf", "llama", {}, tensors, types))
    found = stored_quantization(file)
    assert found.embedding_scheme("model.embed_tokens") == SCHEMES["Q8_0"]
    assert found.scheme("model.layers.0.self_attn.q_proj") == SCHEMES["Q4_0"]
    assert found.scheme("model.layers.0.self_attn.k_proj") is None
    assert found.scheme("model.layers.1.self_attn.q_proj") is None
    assert str(found) == "gguf: Q8_0; Q4_0"


def test_a_file_of_floats(tmp_path: Path) -> None:
    file = read_gguf(llama_file(tmp_path / "m.gguf"))
    assert stored_quantization(file) is None
    assert gguf_model_spec(file).quantization is None


def test_the_package_agrees_on_sizes() -> None:
    """Groups divide blocks."""
    for name, scheme in SCHEMES.items():
        weights, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert weights % scheme.group == 0
