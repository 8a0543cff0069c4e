"""Where all of it runs: on the GPU; or, for a rehearsal, on the CPU in Triton's interpreter.

A rehearsal goes once through the lines of every job, at sizes that tell nothing, so that the time
of a GPU is not spent on finding a misspelt name. What only a GPU can do is left out.
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
    """What is measured, or what stands for it in a rehearsal."""
    return tiny if REHEARSED else real


def synchronize() -> None:
    if not REHEARSED:
        torch.cuda.synchronize()


def release() -> None:
    """Give back what torch keeps for later."""
    if not REHEARSED:
        torch.cuda.empty_cache()


def elapsed(call: Callable[[], object]) -> float:
    """Seconds on the device."""
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
