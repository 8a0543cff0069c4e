"""Units of memory, and how to write them."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def show_bytes(count: int) -> str:
    """1610612736 -> "1.5 GiB"."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
