"""Shared by tests of benchmarks, which must not find calibrations of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import Command

from kvik.config.config import EngineConfig
from kvik.engine.loop import Engine
from kvik.launch import resolve_config
from kvik_bench.inprocess.inproc import loaded
from kvik_bench.inprocess.rounds import Watch


@pytest.fixture
def uncalibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that replaces the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the load of other processes."""
    monkeypatch.setattr(Watch, "others", lambda watch: 0.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Return the bundled model's engine."""
    config = EngineConfig(device="cpu", max_num_seqs=8, max_model_len=128, threads=1)
    with loaded(resolve_config(config)) as engine:
        yield engine


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
