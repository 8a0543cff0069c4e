"""What cannot be divided among processes is refused, by name."""

from __future__ import annotations

import pytest

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import NATIVE_ISAS, Hardware
from kvik.config.resolve import resolve
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.models.public import public_configs

MACHINE = Hardware("large", 64, 1 << 40, "RAM", frozenset(NATIVE_ISAS["avx2"]), native=True)


def planned(model: str, ranks: int) -> ResolvedConfig:
    spec = ModelSpec.from_config(public_configs()[model])
    options = {"max_model_len": 4096, "max_num_seqs": 8, "num_blocks": 1000, "threads": 8}
    config = EngineConfig(device="cpu", tensor_parallel_size=ranks, **options)
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
    ("model", "options", "message"),
    [
        ("llama-3.2-1b", {"kernels": "torch"}, "must be 1 with torch kernels"),
        ("llama-3.2-1b", {"tensor_parallel_size": 33}, "at most 32, its heads of queries"),
        ("llama-3.2-1b", {"threads": 1}, "at most 1, as there are threads"),
        ("llama-3.2-1b", {"engine_cache": "somewhere"}, "an engine folder"),
        ("llama-3.2-1b", {"tensor_parallel_size": 0}, "must be an integer in"),
    ],
)
def test_refusals(model, options, message) -> None:
    config = EngineConfig(**{"device": "cpu", "tensor_parallel_size": 2, "threads": 64, **options})
    with pytest.raises(ConfigError, match=message) as caught:
        spec = ModelSpec.from_config(public_configs()[model])
        resolve(config, spec, MACHINE, "")
    assert caught.value.field == "tensor_parallel_size"
