"""A prompt's attention with its score matrix and in tiles: times and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.launch import resolve_config
from kvik_bench.inprocess.attention import AttentionBench
from kvik_bench.inprocess.rounds import Rounds

HEADS = 8  # of the bundled model


def resolve(**options: str) -> ResolvedConfig:
    return resolve_config(EngineConfig(device="cpu", threads=1, **options))


def test_tiles_avoid_the_matrix(quiet: None) -> None:
    result = AttentionBench.of(resolve(), (48, 1024)).measure(Rounds(2, 0))
    assert [row.label for row in result.rows] == ["48 tokens", "1024 tokens"]
    for row, length in zip(result.rows, (48, 1024), strict=True):
        found = {figure.name: figure for figure in row.figures}
        matrix, tiles = found["matrix"].values, found["tiles"].values
        assert len(matrix) == len(tiles) == 2
        ratios = tuple(a / b for a, b in zip(matrix, tiles, strict=True))
        assert found["speed-up"].values == pytest.approx(ratios)
        assert found["one matrix"].median == HEADS * length**2 * 4 / (1 << 20)
        assert found["difference"].median < 0.05
    if Path("/proc/self/clear_refs").exists():
        held = found["one matrix"].median
        assert 2 * held < min(found["matrix memory"].values) < 5 * held  # at 1024 tokens
        assert max(found["tiles memory"].values) < held / 4


def test_the_backend_of_the_engine_is_timed() -> None:
    result = AttentionBench.of(resolve(attention_backend="sdpa"), (16,)).measure(Rounds(1, 0))
    assert "sdpa" in result.facts["tiles"]
    assert result.rows[0].label == "16 tokens"
