"""The ladder of techniques on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.engine.loop import Engine
from kvik.errors import ConfigError
from kvik.launch import reschedule, resolve_config
from kvik_bench.inprocess.inproc import BenchRequest, run_jobs
from kvik_bench.inprocess.jobs import Requests, fixed
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.inprocess.techniques import (
    RUNGS,
    Ladder,
    LadderLoad,
    Loading,
    one_by_one,
    without_cache,
)

LOAD = LadderLoad(Requests(3, fixed(4, 5), prefix_tokens=16), alone=2)


def resolve(loading: Loading) -> ResolvedConfig:
    config = EngineConfig(device="cpu", threads=1, max_num_seqs=4, max_model_len=64)
    quantization, method = loading.quantization, loading.speculation
    return resolve_config(replace(config, quantization=quantization, spec_method=method))


def test_without_a_cache_everything_is_computed_again(engine: Engine) -> None:
    resolved = engine.resolved
    cache = replace(resolved.cache, enable_prefix_caching=False)
    engine = reschedule(engine, resolved.scheduler, cache)
    jobs = [BenchRequest([20, 21, 22], 4), BenchRequest([30], 2)]
    run = without_cache(engine, jobs)
    assert run.answers == run_jobs(engine, jobs).answers == one_by_one(engine, jobs).answers
    work = run.after.work.since(run.before.work)
    assert work.prefill_tokens == (3 + 4 + 5 + 6) + (1 + 2)
    assert work.decode_tokens == 0
    assert [list(record.tokens) for record in run.records] == [[1] * 4, [1] * 2]
    first, second = run.records
    assert first.finished <= second.sent


def test_the_ladder(quiet: None, uncalibrated: Path) -> None:
    result = Ladder(LOAD, resolve, 0).measure(Rounds(2, 0))
    assert [row.label for row in result.rows] == [rung.name for rung in RUNGS]
    rows = {row.label: {f.name: f for f in row.figures} for row in result.rows}
    for name in ("no KV cache", "KV cache", "continuous batching", "prefix cache", "speculation"):
        assert rows[name]["equal tokens"].values == (100.0, 100.0)
    assert rows["continuous batching"]["prefix hits"].values == (0.0, 0.0)
    assert rows["prefix cache"]["prefix hits"].values == (80.0, 80.0)  # 16 of 20 tokens
    # 21 tokens take two blocks of 16, and three requests share the first one if it is cached.
    block = 16 * 3072 / (1 << 20)
    peaks = {name: figures["KV peak"].values[0] / block for name, figures in rows.items()}
    assert peaks["KV cache"] == pytest.approx(2)
    assert peaks["continuous batching"] == pytest.approx(6)
    assert peaks["prefix cache"] == pytest.approx(4)
    if Path("/proc/self/clear_refs").exists():
        assert all(min(figures["process peak"].values) > 50 for figures in rows.values())
    for rung, before in zip(RUNGS[1:], RUNGS, strict=False):
        output, below = rows[rung.name]["output"].values, rows[before.name]["output"].values
        ratios = [a / b for a, b in zip(output, below, strict=True)]
        assert rows[rung.name]["over the one before"].values == pytest.approx(ratios)
    assert result.remarks[1].startswith("All rungs with plain weights gave the same tokens")


def test_a_technique_that_changes_tokens_is_named(uncalibrated: Path) -> None:
    wrong = replace(
        RUNGS[2],
        name="wrong",
        serve=lambda engine, jobs: run_jobs(engine, [replace(j, prompt=[7]) for j in jobs]),
    )
    result = Ladder(LOAD, resolve, 0, (RUNGS[1], wrong)).measure(Rounds(1, 0))
    assert "Not the same tokens as the rungs before: wrong." in result.remarks


def test_a_format_that_cannot_be_used_is_left_out(uncalibrated: Path) -> None:
    def only_plain(loading: Loading) -> ResolvedConfig:
        if loading.quantization != "none":
            raise ConfigError("quantization", "no such kernels")
        return resolve(loading)

    ladder = Ladder(LOAD, only_plain, 0, (RUNGS[2], RUNGS[5]))
    result = ladder.measure(Rounds(1, 0))
    assert [row.label for row in result.rows] == [RUNGS[2].name]
    assert "Left out: int8 (quantization: no such kernels)." in result.remarks
