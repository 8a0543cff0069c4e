"""Benchmarks must not find what somebody measured on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvik.config.config import EngineConfig
from kvik.engine.loop import Engine
from kvik.launch import resolve_config
from kvik_bench.inprocess.inproc import loaded
from kvik_bench.inprocess.rounds import Watch


@pytest.fixture
def uncalibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is the user's cache; it is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on this machine is not told of."""
    monkeypatch.setattr(Watch, "others", lambda watch: 0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The bundled model."""
    config = EngineConfig(device="cpu", max_num_seqs=8, max_model_len=128, threads=1)
    with loaded(resolve_config(config)) as engine:
        yield engine
