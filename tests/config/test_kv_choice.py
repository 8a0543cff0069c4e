"""The KV cache in fewer bits: what is decided, what it saves, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import Hardware
from kvik.config.resolve import resolve
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import KV_FORMATS
from kvik.spec.stored_weights import StoredQuantization

GIB = 1 << 30
PC = Hardware("PC", 8, 64 * GIB, "RAM", frozenset({"avx2", "fma", "avx512_bf16"}), native=True)


def llama(head_dim: int = 128) -> ModelSpec:
    """Llama-3-8B, or one with other heads."""
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": head_dim,
            "max_position_embeddings": 8192,
            "dtype": "bfloat16",
        }
    )


def plan(spec: ModelSpec | None = None, **options: object) -> ResolvedConfig:
    return resolve(EngineConfig(**options), spec or llama(), PC, "somewhere")


def decision(resolved: ResolvedConfig, name: str) -> tuple[str, str]:
    return next((d.value, d.reason) for d in resolved.decisions if d.name == name)


@pytest.mark.parametrize(
    ("format", "head_dim", "times"),
    [
        ("fp32", 128, 0.5),
        ("bf16", 128, 1.0),
        ("fp16", 128, 1.0),
        ("fp8", 128, 256 / 130),
        ("int8", 128, 256 / 130),
        ("int8", 64, 128 / 66),
        ("int4", 128, 256 / 66),
        ("int4", 64, 128 / 34),
    ],
)
def test_the_same_memory_holds_more_tokens(format: str, head_dim: int, times: float) -> None:
    """About twice as many in eight bits and four times as many in four: scales take their part."""
    room = {"kv_cache_memory": GIB, "max_num_seqs": 256, "max_model_len": 2048}
    plain = plan(llama(head_dim), **room)
    found = plan(llama(head_dim), kv_cache_dtype=format, **room)
    assert found.cache.num_blocks / plain.cache.num_blocks == pytest.approx(times, rel=2e-3)
    assert found.memory.kv_cache <= GIB


def test_the_plan_itself_gives_more_blocks() -> None:
    room = {"max_num_seqs": 256, "max_model_len": 8192}
    blocks = {
        format: plan(kv_cache_dtype=format, **room).cache.num_blocks
        for format in ("auto", "int8", "int4")
    }
    assert blocks["int8"] > 1.95 * blocks["auto"] and blocks["int4"] > 3.8 * blocks["auto"]


def test_skipped_layers_count_in_full() -> None:
    room = {"num_blocks": 1000, "kv_cache_dtype": "int8"}
    all_small = plan(**room).memory.kv_cache
    two_large = plan(**room, kv_cache_dtype_skip_layers=(0, 31)).memory.kv_cache
    vectors = 1000 * 16 * 2 * 8  # of a layer
    assert all_small == 32 * vectors * 130
    assert two_large == all_small + 2 * vectors * (256 - 130)
    every = plan(**room, kv_cache_dtype_skip_layers=tuple(range(32)))
    assert every.memory.kv_cache == plan(num_blocks=1000).memory.kv_cache


@pytest.mark.parametrize("format", KV_FORMATS)
def test_it_is_told(format: str) -> None:
    value, reason = decision(plan(kv_cache_dtype=format), "kv_cache_dtype")
    assert value == format and reason.startswith("as asked: keys and values")
    layers = (3, 0, 3)
    resolved = plan(kv_cache_dtype=format, kv_cache_dtype_skip_layers=layers)
    _, reason = decision(resolved, "kv_cache_dtype")
    assert reason.endswith("; layers 0, 3 in bfloat16")


@pytest.mark.parametrize(("name", "known"), [("fp8_e4m3", "fp8"), ("bfloat16", "bf16")])
def test_names_of_other_engines(name: str, known: str) -> None:
    found, same = plan(kv_cache_dtype=name), plan(kv_cache_dtype=known)
    assert decision(found, "kv_cache_dtype") == decision(same, "kv_cache_dtype")
    assert found.cache == same.cache


def test_the_default_is_the_models() -> None:
    assert decision(plan(), "kv_cache_dtype") == ("bfloat16", "the model's")


@pytest.mark.parametrize("format", ["auto", "fp8"])
def test_calibrated_scales_are_told_of(format: str) -> None:
    spec = replace(llama(), quantization=StoredQuantization("fp8", (), kv_scales=True))
    _, reason = decision(plan(spec, kv_cache_dtype=format), "kv_cache_dtype")
    assert reason.endswith(
        "the checkpoint's calibrated scales are not needed: each vector has its own"
    )


@pytest.mark.parametrize(
    ("options", "field", "part"),
    [
        (
            {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": (0, 32)},
            "kv_cache_dtype_skip_layers",
            "layers from 0 to 31, not 32",
        ),
        (
            {"kv_cache_dtype_skip_layers": (0,)},
            "kv_cache_dtype_skip_layers",
            "needs a kv_cache_dtype",
        ),
        (
            {"kv_cache_dtype": "fp16", "attention_backend": "cpu"},
            "attention_backend",
            "cpu: its cache has no fp16",
        ),
    ],
)
def test_what_cannot_be(options: dict[str, object], field: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(**options)
    assert error.value.field == field and part in error.value.message


def test_four_bits_need_pairs() -> None:
    odd = replace(llama(), head_dim=5)
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: int4 needs heads of even size, not 5"):
        plan(odd, kv_cache_dtype="int4")


def test_another_backend_serves_what_the_native_kernels_cannot() -> None:
    value, reason = decision(plan(kv_cache_dtype="fp16"), "attention_backend")
    assert value == "sdpa" and "no fp16" in reason
    assert decision(plan(kv_cache_dtype="int4"), "attention_backend")[0] == "cpu"
