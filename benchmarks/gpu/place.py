"""Where everything runs: on the GPU; or, for a rehearsal, on the CPU in Triton's interpreter.

A rehearsal runs every job once, at meaningless tiny sizes, so that no GPU time is wasted on, say, a
misspelt name. GPU-only work is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import torch

VARIABLE = "KVIK_GPU_REHEARSAL"  # set by run.py for its jobs
REHEARSED = os.environ.get(VARIABLE) == "1"
DEVICE = torch.device("cpu" if REHEARSED else "cuda")

T = TypeVar("T")


def sized(real: T, tiny: T) -> T:
    """Return the real value, or the tiny one in a rehearsal."""
    return tiny if REHEARSED else real


def synchronize() -> None:
    if not REHEARSED:
        torch.cuda.synchronize()


def release() -> None:
    """Free the memory that torch's allocator caches."""
    if not REHEARSED:
        torch.cuda.empty_cache()


def elapsed(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the device."""
    if REHEARSED:
        started = time.perf_counter()
        call()
        return max(1e-6, time.perf_counter() - started)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    call()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3
