"""Threads and memory of each of several engines of a server, planned before loading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import NATIVE_ISAS, Gpu, Hardware
from kvik.config.resolve import resolve
from kvik.errors import CapacityError, ConfigError, KvikError
from kvik.launch import launch
from kvik.models.model_spec import ModelSpec
from kvik.planner.families import public_configs
from kvik.spec.engine_folder import Built

MACHINE = Hardware("large", 16, 64 << 30, "RAM", frozenset(NATIVE_ISAS["avx2"]), native=True)


def planned(replicas: int, spec: ModelSpec | None = None, **options: object) -> ResolvedConfig:
    spec = spec or ModelSpec.from_config(public_configs()["llama-3.2-1b"])
    return resolve(
        EngineConfig(**{"device": "cpu", "data_parallel_size": replicas, **options}),
        spec,
        MACHINE,
        "",
    )


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_all_of_them_fit_together(replicas: int) -> None:
    alone, each = planned(1), planned(replicas)
    assert each.runner.replicas == replicas
    assert each.runner.threads == 16 // replicas
    assert replicas * each.memory.total <= replicas * each.memory.limit <= alone.memory.limit
    assert each.memory.weights == alone.memory.weights
    reasons = {decision.name: decision.reason for decision in each.decisions}
    assert f"{16 // replicas} of 16 threads" in reasons["data_parallel_size"]


def test_mapped_weights_count_once() -> None:
    spec = ModelSpec.from_config(public_configs()["llama-3.2-1b"])
    size = 8 << 30
    built = replace(spec, built=Built("torch", "plain-1", "bfloat16", "none", size))
    alone, each = planned(1, built), planned(4, built)
    left = alone.memory.limit - size
    assert each.memory.limit == size + left // 4
    assert size + 4 * (each.memory.total - size) <= alone.memory.limit
    reasons = {decision.name: decision.reason for decision in each.decisions}
    assert "mapped once" in reasons["data_parallel_size"]


def test_each_has_its_own_gpu() -> None:
    spec = ModelSpec.from_config(public_configs()["llama-3.2-1b"])
    gpus = [Gpu(i, "H100", 80 << 30, (76 - i) << 30, (9, 0)) for i in range(3)]
    machine = replace(MACHINE, gpus=tuple(gpus), triton=True)
    alone, each = (
        resolve(EngineConfig(device="cuda", data_parallel_size=count), spec, machine, "")
        for count in (1, 3)
    )
    assert each.memory.limit == alone.memory.limit * 74 // 76
    assert [each.runner.device_of(i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match="at most 3, as there are 3 GPUs"):
        resolve(EngineConfig(device="cuda", data_parallel_size=4), spec, machine, "")


@pytest.mark.parametrize(
    ("replicas", "options", "text"),
    [
        (17, {}, "at most 16, as there are 16 threads"),
        (4, {"threads": 3}, "at most 3, as there are 3 threads"),
        (8, {"tensor_parallel_size": 4}, "at most 4, as there are 16 threads, 4 for each"),
        (0, {}, "must be an integer in"),
        (65, {}, "must be an integer in"),
    ],
)
def test_too_many_are_refused(replicas: int, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^data_parallel_size: .*{text}"):
        planned(replicas, **options)


def test_engines_that_do_not_fit_together_are_refused() -> None:
    spec = ModelSpec.from_config(public_configs()["llama-3.1-8b"])
    planned(1, spec)
    with pytest.raises(CapacityError, match="shared out among 8 engines"):
        planned(8, spec)


def test_an_engine_in_this_process_is_single() -> None:
    with pytest.raises(KvikError, match="^data_parallel_size: .*kvik serve"):
        launch(EngineConfig(device="cpu", data_parallel_size=2, threads=2))
