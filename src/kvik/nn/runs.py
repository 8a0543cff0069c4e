"""How many rows of a tensor are worked on at a time."""

from __future__ import annotations

ROW_MULTIPLE = 32  # kernels lay rows together in tiles of so many


def run_length(most: int) -> int:
    """Rows of a run, where about `most` of them fit."""
    return max(1, most // ROW_MULTIPLE * ROW_MULTIPLE or most)
