"""Devices and their limits: data sheets of known devices, device files, and this machine as
measured.

Figures are for dense matrices (data sheets often give those for sparse ones, which are twice as
high), with fp32 accumulation if a chip is slower with it. Memory is what the driver reports.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec

from kvik import __version__
from kvik.config.config import EngineConfig
from kvik.config.hardware import Gpu, Hardware
from kvik.config.speculative import NO_SOURCE, DraftSource
from kvik.config.units import MIB
from kvik.errors import ConfigError
from kvik.planner.calibration import Calibration, Machine, load, stale, this_machine

ARITHMETICS = ("fp32", "bf16", "fp16", "int8", "fp8")
# Replacements for an arithmetic that a device lacks, best first.
STAND_INS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
}
NOT_CALIBRATED = "its speed is not known yet: run `kvik calibrate`"


@dataclass(frozen=True, slots=True)
class Device:
    """A processor with its memory."""

    name: str
    kind: str  # "cpu" or "cuda" (any GPU)
    memory: int  # bytes
    # Bytes per second of memory; None: unknown, in which case `rates` is empty.
    bandwidth: float | None
    rates: Mapping[str, float]  # dense operations per second by arithmetic, one of `ARITHMETICS`
    link: float = 0.0  # bytes per second to other devices in one direction; 0: no link
    price: float | None = None  # USD per hour, as given by the user; None: unknown
    source: str = ""  # source of the figures
    calibration: Calibration | None = None  # measurements of this machine; None for data sheets
    unknown: str = ""  # why the speed is unknown, as the end of "this machine: ..."
    assumed: str = ""  # why the figures are not for exactly this processor; "": they are

    @property
    def rated(self) -> bool:
        """Whether the speed is known; if not, rooflines raise ConfigError."""
        return self.bandwidth is not None

    @property
    def measured(self) -> bool:
        """Whether the speed was measured rather than taken from a data sheet."""
        return self.calibration is not None

    @property
    def doubt(self) -> str:
        """Why the figures may be wrong; "" if there is no reason to doubt them."""
        if self.calibration is None:
            return self.assumed
        if self.calibration.disturbed:
            return (
                "other processes disturbed the calibration of this machine, so speeds may be "
                "wrong: run `kvik calibrate` while no other program runs"
            )
        if (version := self.calibration.machine.kvik) != __version__:
            return (
                f"kvik {version} calibrated this machine, and kvik {__version__} may have other "
                "speeds: run `kvik calibrate` again"
            )
        return ""

    def unit(self, arithmetic: str) -> str:
        """Return the arithmetic that the device uses: the requested one, or its replacement. Raises
        ConfigError if the device's speed is unknown."""
        for name in (arithmetic, *STAND_INS.get(arithmetic, ())):
            if name in self.rates:
                return name
        if self.rates:
            raise ConfigError("hardware", f"{self.name}: its rate of {arithmetic} is not known")
        raise ConfigError("hardware", f"{self.name}: {self.unknown or NOT_CALIBRATED}")

    def rate(self, arithmetic: str) -> float:
        """Return the operations per second of `unit`. Raises ConfigError as `unit`."""
        return self.rates[self.unit(arithmetic)]

    def divided(self, cores: float, readers: int) -> Device:
        """Return the part of a machine with 1 / `cores` of its cores, while `readers` such parts
        read memory."""
        if self.bandwidth is None or (cores == 1 and readers == 1):
            return self
        measured = self.calibration
        return replace(
            self,
            bandwidth=self.bandwidth / readers,
            rates={name: rate / cores for name, rate in self.rates.items()},
            calibration=None if measured is None else measured.divided(cores, readers),
        )

    def read_rate(self, working_set: float) -> float:
        """Return the bytes read per second if each step reads the same `working_set` bytes. For a
        measured machine, caches are included. Raises ConfigError if the device's speed is unknown.
        """
        if self.bandwidth is None:
            raise ConfigError("hardware", f"{self.name}: {self.unknown or NOT_CALIBRATED}")
        if self.calibration is None:
            return self.bandwidth
        return self.calibration.read_rate(working_set)


def _gpu(
    name: str,
    mebibytes: int,
    terabytes: float,
    teras: Mapping[str, float],
    gigabytes: float,
    source: str,
) -> Device:
    """Return a GPU that reads `terabytes` per second from memory, does `teras` of 10^12 operations
    per second, and sends `gigabytes` per second to other devices in one direction."""
    rates = {arithmetic: rate * 1e12 for arithmetic, rate in teras.items()}
    memory = mebibytes * MIB
    return Device(name, "cuda", memory, terabytes * 1e12, rates, gigabytes * 1e9, source=source)


_HOPPER = {"fp32": 67.0, "bf16": 989.4, "fp16": 989.4, "int8": 1978.9, "fp8": 1978.9}
_A100 = {"fp32": 19.5, "bf16": 312.0, "fp16": 312.0, "int8": 624.0}

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu(
            "b200", 183_359, 7.7,
            {"fp32": 75, "bf16": 2250, "fp16": 2250, "int8": 4500, "fp8": 4500},
            900, "NVIDIA HGX B200 data sheet, an eighth of the board; sparse figures halved",
        ),
        _gpu("h200", 143_771, 4.8, _HOPPER, 450, "NVIDIA H200 data sheet (SXM)"),
        _gpu("h100", 81_559, 3.35, _HOPPER, 450, "NVIDIA H100 data sheet (SXM5)"),
        _gpu(
            "h20", 97_871, 4.0, {"fp32": 44, "bf16": 148, "fp16": 148, "int8": 296, "fp8": 296},
            450, "NVIDIA H20 data sheet (SXM)",
        ),
        _gpu(
            "h100-pcie", 81_559, 2.0,
            {"fp32": 51.2, "bf16": 756, "fp16": 756, "int8": 1513, "fp8": 1513},
            64, "NVIDIA H100 data sheet (PCIe; link: PCIe 5.0 x16, no bridge)",
        ),
        _gpu("a100-80g", 81_920, 2.039, _A100, 300, "NVIDIA A100 data sheet (SXM4, 80 GB)"),
        _gpu("a100-40g", 40_960, 1.555, _A100, 300, "NVIDIA A100 data sheet (SXM4, 40 GB)"),
        _gpu(
            "l40s", 46_068, 0.864,
            {"fp32": 91.6, "bf16": 362, "fp16": 362, "int8": 733, "fp8": 733},
            32, "NVIDIA L40S data sheet (link: PCIe 4.0 x16)",
        ),
        _gpu(
            "l4", 23_034, 0.3,
            {"fp32": 30.3, "bf16": 121, "fp16": 121, "int8": 242.5, "fp8": 242.5},
            32, "NVIDIA L4 data sheet, sparse figures halved (link: PCIe 4.0 x16)",
        ),
        _gpu(
            "a10g", 23_028, 0.6, {"fp32": 35, "bf16": 70, "fp16": 70, "int8": 140},
            32, "NVIDIA A10G data sheet (link: PCIe 4.0 x16)",
        ),
        _gpu(
            "t4", 15_360, 0.32, {"fp32": 8.1, "fp16": 65, "int8": 130},
            16, "NVIDIA T4 product brief (link: PCIe 3.0 x16)",
        ),
        _gpu(
            "rtx5090", 32_607, 1.792,
            {"fp32": 104.8, "bf16": 209.5, "fp16": 209.5, "int8": 838, "fp8": 419},
            64, "NVIDIA RTX Blackwell architecture paper (link: PCIe 5.0 x16)",
        ),
        _gpu(
            "rtx4090", 24_564, 1.008,
            {"fp32": 82.6, "bf16": 165.2, "fp16": 165.2, "int8": 660.6, "fp8": 330.3},
            32, "NVIDIA Ada architecture paper (link: PCIe 4.0 x16)",
        ),
        _gpu(
            "rtx3090", 24_576, 0.936, {"fp32": 35.6, "bf16": 71, "fp16": 71, "int8": 284},
            32, "NVIDIA GA102 architecture paper (link: PCIe 4.0 x16)",
        ),
        _gpu(
            "mi300x", 196_592, 5.3,
            {"fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4, "int8": 2614.9, "fp8": 2614.9},
            448, "AMD Instinct MI300X data sheet (link: all seven)",
        ),
    )
}  # fmt: skip

# Names that drivers report.
_DRIVER_NAMES: Mapping[str, str] = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H20": "h20",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10G": "a10g",
    "Tesla T4": "t4",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 3090": "rtx3090",
}


def find_device(name: str) -> Device:
    """Return a known device by name, or the device described in a .toml or .json file.

    Raises:
        ConfigError: no such device or file, or a file that cannot be used.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if name.endswith((".toml", ".json")):
        return read_device(Path(name))
    names = ", ".join((*DEVICES, "this"))
    raise ConfigError("hardware", f"must be one of {names}, or a .toml or .json file, not {name!r}")


def this_device(hardware: Hardware, calibration_file: Path) -> Device:
    """Return the device that kvik would use on this machine: the first GPU, else the CPU."""
    if hardware.gpus:
        return _this_gpu(hardware.gpus[0])
    machine = this_machine(hardware, None, "")
    memory = hardware.memory_limit
    try:
        return cpu_device(load(calibration_file), machine, memory)
    except ConfigError as error:
        return Device("this", "cpu", memory, None, {}, unknown=str(error))


def cpu_device(calibration: Calibration, machine: Machine, memory: int) -> Device:
    """Return a measured CPU; raise ConfigError if it was measured on another machine."""
    reason = stale(calibration, machine)
    if reason:
        raise ConfigError("calibration", reason)
    source = f"measured by kvik calibrate on {machine.cpu}, {machine.threads} threads"
    return Device(
        "this",
        "cpu",
        memory,
        calibration.bandwidth,
        calibration.peaks,
        source=f"{source}, {calibration.machine.date}",
        calibration=calibration,
    )


# Dense operations per core and cycle, from the manuals of the instruction sets: two full-width
# multiply-adds, or the tiles of AMX. A type without its own arithmetic is widened to fp32.
_CYCLE: Mapping[str, Mapping[str, int]] = {
    "amx": {"fp32": 64, "bf16": 2048, "int8": 4096},
    "avx512_bf16": {"fp32": 64, "bf16": 128, "int8": 256},
    "avx512": {"fp32": 64, "bf16": 64, "int8": 128},
    "avx2_vnni": {"fp32": 32, "bf16": 32, "int8": 128},
    "avx2": {"fp32": 32, "bf16": 32, "int8": 64},
    "neon_i8mm": {"fp32": 16, "bf16": 32, "int8": 64},
    "neon_dot": {"fp32": 16, "bf16": 16, "int8": 32},
    "neon": {"fp32": 16, "bf16": 16, "int8": 16},
    "portable": {"fp32": 16, "bf16": 16, "int8": 32},
}
# What most servers and desktops reach at least: cycles per second under load, and bytes per second
# read by one core and by all cores together.
_CLOCK, _CORE_READS, _ALL_READ = 2.5e9, 15e9, 200e9


def assumed_cpu(hardware: Hardware, reason: str) -> Device:
    """Return this CPU with figures estimated only from its cores and instruction set, for advice
    before a calibration.

    Args:
        reason: why it has not been measured.
    """
    isa, cores = hardware.native_isa, hardware.cores
    bandwidth = min(cores * _CORE_READS, _ALL_READ)
    return Device(
        "this",
        "cpu",
        hardware.memory_limit,
        bandwidth,
        {name: cores * _CLOCK * done for name, done in _CYCLE[isa].items()},
        source=f"data sheet of {cores} {isa} cores: {_CLOCK / 1e9:g} GHz, "
        f"{bandwidth / 1e9:.0f} GB/s",
        assumed=reason,
    )


def _this_gpu(gpu: Gpu) -> Device:
    device = DEVICES.get(_DRIVER_NAMES.get(gpu.name, ""))
    if device is None:
        reason = f"no figures of {gpu.name} are known; describe it in a .toml file"
        return Device("this", "cuda", gpu.total_memory, None, {}, unknown=reason)
    rates, source = device.rates, device.source
    return Device(
        "this", "cuda", gpu.total_memory, device.bandwidth, rates, device.link, source=source
    )


@dataclass(frozen=True, slots=True)
class _File:
    """The fields of a device file: those of `Device` that are not measured."""

    kind: str
    memory: int
    bandwidth: float
    name: str
    source: str
    rates: Mapping[str, float] = field(default_factory=dict)
    link: float = 0.0
    price: float | None = None


def read_device(path: Path) -> Device:
    """Return a device described in a file: `kind`, `memory` (bytes), `bandwidth`, `rates`, and
    optionally `name`, `link`, `price` (USD an hour) and `source`.

    Raises:
        ConfigError: the file is missing, no TOML or JSON, or a field is missing, unknown or wrong.
    """
    where = f"hardware {path.name}"
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(where, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise ConfigError(where, f"is not valid {path.suffix[1:].upper()}") from None
    if not isinstance(table, dict):
        raise ConfigError(where, "must hold one object")
    unknown = table.keys() - _File.__dataclass_fields__.keys()
    if unknown:
        names = ", ".join(_File.__dataclass_fields__)
        raise ConfigError(f"{where} {min(unknown)}", f"is not a field of a device (known: {names})")
    try:
        described = msgspec.convert({"name": path.stem, "source": str(path), **table}, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(where, str(error)) from None
    if described.kind not in ("cpu", "cuda"):
        raise ConfigError(f"{where} kind", f"must be cpu or cuda, not {described.kind[:40]!r}")
    for arithmetic in described.rates:
        if arithmetic not in ARITHMETICS:
            allowed = ", ".join(ARITHMETICS)
            raise ConfigError(f"{where} rates", f"must be of {allowed}, not {arithmetic[:40]!r}")
    if not described.rates.keys() & {"fp32", "bf16", "fp16"}:
        raise ConfigError(f"{where} rates", "must have fp32, bf16 or fp16")
    above_zero = {"memory": described.memory, "bandwidth": described.bandwidth, **described.rates}
    for key, value in above_zero.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{where} {key}", f"must be a number above 0, not {value}")
    for key, value in {"link": described.link, "price": described.price or 0.0}.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{where} {key}", f"must be a number of at least 0, not {value}")
    return Device(**asdict(described))


UTILIZATION = EngineConfig().memory_utilization


@dataclass(frozen=True, slots=True)
class Setting:
    """What a plan is for: a model's formats, its devices, and their work."""

    device: Device
    weight_format: str
    kv_format: str
    context: int = 1  # tokens per request
    batch: int = 1  # requests that run together
    tp: int = 1  # CPU processes or GPUs that share each layer
    pp: int = 1  # stages of whole layers
    expert_parallel: bool = False  # see `EngineConfig`
    utilization: float = UTILIZATION  # fraction of the device's memory that the engine may use
    hardware: Hardware | None = None  # facts about a real machine; None: derived from `device`
    # Model or heads that draft, whole on each device; if it is `OWN_HEAD`, the shape of the model
    # has its head (`with_own_head`).
    source: DraftSource = NO_SOURCE
    kv_asked: bool = False  # the KV format was chosen; else it follows the dtype of computation

    @property
    def memory_limit(self) -> int:
        """Bytes of a device that the engine may use."""
        return int(self.device.memory * self.utilization)

    @property
    def exact(self) -> bool:
        """Whether the model is divided by the exact cut among processes of one CPU; otherwise by
        the fast cut among GPUs (see `planner/parallel.py`)."""
        return self.device.kind == "cpu"

    @property
    def parts(self) -> int:
        """Number of processes or GPUs that share the model."""
        return self.tp * self.pp

    @property
    def devices(self) -> int:
        """Number of machines or GPUs that hold the model."""
        return 1 if self.exact else self.parts

    @property
    def group(self) -> int:
        """Requests in one step: to keep a pipeline full, there is one group per stage."""
        return -(-self.batch // self.pp)

    @property
    def busy(self) -> int:
        """Number of stages that compute at the same time."""
        return min(self.pp, self.batch)
