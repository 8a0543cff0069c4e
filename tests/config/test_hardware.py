"""Facts of a machine, read from handmade files."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.optional_native import instruction_sets, needs_native

from kvik.config.env import visible_gpus
from kvik.config.hardware import (
    ISA_FLAGS,
    NATIVE_ISAS,
    Gpu,
    cpu_quota,
    detect,
    find_gpus,
    is_cuda_build,
    load_thresholds,
    memory_left,
    memory_limit,
    memory_stalls,
    parse_gpus,
    physical_cores,
    prompt_attention_path,
    save_thresholds,
    used_cpu_time,
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


def cgroup_v2(folder: str, limit: str, used: int) -> dict[str, str]:
    path = f"sys/fs/cgroup{folder}"
    return {f"{path}/memory.max": f"{limit}\n", f"{path}/memory.current": f"{used}\n"}


def cgroup_v1(folder: str, limit: str, used: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/memory{folder}/memory"
    return {f"{path}.limit_in_bytes": f"{limit}\n", f"{path}.usage_in_bytes": f"{used}\n"}


CGROUPS: dict[str, tuple[str, dict[str, str], int, str]] = {
    "none": ("", {}, 8 * GIB, "RAM available"),
    "v2, whose page cache can be dropped": (
        "0::/work/job\n",
        cgroup_v2("/work/job", f"{4 * GIB}", 3 * GIB)
        | {
            "sys/fs/cgroup/work/job/memory.stat": f"anon {GIB}\nactive_file {GIB}\n"
            f"inactive_file {GIB // 2}\nshmem 7\n"
        },
        4 * GIB - (3 * GIB - GIB - GIB // 2),
        "limit of cgroup /work/job",
    ),
    "v2, with a tighter parent": (
        "0::/work/job\n",
        cgroup_v2("/work/job", "max", 5) | cgroup_v2("/work", f"{2 * GIB}", 0),
        2 * GIB,
        "limit of cgroup /work",
    ),
    "v2, throttled below its limit": (
        "0::/job\n",
        cgroup_v2("/job", "max", GIB) | {"sys/fs/cgroup/job/memory.high": f"{3 * GIB}\n"},
        2 * GIB,
        "limit of cgroup /job",
    ),
    "v1": (
        "7:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        cgroup_v1("/docker/abc", f"{2 * GIB}", GIB)
        | cgroup_v1("", NO_LIMIT_V1, 9 * GIB)
        | {
            "sys/fs/cgroup/memory/docker/abc/memory.stat": "inactive_file 1\n"
            f"total_inactive_file {GIB // 4}\n"
        },
        2 * GIB - GIB * 3 // 4,
        "limit of cgroup /docker/abc",
    ),
    "v1, mounted at the root of a container": (
        "4:memory:/docker/abc\n",
        cgroup_v1("", f"{GIB}", 0),
        GIB,
        "limit of cgroup /",
    ),
    "over its limit": (
        "0::/\n",
        cgroup_v2("", f"{GIB}", 2 * GIB),
        0,
        "limit of cgroup /",
    ),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_limit_of_memory_is_the_least_of_system_and_cgroups(case: str, tmp_path: Path) -> None:
    own, files, limit, reason = CGROUPS[case]
    root = lay_out(tmp_path, meminfo(8 * GIB) | files | {"proc/self/cgroup": own})
    assert memory_limit(root) == (limit, reason)
    assert memory_left(root) == limit


def limits(address_space: str) -> dict[str, str]:
    return {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           "
        "Units     \nMax data size             4096                 unlimited            bytes\n"
        f"Max address space         {address_space:21}unlimited            bytes     \n",
        "proc/self/status": f"Name:\tkvik\nVmPeak:\t9 kB\nVmSize:\t {GIB // 2 // 1024} kB\n",
    }


def test_an_address_space_limit_counts_mapped_memory(tmp_path: Path) -> None:
    root = lay_out(tmp_path, meminfo(8 * GIB) | limits(str(4 * GIB)))
    limit, reason = memory_limit(root)
    assert 2 * GIB <= limit <= 4 * GIB - GIB // 2
    assert reason == "limit of address space (ulimit -v)"


def test_a_limit_of_data_counts_private_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": f"Max data size             {3 * GIB}           unlimited   bytes\n",
        "proc/self/status": f"VmSize:\t 99 kB\nVmData:\t {GIB // 2 // 1024} kB\n",
    }
    limit, reason = memory_limit(lay_out(tmp_path, meminfo(8 * GIB) | files))
    assert GIB <= limit <= 3 * GIB - GIB // 2 and reason == "limit of data (ulimit -d)"


@pytest.mark.parametrize("text", ["unlimited", str(64 * GIB), ""])
def test_a_process_without_a_tight_limit(tmp_path: Path, text: str) -> None:
    root = lay_out(tmp_path, meminfo(8 * GIB) | limits(text))
    assert memory_limit(root) == (8 * GIB, "RAM available")


@pytest.mark.parametrize("text", ["", "garbage\n", "::\n", "0::\n", "x:memory\n", "0::/../..\n"])
def test_a_strange_cgroup_file_is_no_limit(tmp_path: Path, text: str) -> None:
    root = lay_out(tmp_path, meminfo(GIB) | {"proc/self/cgroup": text})
    assert memory_limit(root) == (GIB, "RAM available")


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        ({}, 0.0),
        ({"proc/pressure/memory": "some avg10=0.00 total=2500000\nfull avg10=0 total=9\n"}, 2.5),
        (
            {
                "proc/pressure/memory": "some avg10=0.00 total=2500000\n",
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.pressure": "some avg10=0.00 total=1000000\nfull total=1\n",
            },
            1.0,
        ),
        ({"proc/pressure/memory": "garbage"}, 0.0),
    ],
)
def test_seconds_that_processes_waited_for_memory(
    tmp_path: Path, files: dict[str, str], seconds: float
) -> None:
    assert memory_stalls(lay_out(tmp_path, files)) == seconds


def test_a_system_without_information_does_not_crash(tmp_path: Path) -> None:
    limit, _ = memory_limit(tmp_path)
    assert limit > 0
    assert physical_cores(tmp_path, frozenset({0, 1, 2})) == 3
    assert cpu_quota(tmp_path) == (math.inf, None)


def test_hyper_threads_and_affinity(tmp_path: Path) -> None:
    root = lay_out(tmp_path, cpuinfo([(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]))
    assert physical_cores(root, frozenset(range(6))) == 3
    assert physical_cores(root, frozenset({0, 1})) == 1
    assert physical_cores(root, frozenset({1, 2})) == 2


@pytest.mark.parametrize(
    ("text", "quota", "cores", "threads"),
    [
        ("max 100000", None, 4, 4),
        ("250000 100000", 2.5, 2, 3),
        ("20000 100000", 0.2, 1, 1),
        ("400000 100000", None, 4, 4),
        ("", None, 4, 4),
    ],
)
def test_cpu_quota_v2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    quota: float | None,
    cores: int,
    threads: int,
) -> None:
    monkeypatch.setattr("kvik.config.hardware._affinity", lambda: frozenset(range(4)))
    files = cpuinfo([(0, i) for i in range(4)])
    files |= {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": text}
    files |= {"sys/fs/cgroup/a/cpu.stat": "usage_usec 2500000\nuser_usec 1\n"}
    root = lay_out(tmp_path, files)
    found = detect(root=root)
    assert (found.cpu_quota, found.cores, found.threads) == (quota, cores, threads)
    if quota is not None:
        file = cpu_quota(root)[1]
        assert file is not None and used_cpu_time(file) == 2.5


def test_cpu_quota_v1(tmp_path: Path) -> None:
    files = cpuinfo([(0, i) for i in range(4)])
    files |= {
        "proc/self/cgroup": "3:cpu:/a\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
    }
    assert cpu_quota(lay_out(tmp_path, files)) == (3.0, None)
    files["sys/fs/cgroup/cpu/a/cpuacct.usage"] = "1500000000\n"
    file = cpu_quota(lay_out(tmp_path, files))[1]
    assert file is not None and used_cpu_time(file) == 1.5


def test_detect_combines_all_sources(tmp_path: Path) -> None:
    files = meminfo(GIB) | cpuinfo([(0, 0)], "avx2 avx512_bf16 rdpid")
    gpu = Gpu(0, "G", GIB, GIB, (9, 0))
    found = detect((gpu,), lay_out(tmp_path, files))
    assert found.cpu_name == "Fast CPU"
    assert found.isa == {"avx2", "avx512_bf16"}
    assert found.fast_bf16
    assert found.gpus == (gpu,)


def test_this_machine_is_detected() -> None:
    found = detect()
    assert found.cores >= 1
    assert found.memory_limit > 0
    assert found.isa <= ISA_FLAGS


@pytest.mark.parametrize(
    ("answer", "isa"),
    [
        ("hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0", "neon_dot"),
        (
            "\n".join(f"hw.optional.arm.FEAT_{n}: 1" for n in ("DotProd", "I8MM", "BF16")),
            "neon_i8mm",
        ),
        ("", "neon"),
    ],
)
def test_the_instruction_sets_of_an_apple(
    answer: str, isa: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "sysctl"
    tool.write_text(f"#!/bin/sh\ntest $1 = hw.optional.arm && echo '{answer}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert detect(root=lay_out(tmp_path, {})).native_isa == isa


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells of the CPU")
def test_detected_instruction_sets_run() -> None:
    """Except AMX, which the compiler, the system or the self-check may exclude."""
    found, running = detect(), instruction_sets()
    assert found.native
    detected = [name for name, flags in NATIVE_ISAS.items() if flags <= found.isa] + ["portable"]
    assert found.native_isa == detected[0]
    assert running in (detected, [name for name in detected if name != "amx"])


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


TABLE = "0, NVIDIA A, 1000, 900, 9.0\n1, NVIDIA B, 2000, 1500, 7.5\n2, C, [N/A], [N/A], 8.0\n"
MIB = 1 << 20
A = Gpu(0, "NVIDIA A", 1000 * MIB, 900 * MIB, (9, 0))
B = Gpu(1, "NVIDIA B", 2000 * MIB, 1500 * MIB, (7, 5))


def test_the_table_is_read() -> None:
    assert parse_gpus(TABLE, None) == (A, B)
    assert parse_gpus("NVIDIA-SMI has failed\n", None) == ()
    assert parse_gpus("", None) == ()


def test_devices_are_numbered_as_cuda_sees_them() -> None:
    found = parse_gpus(TABLE, (1, 5, 0))
    assert [(gpu.index, gpu.name) for gpu in found] == [(0, "NVIDIA B"), (1, "NVIDIA A")]
    assert parse_gpus(TABLE, ()) == ()


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (None, None),
        ("", ()),
        ("0", (0,)),
        ("2, 0", (2, 0)),
        ("1,-1,0", (1,)),
        ("GPU-8f2c", None),
    ],
)
def test_visible_devices(text: str | None, visible: tuple[int, ...] | None) -> None:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_gpus(environ) == visible


def test_without_the_tool_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvik.config.hardware.is_cuda_build", lambda: True)
    monkeypatch.setenv("PATH", "")
    assert find_gpus() == ()


def test_measured_thresholds_of_a_device_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<END\n{TABLE}END\n")
    tool.chmod(0o755)
    monkeypatch.setattr("kvik.config.hardware.is_cuda_build", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_gpus() == (A, B)
    save_thresholds("NVIDIA B", ((128, 2048),), prompt_attention_path())
    assert find_gpus() == (A, replace(B, torch_prompts=((128, 2048),)))


FOUND = ((64, 4096), (128, 1024))


def test_each_gpu_has_its_own_thresholds(tmp_path: Path) -> None:
    path = tmp_path / "kvik" / "prompt-attention.json"
    assert load_thresholds("A", path) == ()
    save_thresholds("A", ((128, 2048),), path)
    save_thresholds("B", (), path)
    save_thresholds("A", FOUND, path)
    assert load_thresholds("A", path) == FOUND
    assert load_thresholds("B", path) == ()


def test_thresholds_of_other_versions_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt-attention.json"
    save_thresholds("A", FOUND, path)
    versions = {"torch": "1.0", "triton": "3.6.0", "kvik": "0"}
    monkeypatch.setattr("kvik.config.hardware.metadata.version", versions.__getitem__)
    assert load_thresholds("A", path) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "null", '{"A": 3}', '{"A": {}}', "[" * 100_000),
        *("torch_from", "not a number", "infinite", "dims"),
    ],
    ids=lambda text: text[:20],
)
def test_a_broken_file_is_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompt-attention.json"
    save_thresholds("A", FOUND, path)
    broken = {"torch_from": 3, "not a number": {"64": "many"}, "dims": {"sixty": 64}}
    broken["infinite"] = {"64": float("inf")}
    if text in broken:
        every = json.loads(path.read_bytes())
        every["A"]["torch_from"] = broken[text]
        text = json.dumps(every)
    path.write_text(text)
    assert load_thresholds("A", path) == ()
    save_thresholds("A", FOUND, path)  # the file is replaced
    assert load_thresholds("A", path) == FOUND
