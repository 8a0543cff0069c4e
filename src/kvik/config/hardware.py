"""Hardware that this process may use: cores, memory, instruction sets, GPUs.

Read from the system's own files and from the driver's own tool, without torch.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from math import ceil, inf
from pathlib import Path

from kvik.config.env import cache_folder, visible_gpus
from kvik.config.units import MIB
from kvik.errors import ConfigError
from kvik.files import write_whole

# What each set of native kernels needs, best first (csrc/isa.cpp), named as in /proc/cpuinfo.
_AVX512 = frozenset(("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"))
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512vbmi", "avx512_bf16"}
NATIVE_ISAS: Mapping[str, frozenset[str]] = {
    "amx": _AVX512_BF16 | {"amx_tile", "amx_int8", "amx_bf16"},
    "avx512_bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2_vnni": frozenset(("avx2", "fma", "avx_vnni")),
    "avx2": frozenset(("avx2", "fma")),
    "neon_i8mm": frozenset(("asimd", "asimddp", "i8mm", "bf16")),
    "neon_dot": frozenset(("asimd", "asimddp")),
    "neon": frozenset(("asimd",)),
}
ISA_FLAGS = frozenset[str]().union(*NATIVE_ISAS.values())
# Their names in Linux's /proc/cpuinfo for those in macOS's `sysctl hw.optional.arm`.
_APPLE_FLAGS = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}

UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
FALLBACK_MEMORY = 4 << 30  # if the system does not report its memory
RESERVED_SPACE = 1 << 30  # that torch's libraries and threads reserve; 0.9 GiB were measured
RESERVED_DATA = 128 << 20  # stacks of threads


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, as the driver describes it."""

    index: int
    name: str
    total_memory: int  # bytes
    free_memory: int  # bytes
    capability: tuple[int, int]
    # (head_dim, tokens): length from which torch's attention was measured to compute fresh prompts
    # faster than Triton's.
    torch_prompts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine as this process sees it."""

    cpu_name: str  # model of the CPU
    cores: int  # physical cores this process may use, within affinity and cgroup quota
    # Bytes this process may still allocate, including page cache that can be dropped.
    memory_limit: int
    memory_reason: str  # what sets that limit
    isa: frozenset[str] = frozenset()  # instruction sets of the CPU, a subset of `ISA_FLAGS`
    gpus: tuple[Gpu, ...] = ()  # devices that may be used
    # The installed torch is built for CUDA, which takes memory even without a GPU.
    cuda_build: bool = False
    native: bool = False  # kvik was installed with its native kernels
    triton: bool = False  # Triton is installed, which compiles kernels for GPUs
    # CPU time in cores that a cgroup grants; None if it does not limit the cores.
    cpu_quota: float | None = None

    @property
    def threads(self) -> int:
        """Maximum number of threads: with a quota of 1.5 cores, steps alternate between 2 and 1."""
        return self.cores if self.cpu_quota is None else max(1, ceil(self.cpu_quota))

    @property
    def fast_bf16(self) -> bool:
        """Whether the CPU multiplies bfloat16 matrices in hardware."""
        return bool(self.isa & {"avx512_bf16", "amx_bf16", "bf16"})

    @property
    def native_isa(self) -> str:
        """The best instruction set of this CPU with native kernels. Another one is used if the
        compiler did not support it, the system does not permit AMX, or its self-check fails."""
        for name, needed in NATIVE_ISAS.items():
            if needed <= self.isa:
                return name
        return "portable"


def detect(gpus: tuple[Gpu, ...] = (), root: Path = Path("/")) -> Hardware:
    """Detect the hardware of this machine; tests pass another `root`."""
    cpuinfo = _read(root / "proc/cpuinfo")
    limit, reason = memory_limit(root)
    physical = physical_cores(root, _affinity())
    quota, _ = cpu_quota(root)
    return Hardware(
        cpu_name=_field(cpuinfo, "model name") or platform.processor() or platform.machine(),
        cores=max(1, int(min(physical, quota))),
        cpu_quota=quota if quota < physical else None,
        memory_limit=limit,
        memory_reason=reason,
        isa=_instruction_sets(cpuinfo),
        gpus=gpus,
        cuda_build=is_cuda_build(),
        native=find_spec("kvik.kernels.cpu._native") is not None,
        triton=find_spec("triton") is not None,
    )


def _instruction_sets(cpuinfo: str) -> frozenset[str]:
    if not cpuinfo and platform.machine() == "arm64":  # macOS, which has no such file
        command = ["sysctl", "hw.optional.arm"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            features = answer.stdout
        except (OSError, subprocess.SubprocessError):
            features = ""
        named = (
            flag
            for name, flag in _APPLE_FLAGS.items()
            if _field(features, f"hw.optional.arm.{name}") == "1"
        )
        return frozenset(("asimd", *named))
    return ISA_FLAGS & set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())


def is_cuda_build() -> bool:
    """Return whether the installed torch could use a GPU, judging by its version."""
    try:
        return sys.platform == "linux" and not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def physical_cores(root: Path, allowed: frozenset[int]) -> int:
    """Return the number of physical cores among the `allowed` logical ones.

    Two hyper-threads of one core share its vector units, so matrix products gain nothing from both.
    """
    cores = set()
    for entry in _read(root / "proc/cpuinfo").split("\n\n"):
        number = _field(entry, "processor")
        if number.isdigit() and int(number) in allowed:
            cores.add((_field(entry, "physical id"), _field(entry, "core id") or number))
    return max(1, len(cores) or len(allowed))


def memory_limit(root: Path) -> tuple[int, str]:
    """Return the bytes that this process may still allocate, and the reason: free RAM, a cgroup's
    limit, or a limit of the process."""
    limits = [_available_ram(root), *_cgroup_memory_left(root), *_process_limits_left(root)]
    limit, reason = min(limits, key=lambda pair: pair[0])
    return max(0, limit), reason


def memory_left(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still allocate within the system and its cgroups."""
    return max(
        0, min(num_bytes for num_bytes, _ in (_available_ram(root), *_cgroup_memory_left(root)))
    )


def memory_stalls(root: Path = Path("/")) -> float:
    """Return the seconds that processes of this cgroup, or else of the system, have waited for
    memory; 0.0 if the system does not report it (pressure stall information)."""
    folders = [folder for version, folder, _ in _cgroups(root, "memory") if version == 2][:1]
    for file in (
        *(folder / "memory.pressure" for folder in folders),
        root / "proc/pressure/memory",
    ):
        some, _, _ = _read(file).partition("\n")
        total = some.rpartition("total=")[2]
        if total.isdigit():
            return int(total) * 1e-6
    return 0.0


def _available_ram(root: Path) -> tuple[int, str]:
    available = _field(_read(root / "proc/meminfo"), "MemAvailable").removesuffix("kB").strip()
    if available.isdigit():
        return int(available) * 1024, "RAM available"
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # systems without sysconf or without the names
        return FALLBACK_MEMORY, "unknown RAM"
    return total * 3 // 4, "three quarters of RAM"


# Limits of the process: name in /proc/self/limits, what counts against it, what is reserved and
# never used beside what the memory plan counts, and its name for users.
PROCESS_LIMITS = (
    ("Max address space", "VmSize", RESERVED_SPACE, "limit of address space (ulimit -v)"),
    ("Max data size", "VmData", RESERVED_DATA, "limit of data (ulimit -d)"),
)


def _process_limits_left(root: Path) -> Iterator[tuple[int, str]]:
    """Yield what `ulimit -v` and `ulimit -d` leave. Unlike the memory plan, these limits also count
    memory that is reserved and never used, such as thread stacks and, the first one, libraries."""
    status = _read(root / "proc/self/status")
    for line in _read(root / "proc/self/limits").splitlines():
        for name, counted, reserved, reason in PROCESS_LIMITS:
            soft = line.removeprefix(name).split()[:1]
            used = _field(status, counted).removesuffix("kB").strip()
            if line.startswith(name) and soft and soft[0].isdigit() and used.isdigit():
                yield int(soft[0]) - int(used) * 1024 - reserved, reason


def _cgroup_memory_left(root: Path) -> Iterator[tuple[int, str]]:
    """Yield (limit - usage that cannot be dropped, reason) of each memory cgroup above this
    process."""
    files = {
        2: (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
        1: (
            ("memory.limit_in_bytes",),
            "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    }
    for version, folder, name in _cgroups(root, "memory"):
        limit_files, usage_file, droppable = files[version]
        texts = [_read(folder / file).strip() for file in limit_files]
        limit = min((int(text) for text in texts if text.isdigit()), default=UNLIMITED)
        usage = _read(folder / usage_file).strip()
        if not usage.isdigit() or limit >= UNLIMITED:
            continue
        stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines() if line)
        cache = sum(int(stat.get(key, 0)) for key in droppable)
        yield limit - max(0, int(usage) - cache), f"limit of cgroup {name}"


def cpu_quota(root: Path = Path("/")) -> tuple[float, Path | None]:
    """Return the lowest CPU quota in cores of this process's cgroups, and the file with the CPU
    time used (see `used_cpu_time`) or None; infinity without a quota."""
    return min(_cpu_quotas(root), key=lambda pair: pair[0], default=(inf, None))


def used_cpu_time(file: Path) -> float:
    """Return the seconds of CPU time that all processes of a cgroup have used. Raises OSError if it
    is gone."""
    text = file.read_text()
    if file.name == "cpu.stat":
        return int(text.removeprefix("usage_usec").split(maxsplit=1)[0]) * 1e-6
    return int(text) * 1e-9


def _cpu_quotas(root: Path) -> Iterator[tuple[float, Path | None]]:
    """Yield (quota, file) as in `cpu_quota` for each CPU cgroup above this process."""
    for version, folder, _ in _cgroups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        else:
            quota = _read(folder / "cpu.cfs_quota_us").strip()
            period = _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            # In version 1 the controllers for the quota and the accounting are usually mounted
            # together.
            file = folder / ("cpu.stat" if version == 2 else "cpuacct.usage")
            yield int(quota) / int(period), file if file.is_file() else None


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path, str]]:
    """Yield (version, folder, name) of this process's cgroup and of every one above it.

    Inside a container the path in /proc/self/cgroup may start above what is mounted; folders that
    do not exist simply read as empty.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth]), "/" + "/".join(parts[:depth])


def _affinity() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    """Read a small system file; "" if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """Return the value of the first `name : value` line."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


MEASURED_PACKAGES = ("kvik", "torch", "triton")  # a measurement is valid for these versions only

Thresholds = tuple[tuple[int, int], ...]
"""Pairs (head_dim, tokens), sorted; a head_dim is missing if torch's attention is never faster."""


def prompt_attention_path() -> Path:
    """Return the file of measured thresholds."""
    return cache_folder() / "prompt-attention.json"


def load_thresholds(gpu: str, path: Path) -> Thresholds:
    """Read the thresholds of GPUs of this name with the installed packages; () if there are none or
    the file is not valid."""
    try:
        measured = json.loads(path.read_bytes())[gpu]
        if measured["versions"] != _versions():
            return ()
        pairs = sorted((int(dim), int(tokens)) for dim, tokens in measured["torch_from"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return ()
    except RecursionError:  # thousands of brackets
        return ()
    return tuple((dim, tokens) for dim, tokens in pairs if dim > 0 and tokens > 0)


def save_thresholds(gpu: str, measured: Thresholds, path: Path) -> None:
    """Save the thresholds of a GPU, keeping those of others. Raises ConfigError if the file cannot
    be written."""
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        stored = {}
    every = stored if isinstance(stored, dict) else {}
    torch_from = {str(dim): tokens for dim, tokens in measured}
    every[gpu] = {"versions": _versions(), "torch_from": torch_from}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(every, indent=2).encode() + b"\n")
    except OSError as error:
        raise ConfigError("calibration", f"cannot write {str(path)!r} ({error.strerror})") from None


def _versions() -> dict[str, str]:
    versions = {}
    for name in MEASURED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # kvik runs from its sources
            versions[name] = ""
    return versions


GPU_FIELDS = "index,name,memory.total,memory.free,compute_cap"


def find_gpus() -> tuple[Gpu, ...]:
    """Find the devices that the installed torch could use, with their measured thresholds; () if
    they cannot be determined."""
    if not is_cuda_build():
        return ()
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    path = prompt_attention_path()
    return tuple(
        replace(gpu, torch_prompts=load_thresholds(gpu.name, path))
        for gpu in parse_gpus(answer.stdout, visible_gpus())
    )


def parse_gpus(table: str, visible: tuple[int, ...] | None) -> tuple[Gpu, ...]:
    """Parse lines of `GPU_FIELDS` into devices, numbered as CUDA numbers the visible ones."""
    gpus: dict[int, Gpu] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            index, name, total, free, capability = cells
            major, _, minor = capability.partition(".")
            gpus[int(index)] = Gpu(
                int(index), name, int(total) * MIB, int(free) * MIB, (int(major), int(minor))
            )
        except ValueError:
            continue  # "[N/A]", or a message instead of a table
    order = sorted(gpus) if visible is None else [i for i in visible if i in gpus]
    return tuple(replace(gpu, index=rank) for rank, gpu in enumerate(gpus[i] for i in order))
