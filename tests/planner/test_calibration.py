"""A calibration is saved whole, read back unchanged, or refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace as with_fields
from pathlib import Path

import pytest
from helpers.calibrations import MACHINE, calibration
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from kvik.config.hardware import Hardware
from kvik.errors import ConfigError
from kvik.planner.calibration import (
    ExchangeCost,
    StateCosts,
    interpolate,
    load,
    save,
    stale,
    this_machine,
)

HARDWARE = Hardware(
    "Some CPU", 2, 1 << 34, "RAM available", frozenset(("avx2", "fma")), native=True
)


def test_saved_calibrations_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    for found in (replace(calibration(), launch=1.0), calibration()):  # the second replaces it
        save(found, path)
        assert load(path) == found
    assert [entry.name for entry in path.parent.iterdir()] == ["calibration.json"]


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^output: cannot write .*calibration\.json"):
        save(calibration(), tmp_path / "file" / "calibration.json")


def test_without_a_file_the_error_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is none yet: run `kvik calibrate`"):
        load(tmp_path / "calibration.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 99}, "schema 99"),
        ({"launch": -1.0}, "Expected `float` >= 0.0"),
        ({"activation": 0.0}, "Expected `float` >= 1.0"),
        ({"reads": []}, "nothing measured"),
        ({"linears": {"bf16": []}}, "nothing measured"),
        ({"hop": -1e-6}, "Expected `float` >= 0.0"),
        ({"exchanges": [[4, 1e-6], [2, 1e-6]]}, "Expected `object`"),
        (
            {"exchanges": [{"processes": n, "seconds": 1e-6} for n in (4, 2)]},
            "out of order",
        ),
        ({"linears": {"bf16": to_builtins(calibration().linears["bf16"])[::-1]}}, "out of order"),
        ({"peaks": {"bf16": "fast"}}, "Expected `float`"),
        (
            {"linears": {"bf16": [to_builtins(calibration().linears["bf16"][0]) | {"rows": 0}]}},
            "rows",
        ),
        ({"attention": [to_builtins(calibration().attention[0]) | {"head_dim": -1}]}, "head_dim"),
        ({"reads": [{"bytes": 1, "rate": 5e-324}]}, "rate"),  # divides to infinity
        ({"launch": 1e308}, "launch"),
        (b"\xff{", ""),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, change: dict[str, object] | bytes, why: str
) -> None:
    path = tmp_path / "calibration.json"
    save(calibration(), path)
    whole = json.loads(path.read_text())
    path.write_bytes(change if isinstance(change, bytes) else json.dumps(whole | change).encode())
    with pytest.raises(ConfigError, match=f"cannot be used .*{why}.*run `kvik calibrate`"):
        load(path)


def test_a_calibration_is_for_one_machine() -> None:
    machine = this_machine(HARDWARE, None, "9")
    assert machine == replace(MACHINE, kvik="9", date="")
    assert stale(calibration(), machine) is None


@pytest.mark.parametrize(
    ("hardware", "threads", "reason"),
    [
        (with_fields(HARDWARE, cpu_name="Another"), None, "another CPU (Some CPU, now Another)"),
        (HARDWARE, 4, "another number of threads (2, now 4)"),
        (with_fields(HARDWARE, native=False), None, "another kernels (avx2, now torch)"),
    ],
)
def test_another_machine_is_a_reason(hardware: Hardware, threads: int | None, reason: str) -> None:
    found = stale(calibration(), this_machine(hardware, threads, "9"))
    assert found == f"measured with {reason}: run `kvik calibrate` again"


def test_read_rates_by_working_set() -> None:
    found = calibration()
    assert found.bandwidth == 10e9
    assert found.read_rate(1) == found.read_rate(8 << 20) == 40e9
    assert found.read_rate(1 << 40) == 10e9
    assert found.read_rate(128 << 20) == pytest.approx(25e9)  # the geometric mean of 32 and 512


def test_the_engine_is_slower_with_cold_caches() -> None:
    found = calibration()
    assert found.host_seconds(0, 1) == pytest.approx(1.02e-4)
    assert found.host_seconds(1 << 30, 10) == pytest.approx(4.6e-4)
    assert replace(found, host=()).host_seconds(1, 1) == 0


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_interpolation_stays_between_and_keeps_order(a: float, b: float) -> None:
    points = [(1e3, 1.0), (1e6, 5.0), (1e9, 7.0)]
    low, high = interpolate(points, min(a, b)), interpolate(points, max(a, b))
    assert 1.0 <= low <= high <= 7.0
    assert interpolate(points, 1e6) == 5.0


def test_slower_cores_and_another_memory() -> None:
    found = calibration()
    reads = tuple(replace(read, rate=read.rate / 4) for read in found.reads)
    slow = found.at(reads, 0.5)
    assert slow.bandwidth == 2.5e9
    assert slow.peaks["bf16"] == found.peaks["bf16"] / 2
    before, after = found.linears["bf16"][1], slow.linears["bf16"][1]
    assert (after.call, after.cached, after.share) == (2e-6, 2 * before.cached, before.share)
    assert slow.attention[0].prefill == found.attention[0].prefill / 2
    assert slow.states["delta rule"] == StateCosts(2e9, 4e9)
    assert slow.attention[0].score == 2 * found.attention[0].score
    assert slow.host_seconds(0, 1) == pytest.approx(2 * found.host_seconds(0, 1))
    assert found.at(found.reads, 1.0) == found


def test_a_part_of_a_machine() -> None:
    """Work of the cores takes longer, work done once does not; readers share the memory."""
    whole = calibration()
    part = whole.divided(4, 2)
    assert part.bandwidth == whole.bandwidth / 2 and part.peaks["bf16"] == whole.peaks["bf16"] / 4
    own, all_of_it = part.linears["bf16"][0], whole.linears["bf16"][0]
    assert (own.call, own.cached) == (all_of_it.call, 4 * all_of_it.cached)
    assert part.attention[0].prefill == whole.attention[0].prefill / 4
    assert (part.launch, part.host) == (whole.launch, whole.host)
    assert whole.divided(1, 1) == whole


def test_exchanges_of_other_numbers_of_processes() -> None:
    assert calibration().exchange_seconds(2) == 0.0 == calibration().hop_seconds(3, 1e6)
    costs = (ExchangeCost(2, 1e-6), ExchangeCost(8, 3e-6))
    found = replace(calibration(), exchanges=costs, hop=1e-5, hop_rate=1e9)
    seconds = [found.exchange_seconds(count) for count in (2, 4, 8, 64)]
    assert seconds == pytest.approx([1e-6, 2e-6, 3e-6, 3e-6])
    assert found.hop_seconds(2, 1e6) == pytest.approx(2e-5 + 1e-3)
