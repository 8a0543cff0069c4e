"""What the launchers of the kernels share: arithmetic, and launches that overlap.

From Hopper on, a kernel may be launched while the one before it still runs ("programmatic dependent
launch", CUDA C++ Programming Guide): its programs take their places, and wait. The short kernels of
a decode otherwise leave the GPU idle for most of a microsecond between one and the next. Every
kernel launched with `CHAINED` calls `follow` before anything else, so that a kernel which has ended
proves that all earlier ones have.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

MAX_SHARED = 227 << 10  # bytes of shared memory that one program can have on sm_90


def power_of_two(n: int) -> int:
    """Return the least power of two that is >= n: the sizes of Triton's blocks."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    """Return n / by, rounded up."""
    return -(-n // by)


def _overlaps() -> bool:
    """Return whether kernels of this process can be launched before the previous one has ended."""
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.version.cuda:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


OVERLAPS = tl.constexpr(_overlaps())
CHAINED = {"launch_pdl": True} if OVERLAPS.value else {}  # options of a launch


@triton.jit
def follow():
    """Let the next kernel be launched, and wait until the previous one has ended."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
