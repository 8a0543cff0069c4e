"""What a benchmark was run with: enough to run it again, and to know what it can be compared to."""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from kvik import __version__
from kvik.config.config import ResolvedConfig
from kvik.config.hardware import detect
from kvik.config.units import show_bytes
from kvik.spec.kv import AUTO, formats_of
from kvik_bench.report.result import Figure

PEAK_MEMORY = "resident memory of this process at its highest, since it started"


def run_facts() -> Mapping[str, str]:
    """Date, command, versions and machine."""
    hardware = detect()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["kvik", *sys.argv[1:]]),
        "kvik": __version__,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": f"{hardware.cpu_name}, {hardware.cores} cores, "
        f"{show_bytes(hardware.memory_limit)} of memory",
        "load": f"{os.getloadavg()[0]:.1f} running processes in the last minute",
    }


def engine_facts(resolved: ResolvedConfig) -> Mapping[str, str]:
    """What was decided for the engine, as far as it bears on speed."""
    runner, scheduler, cache = resolved.runner, resolved.scheduler, resolved.cache
    return {
        "model": runner.model_path,
        "architecture": resolved.model.architecture,
        "parameters": f"{resolved.model.parameters.total:,}",
        "dtype": runner.dtype,
        "quantization": runner.quantization,
        "device": runner.device,
        "kernels": f"{runner.kernels}, attention {runner.attention_backend}",
        "threads": str(runner.threads),
        "policy": scheduler.policy,
        "max_num_seqs": str(scheduler.max_num_seqs),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "KV cache": f"{cache.num_blocks - 1} blocks of {cache.block_size} tokens, "
        + " and ".join(formats_of(cache.groups)).replace(AUTO, runner.dtype),
        "prefix caching": "on" if cache.enable_prefix_caching else "off",
    }


def peak_memory() -> Figure:
    """Of this process, in MiB."""
    return Figure("peak memory", "MiB", (peak_bytes() / (1 << 20),), "less", PEAK_MEMORY)


def peak_bytes() -> int:
    """Resident memory of this process at its highest. Linux tells it by program; its usage counters
    begin with the memory of the parent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
