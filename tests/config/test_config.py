"""Every field of EngineConfig refuses impossible values by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kvik.config.config import EngineConfig, check_config
from kvik.errors import ConfigError

BAD: dict[str, list[Any]] = {
    "model": [None, 3, "a\0b"],
    "dtype": ["int8", "", None, 16],
    "quantization": ["int2", "INT8", "", None, 8],
    "device": ["gpu", "cuda:", "cuda:x", "cuda:-1", "", None, 0],
    "max_model_len": [0, -1, 1 << 30, 2.0, "4k", True],
    "max_num_seqs": [0, -1, 1 << 20, 1.5, True],
    "window": [0, -1, 1 << 32, 1.5, True],
    "attention_sinks": [-1, None, 1.5, 4],
    "max_num_batched_tokens": [0, -8, 1 << 21, "many", False],
    "block_size": [0, -16, 4096, None, 16.0, True],
    "num_blocks": [0, -5, 1 << 31, 2.5],
    "memory_utilization": [0, -0.5, 1.01, float("nan"), float("inf"), None, "0.9", True],
    "kv_cache_memory": [0, -1, 1 << 60, 1e9],
    "graph_memory": [-1, 1 << 60, 1e9],
    "kv_cache_dtype": ["int2", "float32", "fp8_e5m2", "", None, 8],
    "kv_cache_dtype_skip_layers": [None, 3, [0], "0", (-1,), (1.0,), (True,), (1 << 20,)],
    "enable_prefix_caching": [None, 1, "yes"],
    "policy": ["random", "", None, "FCFS"],
    "revision": ["", 3],
    "kv_budget": ["", 3, "a\0b"],
    "lora": ["", 3, "a\0b"],
    "adapters": [("a",), ("=a",), ("a=",), "a=b", ("a=\0",), ("a=b", "a=c"), 3],
    "max_adapters": [0, 513, 2.0, True],
    "max_adapter_rank": [0, 1025, 2.0, True],
    "chat_template": ["", 3],
    "engine_cache": ["", 3, "a\0b"],
    "batch_size": [0, 1 << 20, 2.0],
    "max_wait": [-0.1, float("nan"), float("inf"), "soon", 1e6],
    "ageing": [0, -1, float("nan"), None],
    "max_queued_requests": [0, -1, None, 1.0],
    "max_queued_tokens": [0, None, 1 << 50],
    "tensor_parallel_size": [0, None, 65, "two"],
    "data_parallel_size": [0, None, 65, "two"],
    "pipeline_parallel_size": [0, None, 65, "two"],
    "expert_parallel": [None, 1, "yes"],
    "tensor_parallel_cut": ["half", None, ""],
    "distributed_executor_backend": [None, "mpi", 1],
    "role": ["prefiller", 1],
    "kv_listen": ["10.0.0.1:", "a b", 9000],
    "kv_tiers": [4, "", "memory", "ram:4GiB", "disk:4GiB", "memory:1GiB\0"],
    "kernels": ["fast", None, ""],
    "attention_backend": ["flash", None, ""],
    "threads": [0, -1, 100_000, 1.0],
    "load_format": ["pickle", None],
    "fallback": ["vllm", None, True],
    "seed": [1 << 64, 0.5, "x"],
    "speculative_config": [
        "ngram",
        {"method": "fast"},
        {"kind": "ngram"},
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "adaptive": 1},
        {"method": "ngram", "ngram_min": 3, "ngram_max": 2},
        {"method": "suffix", "shared": "yes"},
        {"method": "draft_model", "model": "x", "quantization": "int2"},
    ],
    "spec_method": ["fast", "", 3, "draft-model"],
    "spec_model": [3, "a\0b"],
    "spec_tokens": [0, -1, 65, 2.0, True],
}


def test_the_table_is_complete() -> None:
    assert set(BAD) == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(replace(EngineConfig(), **{name: value}))
    assert error.value.field == name
    assert "must be" in error.value.message or "is not a field" in error.value.message
    assert "\n" not in str(error.value)


def test_the_defaults_are_valid() -> None:
    check_config(EngineConfig())


def test_two_sizes_for_one_cache_contradict() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: .*num_blocks"):
        check_config(EngineConfig(num_blocks=10, kv_cache_memory=1 << 20))


@pytest.mark.parametrize(("name", "known"), [("fp8_e4m3", "fp8"), ("bfloat16", "bf16")])
def test_names_of_formats_are_normalised(name: str, known: str) -> None:
    config = EngineConfig(kv_cache_dtype=name)
    assert check_config(config) == replace(config, kv_cache_dtype=known)
