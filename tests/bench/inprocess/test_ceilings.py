"""Predictions and bottlenecks, compared with measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.calibrations import calibration
from msgspec.structs import replace

from kvik import __version__
from kvik.config.config import EngineConfig
from kvik.config.hardware import detect
from kvik.engine.loop import Engine
from kvik.launch import resolve_config
from kvik.planner.calibration import calibration_path, load, save, this_machine
from kvik.planner.devices import Setting
from kvik.planner.roofline import decode, step_time
from kvik.planner.serving import Traffic
from kvik_bench.inprocess.ceilings import Ceilings
from kvik_bench.inprocess.inproc import BenchRequest, run_jobs
from kvik_bench.report.result import Figure


def by_name(figures: tuple[Figure, ...]) -> dict[str, float]:
    return {figure.name: figure.median for figure in figures}


@pytest.fixture
def calibrated(uncalibrated: Path) -> None:
    """As if this machine had been calibrated with one thread and the engine's kernels."""
    machine = this_machine(detect(), 1, __version__)
    save(replace(calibration(), machine=machine), calibration_path())


def test_predictions_on_a_calibrated_machine(calibrated: None, engine: Engine) -> None:
    ceilings = Ceilings.of(engine.resolved)
    assert ceilings.notes == ()
    found = by_name(ceilings.decode(4, 64))
    time = step_time(ceilings.model.shape, Setting(ceilings.device, "bf16", "bf16"), decode(4, 64))
    assert found["decode ceiling"] == pytest.approx(4 / time.floor)
    assert found["decode expected"] == pytest.approx(4 / time.expected)
    assert found["decode expected"] <= found["decode ceiling"]


def test_a_batch_is_its_prompts_and_then_its_tokens(calibrated: None, engine: Engine) -> None:
    ceilings = Ceilings.of(engine.resolved)
    first = by_name(ceilings.batch(4, Traffic(32, 1)))["output ceiling"]
    prefill = by_name(ceilings.prefill(32, 4))["prefill ceiling"]
    assert first == pytest.approx(prefill / 32)
    both = by_name(ceilings.batch(4, Traffic(32, 11)))["output ceiling"]
    token = by_name(ceilings.decode(4, Traffic(32, 11).halfway))["decode ceiling"]
    assert 44 / both == pytest.approx(4 / first + 10 * 4 / token)
    shared = by_name(ceilings.batch(4, Traffic(32, 11, shared=24)))["output ceiling"]
    assert shared > both


def test_achieved_shares_of_the_ceilings(calibrated: None, engine: Engine) -> None:
    made = load(calibration_path())
    peaks = {name: 1000 * rate for name, rate in made.peaks.items()}  # that no machine exceeds
    save(replace(made, peaks=peaks), calibration_path())
    ceilings = Ceilings.of(engine.resolved)
    run = run_jobs(engine, [BenchRequest([20 + i] * 16, 8) for i in range(4)])
    found = by_name(ceilings.achieved([run]))
    busy = run.after.time.busy - run.before.time.busy
    weights = ceilings.model.shape.read_bytes("bf16", 4)
    # 7 steps of decoding and one of prompts read the weights, and little else.
    assert found["memory read"] * 1e9 * busy == pytest.approx(8 * weights, rel=0.05)
    rate = ceilings.device.read_rate(weights)
    assert found["of bandwidth"] == pytest.approx(100 * found["memory read"] * 1e9 / rate, rel=0.05)
    assert found["least time"] > 0
    assert ceilings.remark("This", [run]).startswith("This is limited by ")


def test_a_machine_without_a_calibration(uncalibrated: Path, engine: Engine) -> None:
    ceilings = Ceilings.of(engine.resolved)
    assert "run `kvik calibrate`" in ceilings.notes[0]
    assert ceilings.decode(1, 8) == ceilings.steady(1, Traffic(8, 8)) == ()
    run = run_jobs(engine, [BenchRequest([20, 21], 2)])
    assert by_name(ceilings.achieved([run])).keys() == {"memory read", "arithmetic"}
    assert "is limited by" in ceilings.remark("This", [run])


def test_the_format_of_the_cache_matters(calibrated: None) -> None:
    def rate(kv_cache_dtype: str) -> float:
        config = EngineConfig(device="cpu", threads=1, kv_cache_dtype=kv_cache_dtype)
        ceilings = Ceilings.of(resolve_config(config))
        return by_name(ceilings.decode(64, 1000))["decode ceiling"]

    assert rate("fp8") > 1.2 * rate("auto")
