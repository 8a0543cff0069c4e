"""Round to nearest: each weight on its own, what the other methods are measured by."""

from __future__ import annotations

from torch import Tensor

from kvik.quantize.grid import Grid, quantise
from kvik.quantize.quantised import Quantised


def rtn(w: Tensor, grid: Grid) -> Quantised:
    """
    Args:
        w: [outputs, inputs], any float dtype.

    Raises:
        ValueError: as `Grid.fit`.
    """
    scales = grid.fit(w)
    return Quantised(quantise(w, scales, grid), scales, grid)
