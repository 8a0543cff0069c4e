"""The quantiser of all methods but FP8: the steps of a block of weights, and a weight's code.

w = (q - zero) * scale, with q an unsigned code of a few bits. Groups run along the inputs of one
row, never across rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW = -1  # `Grid.group`: the whole row
TENSOR = 0  # `Grid.group`: all weights of the layer


@dataclass(frozen=True, slots=True)
class Scales:
    """What a grid became for some weights.

    Attributes:
        scales: [outputs, groups] fp32; [1, 1] for a whole tensor.
        zeros: like `scales`, uint8: the code of 0. None: 2^(bits-1) everywhere.
    """

    scales: Tensor
    zeros: Tensor | None


@dataclass(frozen=True, slots=True)
class Grid:
    """How weights are rounded.

    Attributes:
        bits: 2..8.
        group: inputs of a row that share a scale; -1: the whole row; 0: the whole tensor.
        symmetric: steps from -(2^(bits-1) - 1) to 2^(bits-1) - 1 about zero, so that the code 0 is
            not used. Else the range, which always includes 0, is spread over all codes and 0 has a
            code of its own.
        scale_dtypes: formats that must all hold a scale as it is; empty: it stays in fp32. Weights
            are rounded by the scale that they will be multiplied with, not by a finer one.
            Checkpoints store fp16, or bf16 in a compressed-tensors one of a bf16 model; the native
            kernels keep the digits of fp16.
    """

    bits: int
    group: int
    symmetric: bool
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float16,)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"a grid has 2 to 8 bits, not {self.bits}")
        if self.group < ROW:
            raise ValueError(f"a group is -1, 0 or a number of inputs, not {self.group}")

    @property
    def lowest(self) -> int:
        return 1 if self.symmetric else 0

    @property
    def highest(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The code of 0 where a grid is symmetric."""
        return 2 ** (self.bits - 1)

    def width(self, inputs: int) -> int:
        """How many of `inputs` share a scale.

        Raises:
            ValueError: groups do not divide the inputs.
        """
        if self.group <= TENSOR:
            return inputs
        if inputs % self.group:
            raise ValueError(f"groups of {self.group} do not divide {inputs} inputs")
        return self.group

    def bits_per_weight(self, outputs: int, inputs: int) -> float:
        """Scales and zero points included, as they are stored."""
        shared = self.width(inputs) * (outputs if self.group == TENSOR else 1)
        narrow = min((dtype.itemsize for dtype in self.scale_dtypes), default=4)
        return self.bits + (8 * narrow + (0 if self.symmetric else self.bits)) / shared

    def fit(self, w: Tensor) -> Scales:
        """Steps that reach all of w, [outputs, inputs].

        Raises:
            ValueError: a weight is NaN or infinite, or too large for a scale in `scale_dtypes`;
                groups do not divide the inputs.
        """
        grouped = w.float().reshape(len(w), -1, self.width(w.shape[1]))
        low, high = grouped.amin(-1), grouped.amax(-1)  # [outputs, groups]
        if self.group == TENSOR:
            low, high = low.amin().view(1, 1), high.amax().view(1, 1)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ValueError("its weights hold NaN or infinity, which cannot be quantised")
        if self.symmetric:
            scale = self._stored(torch.maximum(high, -low) / (self.middle - 1))
            return Scales(scale, None)
        low, high = low.clamp(max=0), high.clamp(min=0)
        # divided first: the difference of two finite numbers may be infinite
        scale = self._stored(high / self.highest - low / self.highest)
        zero = (-low / scale).round_().clamp_(0, self.highest)
        return Scales(scale, zero.to(torch.uint8))

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
        """The nearest code of each weight, in w's float dtype. All shapes broadcast."""
        return (w / scale).round_().add_(zero).clamp_(self.lowest, self.highest)

    def _stored(self, scale: Tensor) -> Tensor:
        """
        Raises:
            ValueError: a scale is too large for a format.
        """
        for dtype in self.scale_dtypes:
            scale = scale.to(dtype).float()
        if not bool(scale.isfinite().all()):
            raise ValueError(f"its weights are too large for scales in {self.scale_dtypes}")
        return scale.masked_fill(scale == 0, 1.0)  # nothing to scale


def quantise(w: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """w [outputs, inputs] -> codes, uint8."""
    grouped = w.float().reshape(len(w), -1, grid.width(w.shape[1]))
    zero = grid.middle if scales.zeros is None else scales.zeros[:, :, None]
    return grid.codes(grouped, scales.scales[:, :, None], zero).to(torch.uint8).view(w.shape)


def dequantise(q: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """Codes [outputs, inputs] -> weights, fp32."""
    grouped = q.reshape(len(q), -1, grid.width(q.shape[1])).float()
    grouped -= grid.middle if scales.zeros is None else scales.zeros[:, :, None]
    return grouped.mul_(scales.scales[:, :, None]).view(q.shape)
