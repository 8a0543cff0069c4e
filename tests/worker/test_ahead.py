"""Work before torch is imported: memory for the weights is prepared, and handed over once."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.optional_native import needs_native

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.errors import ModelError
from kvik.launch import resolve_config, start
from kvik.worker.ahead import LoadAhead


def resolved(**options: object) -> ResolvedConfig:
    return resolve_config(EngineConfig(**options))


def running() -> bool:
    return any(thread.name == "kvik-ahead" for thread in threading.enumerate())


@needs_native
def test_memory_is_handed_over_once_and_whole() -> None:
    config = resolved(kernels="native")
    with LoadAhead(config) as ahead:
        memory = ahead.memory()
        assert memory.dtype == np.uint8
        assert len(memory) >= config.memory.weights and not memory.any()
        assert ahead.memory() is None
        assert not running()


@needs_native
def test_the_thread_ends_with_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), LoadAhead(resolved(kernels="native")):
        raise KeyboardInterrupt
    assert not running()


@pytest.mark.parametrize(
    "options", [{"kernels": "torch"}, {"engine_cache": "somewhere"}], ids=["torch", "cache"]
)
def test_no_memory_is_prepared_for_mapped_weights(options: dict[str, object]) -> None:
    with LoadAhead(resolved(**options)) as ahead:
        assert ahead.memory() is None


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="nothing is asked for elsewhere")
@pytest.mark.parametrize(("rank", "files"), [(0, 1), (1, 0)])
def test_the_first_process_of_a_group_lets_the_files_be_read(
    rank: int, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all of them; each process prepares the memory of its share."""
    asked: list[int] = []
    monkeypatch.setattr("os.posix_fadvise", lambda fd, *_: asked.append(fd))
    config = resolved(tensor_parallel_size=2, threads=2)
    with LoadAhead(config, rank) as ahead:
        memory = ahead.memory()
        assert len(memory) == config.memory.weights // 2
    assert len(asked) == files


def test_files_that_are_missing_are_named_by_the_load(tmp_path: Path) -> None:
    config = resolved()
    for name in ("gone", "gone.gguf"):
        runner = replace(config.runner, model_path=str(tmp_path / name))
        with LoadAhead(replace(config, runner=runner)):
            pass
    (tmp_path / "model").mkdir()
    runner = replace(config.runner, model_path=str(tmp_path / "model"))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        start(replace(config, runner=runner))
    assert not running()
