"""Devices from data sheets, files and this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.calibrations import MACHINE, calibration, measured_device
from msgspec.structs import replace

from kvik import __version__
from kvik.config.hardware import NATIVE_ISAS, Gpu, Hardware
from kvik.errors import ConfigError
from kvik.planner.calibration import save
from kvik.planner.devices import (
    ARITHMETICS,
    DEVICES,
    assumed_cpu,
    find_device,
    read_device,
    this_device,
)

HARDWARE = Hardware(
    "Some CPU", 2, 1 << 34, "RAM available", frozenset(("avx2", "fma")), native=True
)
FILE = {"kind": "cuda", "memory": 1 << 34, "bandwidth": 5e11, "rates": {"bf16": 1e14}}


def test_every_data_sheet_is_complete() -> None:
    for name in DEVICES:
        device = find_device(name.upper())
        assert device.name == name and device.rated and not device.measured
        assert device.source and device.memory > 1 << 33
        assert device.rates.keys() <= set(ARITHMETICS)
        assert all(device.rate(arithmetic) > 0 for arithmetic in ARITHMETICS)
        # Two or four times the rate of fp16; otherwise a figure is for sparse matrices.
        ratio = device.rate("int8") / device.rate("fp16")
        assert ratio in (pytest.approx(2, rel=0.02), pytest.approx(4, rel=0.02))


def test_known_figures() -> None:
    h100 = find_device("h100")
    assert (h100.bandwidth, h100.rates["bf16"], h100.link) == (3.35e12, 989.4e12, 450e9)
    assert h100.read_rate(1) == h100.read_rate(1e12) == 3.35e12


def test_a_missing_unit_is_replaced() -> None:
    t4, a100 = find_device("t4"), find_device("a100-80g")
    assert t4.rate("bf16") == t4.rates["fp16"]
    assert a100.rate("fp8") == a100.rates["bf16"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"hardware: must be one of b200, h200, .*this.*'h1000'"):
        find_device("h1000")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    text = (
        'kind = "cuda"\nmemory = 17179869184\nbandwidth = 5e11\nprice = 1.5\n[rates]\nbf16 = 1e14'
    )
    path.write_text(text if suffix == "toml" else json.dumps({**FILE, "price": 1.5}))
    device = find_device(str(path))
    assert (device.name, device.kind, device.memory) == ("mine", "cuda", 1 << 34)
    assert (device.bandwidth, device.rates, device.price) == (5e11, {"bf16": 1e14}, 1.5)
    assert device.rated and device.source == str(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kind": "tpu"}, r"hardware mine\.json kind: must be cpu or cuda, not 'tpu'"),
        ({"memory": 0}, r"hardware mine\.json memory: must be a number above 0"),
        ({"bandwidth": -1.0}, r"hardware mine\.json bandwidth: must be a number above 0"),
        ({"bandwidth": "fast"}, r"hardware mine\.json: Expected `float`"),
        ({"rates": {"bf17": 1.0}}, r"hardware mine\.json rates: must be of fp32, .* not 'bf17'"),
        ({"rates": {"int8": 1.0}}, r"hardware mine\.json rates: must have fp32, bf16 or fp16"),
        ({"price": -1.0}, r"hardware mine\.json price: must be a number of at least 0"),
        ({"speed": 1}, r"hardware mine\.json speed: is not a field of a device \(known: kind, "),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path: Path, change: dict[str, object], error: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**FILE, **change}))
    with pytest.raises(ConfigError, match=f"^{error}"):
        read_device(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [("{", "is not valid JSON"), ("[1]", "must hold one object"), ("{}", "missing required field")],
)
def test_no_device_in_the_file(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_device(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_device(tmp_path / "none.toml")


def test_this_machine_after_calibration(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(calibration(), path)
    device = this_device(HARDWARE, path)
    assert device.measured and device.rated and device.kind == "cpu"
    assert (device.bandwidth, device.memory) == (10e9, 1 << 34)
    assert device.rates["int8"] == 200e9
    assert device.read_rate(1) == 40e9
    assert "2026-01-02" in device.source
    assert device.rates == measured_device().rates


def test_a_disturbed_measurement_is_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save(replace(calibration(), disturbed=True), path)
    assert "disturbed the calibration" in this_device(HARDWARE, path).doubt
    assert "disturbed" not in measured_device().source


def test_a_measurement_by_another_version_is_reported_as_such(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for version, doubted in ((__version__, False), ("0.0.9", True)):
        save(replace(calibration(), machine=replace(MACHINE, kvik=version)), path)
        device = this_device(HARDWARE, path)
        assert device.measured and ("kvik 0.0.9" in device.doubt) == doubted


def test_this_machine_before_calibration(tmp_path: Path) -> None:
    device = this_device(HARDWARE, tmp_path / "calibration.json")
    assert (device.rated, device.measured, device.memory) == (False, False, 1 << 34)
    for ask in (lambda: device.rate("bf16"), lambda: device.read_rate(1)):
        with pytest.raises(ConfigError, match="hardware: this: .*run `kvik calibrate`"):
            ask()


def machine(cores: int, isa: frozenset[str]) -> Hardware:
    return Hardware("Some CPU", cores, 1 << 34, "RAM available", isa)


@pytest.mark.parametrize("isa", [*NATIVE_ISAS, "portable"])
def test_a_cpu_before_it_was_measured_by_data_sheet(isa: str) -> None:
    flags = NATIVE_ISAS.get(isa, frozenset[str]())
    two, four = (assumed_cpu(machine(cores, flags), "run `kvik calibrate`") for cores in (2, 4))
    assert two.rated and not two.measured and "kvik calibrate" in two.doubt
    for arithmetic in ("fp32", "bf16", "int8"):
        assert four.rate(arithmetic) == 2 * two.rate(arithmetic)
    assert two.rate("fp32") <= two.rate("bf16") <= two.rate("int8")
    assert four.read_rate(1) == 2 * two.read_rate(1)
    many = assumed_cpu(machine(500, flags), "")
    assert many.read_rate(1) < 100 * two.read_rate(1)  # cores share the memory


def test_a_stale_calibration_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    then = calibration()
    save(replace(then, machine=replace(then.machine, threads=64)), path)
    device = this_device(HARDWARE, path)
    assert not device.rated
    assert device.unknown.endswith(
        "measured with another number of threads (64, now 2): run `kvik calibrate` again"
    )


def test_the_first_gpu_is_this_machine(tmp_path: Path) -> None:
    def with_gpu(name: str) -> Hardware:
        gpu = Gpu(0, name, 80 << 30, 79 << 30, (9, 0))
        return Hardware("Some CPU", 2, 1 << 34, "RAM available", gpus=(gpu,))

    known = this_device(with_gpu("NVIDIA H100 80GB HBM3"), tmp_path / "none")
    assert (known.name, known.bandwidth, known.memory) == ("this", 3.35e12, 80 << 30)
    other = this_device(with_gpu("Some GPU"), tmp_path / "none")
    assert (other.kind, other.rated) == ("cuda", False)
    with pytest.raises(ConfigError, match="no figures of Some GPU are known"):
        other.rate("bf16")
