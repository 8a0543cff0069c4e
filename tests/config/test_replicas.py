"""Threads and memory of each of several engines of a server, planned before loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.planned import LARGE, decision, public_spec
from helpers.planned import planned as planned_on

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.hardware import Gpu
from kvik.errors import CapacityError, ConfigError, KvikError
from kvik.launch import launch
from kvik.models.model_spec import ModelSpec
from kvik.spec.engine_folder import Built

MACHINE = replace(LARGE, cores=16, memory_limit=64 << 30)


def planned(
    replicas: int, model: ModelSpec | str = "llama-3.2-1b", **options: object
) -> ResolvedConfig:
    return planned_on(model, MACHINE, device="cpu", data_parallel_size=replicas, **options)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_all_of_them_fit_together(replicas: int) -> None:
    alone, each = planned(1), planned(replicas)
    assert each.runner.replicas == replicas
    assert each.runner.threads == 16 // replicas
    assert replicas * each.memory.total <= replicas * each.memory.limit <= alone.memory.limit
    assert each.memory.weights == alone.memory.weights
    assert f"{16 // replicas} of 16 threads" in decision(each, "data_parallel_size")[1]


def test_mapped_weights_count_once() -> None:
    size = 8 << 30
    built = replace(
        public_spec("llama-3.2-1b"), built=Built("torch", "plain-1", "bfloat16", "none", size)
    )
    alone, each = planned(1, built), planned(4, built)
    left = alone.memory.limit - size
    assert each.memory.limit == size + left // 4
    assert size + 4 * (each.memory.total - size) <= alone.memory.limit
    assert "mapped once" in decision(each, "data_parallel_size")[1]


def test_each_has_its_own_gpu() -> None:
    gpus = [Gpu(i, "H100", 80 << 30, (76 - i) << 30, (9, 0)) for i in range(3)]
    asked = "llama-3.2-1b", replace(MACHINE, gpus=tuple(gpus), triton=True)
    alone, each = (planned_on(*asked, device="cuda", data_parallel_size=n) for n in (1, 3))
    assert each.memory.limit == alone.memory.limit * 74 // 76
    assert [each.runner.device_of(i) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(ConfigError, match="at most 3, as there are 3 GPUs"):
        planned_on(*asked, device="cuda", data_parallel_size=4)


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
    planned(1, "llama-3.1-8b")
    with pytest.raises(CapacityError, match="shared out among 8 engines"):
        planned(8, "llama-3.1-8b")


def test_an_engine_in_this_process_is_single() -> None:
    with pytest.raises(KvikError, match="^data_parallel_size: .*kvik serve"):
        launch(EngineConfig(device="cpu", data_parallel_size=2, threads=2))
