"""Three methods of batching under one load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvik.config.config import EngineConfig
from kvik.launch import resolve_config
from kvik_bench.inprocess.batching import BATCHINGS, measure_batching
from kvik_bench.inprocess.inproc import loaded
from kvik_bench.inprocess.jobs import Requests
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.report.result import Result


@dataclass(frozen=True)
class Uneven:
    """Every other answer is long."""

    def of(self, index: int, turn: int) -> tuple[int, int]:
        return 4, 40 if index % 2 else 2


def measured(count: int, rate: float | None) -> Result:
    config = EngineConfig(
        device="cpu", threads=1, batch_size=2, max_num_seqs=2, max_model_len=64, max_wait=0.01
    )
    resolved = resolve_config(config)
    load = Requests(count, Uneven())
    with loaded(resolved) as engine:
        return measure_batching(engine, load, rate, Rounds(1, 0))


def test_a_flood(uncalibrated: Path) -> None:
    """All arrive at once: static batches wait for their longest answer, and need more steps."""
    result = measured(6, 1e6)
    rows = {row.label: {f.name: f.median for f in row.figures} for row in result.rows}
    assert list(rows) == [batching.name for batching in BATCHINGS]
    for row in rows.values():
        assert row["output"] == pytest.approx(126 / row["wall time"])
        assert row["requests"] == pytest.approx(6 / row["wall time"])
    assert rows["continuous"]["output / static"] == pytest.approx(
        rows["continuous"]["output"] / rows["static"]["output"]
    )
    assert min(rows["static"]["steps"], rows["dynamic"]["steps"]) >= 120
    assert rows["continuous"]["steps"] < 100
    series = result.rows[0].series
    assert len(series["TTFT, ms"]) == len(series["E2E, ms"]) == len(series["due, s"]) == 6


def test_the_rate_is_measured_when_none_is_given(uncalibrated: Path) -> None:
    result = measured(3, None)
    assert "what continuous batching served" in result.facts["arrivals"]
    assert result.facts["batch size"].startswith("2 requests")
