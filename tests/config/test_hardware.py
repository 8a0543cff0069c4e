"""Facts of a machine, read from files laid out by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.optional_native import instruction_sets, needs_native

from kvik.config.hardware import (
    ISA_FLAGS,
    NATIVE_ISAS,
    Gpu,
    detect,
    is_cuda_build,
    memory_limit,
    usable_cores,
)

GIB = 1 << 30
NO_LIMIT_V1 = str((1 << 63) - 4096)


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available: int) -> dict[str, str]:
    kib = available // 1024
    return {"proc/meminfo": f"MemTotal: {kib * 2} kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n"}


def cpuinfo(threads: list[tuple[int, int]], flags: str = "") -> dict[str, str]:
    entries = [
        f"processor\t: {i}\nmodel name\t: Fast CPU\nphysical id\t: {socket}\ncore id\t\t: {core}\n"
        f"flags\t\t: fpu {flags}\n"
        for i, (socket, core) in enumerate(threads)
    ]
    return {"proc/cpuinfo": "\n".join(entries)}


def test_without_a_cgroup_the_free_ram_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit(lay_out(tmp_path, meminfo(8 * GIB))) == (8 * GIB, "RAM available")


def test_cgroup_v2_page_cache_can_be_dropped(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/work/job\n",
        "sys/fs/cgroup/work/job/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/work/job/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/work/job/memory.stat": f"anon {GIB}\nactive_file {GIB}\n"
        f"inactive_file {GIB // 2}\nshmem 7\n",
    }
    limit, reason = memory_limit(lay_out(tmp_path, meminfo(8 * GIB) | files))
    assert limit == 4 * GIB - (3 * GIB - GIB - GIB // 2)
    assert reason == "limit of cgroup /work/job"


def test_cgroup_v2_a_parent_may_be_tighter(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/work/job\n",
        "sys/fs/cgroup/work/job/memory.max": "max\n",
        "sys/fs/cgroup/work/job/memory.current": "5\n",
        "sys/fs/cgroup/work/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/work/memory.current": "0\n",
    }
    assert memory_limit(lay_out(tmp_path, meminfo(8 * GIB) | files)) == (
        2 * GIB,
        "limit of cgroup /work",
    )


def test_cgroup_v1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/docker/abc"
    files = {
        "proc/self/cgroup": "7:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        f"{base}/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{base}/memory.usage_in_bytes": f"{GIB}\n",
        f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}",
    }
    limit, _ = memory_limit(lay_out(tmp_path, meminfo(8 * GIB) | files))
    assert limit == 2 * GIB - GIB * 3 // 4


def test_in_a_container_the_cgroup_is_mounted_at_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
    }
    assert memory_limit(lay_out(tmp_path, meminfo(8 * GIB) | files))[0] == GIB


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert memory_limit(lay_out(tmp_path, meminfo(8 * GIB) | files))[0] == 0


def limits(address_space: str) -> dict[str, str]:
    return {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           "
        "Units     \nMax data size             4096                 unlimited            bytes\n"
        f"Max address space         {address_space:21}unlimited            bytes     \n",
        "proc/self/status": f"Name:\tkvik\nVmPeak:\t9 kB\nVmSize:\t {GIB // 2 // 1024} kB\n",
    }


def test_a_limit_of_the_process_counts_what_is_mapped(tmp_path: Path) -> None:
    root = lay_out(tmp_path, meminfo(8 * GIB) | limits(str(4 * GIB)))
    limit, reason = memory_limit(root)
    assert 2 * GIB <= limit <= 4 * GIB - GIB // 2
    assert reason == "limit of address space (ulimit -v)"


@pytest.mark.parametrize("text", ["unlimited", str(64 * GIB), ""])
def test_a_process_without_a_tight_limit(tmp_path: Path, text: str) -> None:
    root = lay_out(tmp_path, meminfo(8 * GIB) | limits(text))
    assert memory_limit(root) == (8 * GIB, "RAM available")


@pytest.mark.parametrize("text", ["", "garbage\n", "::\n", "0::\n", "x:memory\n", "0::/../..\n"])
def test_a_strange_cgroup_file_is_no_limit(tmp_path: Path, text: str) -> None:
    root = lay_out(tmp_path, meminfo(GIB) | {"proc/self/cgroup": text})
    assert memory_limit(root) == (GIB, "RAM available")


def test_a_system_that_tells_nothing_does_not_crash(tmp_path: Path) -> None:
    limit, _ = memory_limit(tmp_path)
    assert limit > 0
    assert usable_cores(tmp_path, frozenset({0, 1, 2})) == 3


def test_hyper_threads_and_affinity(tmp_path: Path) -> None:
    root = lay_out(tmp_path, cpuinfo([(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]))
    assert usable_cores(root, frozenset(range(6))) == 3
    assert usable_cores(root, frozenset({0, 1})) == 1
    assert usable_cores(root, frozenset({1, 2})) == 2


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("20000 100000", 1), ("", 4)]
)
def test_cpu_quota_v2(tmp_path: Path, quota: str, cores: int) -> None:
    files = cpuinfo([(0, i) for i in range(4)])
    files |= {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": quota}
    assert usable_cores(lay_out(tmp_path, files), frozenset(range(4))) == cores


def test_cpu_quota_v1(tmp_path: Path) -> None:
    files = cpuinfo([(0, i) for i in range(4)])
    files |= {
        "proc/self/cgroup": "3:cpu:/a\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
    }
    assert usable_cores(lay_out(tmp_path, files), frozenset(range(4))) == 3


def test_detect_puts_it_together(tmp_path: Path) -> None:
    files = meminfo(GIB) | cpuinfo([(0, 0)], "avx2 avx512_bf16 rdpid")
    gpu = Gpu(0, "G", GIB, GIB, (9, 0))
    found = detect((gpu,), lay_out(tmp_path, files))
    assert found.cpu_name == "Fast CPU"
    assert found.isa == {"avx2", "avx512_bf16"}
    assert found.fast_bf16
    assert found.gpus == (gpu,)


def test_this_machine_answers() -> None:
    found = detect()
    assert found.cores >= 1
    assert found.memory_limit > 0
    assert found.isa <= ISA_FLAGS


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of the CPU")
def test_the_instruction_sets_told_are_the_ones_that_run() -> None:
    """But for AMX, which the compiler, the system or the self-check may deny."""
    found, running = detect(), instruction_sets()
    assert found.native
    told = [name for name, flags in NATIVE_ISAS.items() if flags <= found.isa] + ["portable"]
    assert found.native_isa == told[0]
    assert running in (told, [name for name in told if name != "amx"])


@pytest.mark.parametrize(
    ("version", "platform", "cuda"),
    [
        ("2.13.0+cpu", "linux", False),
        ("2.13.0", "linux", True),
        ("2.11.0+cu130", "linux", True),
        ("2.13.0", "darwin", False),
    ],
)
def test_builds_of_torch(
    version: str, platform: str, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.setattr("sys.platform", platform)
    assert is_cuda_build() is cuda
