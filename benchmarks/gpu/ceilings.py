"""The machine and its peak rates: the ceilings for all reported shares."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial

import torch
from clock import timed
from notes import Notes
from place import DEVICE, REHEARSED, release, sized, synchronize

BYTES = sized(4 << 30, 1 << 12)  # bytes of a tensor that is copied or read
SIZE = sized(8192, 32)  # side of the square matrix products
SHORT = sized(1000, 2)  # launches of a kernel that does almost nothing
NEEDED, WANTED = ("triton", "numpy", "tokenizers"), ("transformers", "pytest")


def measure(notes: Notes) -> None:
    if not (REHEARSED or torch.cuda.is_available()):
        raise RuntimeError("torch sees no CUDA device: nothing here can be measured")
    notes.attempt("machine", partial(_machine, notes))
    notes.attempt("packages", partial(_packages, notes))
    for name, call in (
        ("copy", _copy),
        ("read", _read),
        ("bf16", _bf16),
        ("fp8", _fp8),
        ("int8", _int8),
        ("launch", _launches),
    ):
        notes.attempt(name, partial(_note, notes, name, call))
        release()


def _note(notes: Notes, name: str, call: Callable[[], float]) -> None:
    notes.fact(name, call())


def _machine(notes: Notes) -> None:
    if REHEARSED:
        return
    properties = torch.cuda.get_device_properties(0)
    notes.fact("gpu", properties.name)
    notes.fact("processors", properties.multi_processor_count)
    notes.fact("memory", properties.total_memory)
    notes.fact("l2", properties.L2_cache_size)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        notes.fact("driver", answer.stdout.strip())
    except (OSError, subprocess.SubprocessError) as error:
        notes.missed("driver", str(error))


def _packages(notes: Notes) -> None:
    notes.fact("python", platform.python_version())
    notes.fact("torch", torch.__version__)
    notes.fact("date", time.strftime("%Y-%m-%d"))
    for name in NEEDED + WANTED:
        try:
            notes.fact(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            notes.missed(name, "is not installed")
    native = importlib.util.find_spec("kvik.kernels.cpu._native") is not None
    notes.fact("native kernels", native)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        notes.missed("C compiler", "none found: Triton needs one to launch kernels")


def _copy() -> float:
    """Return bytes per second, reads plus writes, of a kernel: in a graph, `copy_` would run on the
    slower copy engine."""
    source = torch.empty(BYTES // 4, device=DEVICE).normal_()
    target = torch.empty_like(source)
    return 2 * BYTES / timed([lambda: torch.neg(source, out=target)], 0.5).seconds


def _read() -> float:
    """Return bytes per second of a read-only kernel: the maximum of many numbers."""
    numbers = torch.empty(BYTES // 4, device=DEVICE).normal_()
    return BYTES / timed([numbers.amax], 0.5).seconds


def _bf16() -> float:
    """Return operations per second, on random numbers: zeros take less power, and so less time."""
    x, y = (torch.randn(SIZE, SIZE, device=DEVICE).bfloat16() for _ in range(2))
    out = torch.empty_like(x)
    return 2 * SIZE**3 / timed([lambda: torch.mm(x, y, out=out)], 1.0).seconds


def _fp8() -> float:
    """Return operations per second in fp8, with a scale for each row and column."""
    if REHEARSED:  # CPUs have no such product
        return 1.0
    x, y = (torch.randn(SIZE, SIZE, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns = torch.ones(SIZE, 1, device=DEVICE), torch.ones(1, SIZE, device=DEVICE)

    def call() -> object:
        return torch._scaled_mm(
            x, y.t(), scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * SIZE**3 / timed([call], 1.0).seconds


def _int8() -> float:
    x, y = (
        torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8, device=DEVICE) for _ in range(2)
    )
    return 2 * SIZE**3 / timed([lambda: torch._int_mm(x, y.t())], 1.0).seconds


def _launches() -> float:
    """Return the seconds of a launch from Python, of a kernel that runs for less time than that."""
    one = torch.zeros(1, device=DEVICE)
    for _ in range(2):
        synchronize()
        started = time.perf_counter()
        for _ in range(SHORT):
            one.add_(1)
        synchronize()
        seconds = time.perf_counter() - started
    return seconds / SHORT
