"""Which rows of an E4M3 weight have the same scales: libraries take one for a square block, or for
the whole, while a matrix is filled by runs of rows, in any order, each with scales of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.triton.launch import ceil_div
from kvik.kernels.triton.scaled_mm import SQUARE


@dataclass(slots=True)
class Squares:
    """Attributes:
    scales: [rows / 128, inputs / 128 up to a multiple of 4] fp32, of the first row in each block.
    equal: of each block, whether all of its rows have these scales.
    everywhere: whether they have in all blocks. Known on the host, as it decides what multiplies.
    """

    scales: Tensor
    equal: list[bool]
    everywhere: bool = False

    def update(self, row_scales: Tensor, rows: int, first: int, last: int) -> None:
        """After rows first..last of the matrix were filled: row_scales [groups, filled rows]."""
        begin, end = first // SQUARE, ceil_div(last, SQUARE)
        of_rows = row_scales[:, begin * SQUARE : min(rows, end * SQUARE)]
        firsts = of_rows[:, ::SQUARE]  # [groups, blocks]
        self.scales[begin:end, : len(firsts)] = firsts.t()
        alike = of_rows == firsts.repeat_interleave(SQUARE, 1)[:, : of_rows.shape[1]]
        missing = (end - begin) * SQUARE - of_rows.shape[1]
        whole = torch.nn.functional.pad(alike.all(0), (0, missing), value=True)
        self.equal[begin:end] = whole.view(-1, SQUARE).all(1).tolist()
        self.everywhere = all(self.equal)


@dataclass(slots=True)
class Whole:
    """Attributes:
    alike: whether all rows have one scale. Known on the host, as it decides what multiplies.
    """

    alike: bool = False

    def update(self, row_scales: Tensor, rows: int) -> None:
        """After some rows of the matrix were filled: row_scales [filled rows]; others have 0."""
        self.alike = bool((row_scales[:rows] == row_scales[0]).all())
