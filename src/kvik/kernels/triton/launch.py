"""Arithmetic shared by the launchers of the kernels."""

from __future__ import annotations

MAX_SHARED = 227 << 10  # bytes of shared memory that one program can have on sm_90


def power_of_two(n: int) -> int:
    """Return the least power of two that is >= n: the sizes of Triton's blocks."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    """Return n / by, rounded up."""
    return -(-n // by)
