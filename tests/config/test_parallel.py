"""What cannot be divided among processes is refused, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import NATIVE_ISAS, Hardware
from kvik.config.resolve import resolve
from kvik.errors import CapacityError, ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.models.public import public_configs
from kvik.spec.engine_folder import Built

MACHINE = Hardware("large", 64, 1 << 40, "RAM", frozenset(NATIVE_ISAS["avx2"]), native=True)


def planned(model: str, ranks: int, stages: int = 1) -> ResolvedConfig:
    spec = ModelSpec.from_config(public_configs()[model])
    options = {"max_model_len": 4096, "max_num_seqs": 8, "num_blocks": 1000, "threads": 8}
    config = EngineConfig(
        device="cpu", tensor_parallel_size=ranks, pipeline_parallel_size=stages, **options
    )
    return resolve(config, spec, MACHINE, "")


@pytest.mark.parametrize(
    ("model", "ranks", "times"),
    [
        ("llama-3.2-1b", 2, 1),  # eight heads of keys, divided
        ("qwen2.5-0.5b", 4, 2),  # two heads of keys for four processes
        ("deepseek-v2-lite", 2, 2),  # each keeps all latent vectors
    ],
)
def test_the_cache_of_all_processes_is_planned(model: str, ranks: int, times: int) -> None:
    alone = planned(model, 1).memory.kv_cache
    assert planned(model, ranks).memory.kv_cache == times * alone


def test_what_is_not_divided_is_planned_for_each_process() -> None:
    """An untied embedding of 102,400 x 2,048 in bfloat16."""
    alone, two = (planned("deepseek-v2-lite", ranks).memory for ranks in (1, 2))
    assert two.overhead - alone.overhead > 102_400 * 2_048 * 2 and two.weights == alone.weights


@pytest.mark.parametrize(
    ("model", "ends"),
    [
        ("llama-3.2-1b", (8, 16)),  # the one table is in both stages
        ("llama-3.2-1b", (2, 8, 14, 16)),
        ("deepseek-v2-lite", (14, 27)),
    ],
)
def test_layers_are_divided_by_their_bytes(model: str, ends: tuple[int, ...]) -> None:
    resolved = planned(model, 1, len(ends))
    assert resolved.runner.stage_ends == ends and resolved.scheduler.stages == len(ends)
    assert resolved.runner.threads == 8 // len(ends)


def test_a_pipeline_has_the_cache_of_one_process_and_the_head_twice() -> None:
    """A table of 128,256 x 2,048 in bfloat16."""
    alone, two = (planned("llama-3.2-1b", 1, stages).memory for stages in (1, 2))
    assert two.kv_cache == alone.kv_cache and two.weights == alone.weights
    assert two.overhead - alone.overhead > 128_256 * 2_048 * 2


def test_a_model_on_several_machines_is_planned_for_one_of_them() -> None:
    """A machine of 32 GB holds a quarter of 64 GB of weights."""
    spec = ModelSpec.from_config(public_configs()["qwen2.5-32b"])
    options = {"max_model_len": 1024, "max_num_seqs": 4, "threads": 4, "kv_cache_memory": 1 << 30}
    config = EngineConfig(device="cpu", pipeline_parallel_size=4, **options)
    small = replace(MACHINE, memory_limit=32 << 30)
    with pytest.raises(CapacityError):
        resolve(config, spec, small, "")
    memory = resolve(replace(config, distributed_executor_backend="ray"), spec, small, "").memory
    assert 15 << 30 < memory.weights < 20 << 30 and memory.total < 32 << 30


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3.2-1b", {"kernels": "torch"}, "must be 1 with torch kernels"),
        ("llama-3.2-1b", {"tensor_parallel_size": 33}, "at most 32, its heads of queries"),
        ("llama-3.2-1b", {"threads": 1}, "at most 1, as there are 1 threads"),
        ("llama-3.2-1b", {"tensor_parallel_size": 0}, "must be an integer in"),
    ],
)
def test_refusals_of_a_group(model, options, message) -> None:
    config = EngineConfig(**{"device": "cpu", "tensor_parallel_size": 2, "threads": 64, **options})
    with pytest.raises(ConfigError, match=message) as caught:
        spec = ModelSpec.from_config(public_configs()[model])
        resolve(config, spec, MACHINE, "")
    assert caught.value.field == "tensor_parallel_size"


def test_an_engine_folder_for_other_kernels() -> None:
    spec = ModelSpec.from_config(public_configs()["llama-3.2-1b"])
    spec = replace(spec, built=Built("torch", "plain-1", "bfloat16", "none", 1 << 30))
    with pytest.raises(ConfigError, match="must be 1 with torch kernels"):
        resolve(EngineConfig(tensor_parallel_size=2, threads=8), spec, MACHINE, "")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3.2-1b", {"kernels": "torch"}, "must be 1 with torch kernels"),
        ("llama-3.2-1b", {"pipeline_parallel_size": 17}, "16 layers cannot be divided into 17"),
        ("llama-3.2-1b", {"threads": 1}, "at most 1, as there are 1 threads, not 2"),
        (
            "llama-3.2-1b",
            {"threads": 3, "tensor_parallel_size": 2},
            "at most 1, as there are 3 threads, 2 for each stage, not 2",
        ),
        ("llama-3.2-1b", {"spec_method": "eagle"}, "must be 1 with eagle"),
    ],
)
def test_refusals_of_a_pipeline(model, options, message) -> None:
    common = {"device": "cpu", "pipeline_parallel_size": 2, "threads": 64}
    with pytest.raises(ConfigError, match=message) as caught:
        spec = ModelSpec.from_config(public_configs()[model])
        resolve(EngineConfig(**{**common, **options}), spec, MACHINE, "")
    assert caught.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("olmoe-1b-7b", {"tensor_parallel_size": 1}, "only with tensor_parallel_size of 2 or more"),
        ("llama-3.2-1b", {}, "LlamaForCausalLM has no experts"),
        ("mixtral-8x7b-v0.1", {"tensor_parallel_size": 9}, "9 processes cannot share 8 experts"),
    ],
)
def test_refusals_of_whole_experts(model, options, message) -> None:
    common = {"device": "cpu", "tensor_parallel_size": 2, "threads": 64, "expert_parallel": True}
    with pytest.raises(ConfigError, match=message) as caught:
        spec = ModelSpec.from_config(public_configs()[model])
        resolve(EngineConfig(**{**common, **options}), spec, MACHINE, "")
    assert caught.value.field == "expert_parallel"
