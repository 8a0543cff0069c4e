"""A linear layer in few bits: what every method returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.weights import SYMMETRIC_ZERO, Int4Weight, Int8Weight
from kvik.nn.formats.bits import pack_nibbles
from kvik.quantize.grid import ROW, TENSOR, Grid, Scales, dequantise


@dataclass(frozen=True, slots=True)
class Quantised:
    """w[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i.

    Attributes:
        q: [outputs, inputs] uint8 codes.
        order: [inputs] int64, the group of each input; None: inputs // group size.
    """

    q: Tensor
    scales: Scales
    grid: Grid
    order: Tensor | None = None

    def dequantised(self) -> Tensor:
        """[outputs, inputs] fp32, inputs in the order of the layer."""
        if self.order is None:
            return dequantise(self.q, self.scales, self.grid)
        scales, zeros = self.scales.scales, self.scales.zeros
        zero = self.grid.middle if zeros is None else zeros[:, self.order]
        return (self.q.float() - zero) * scales[:, self.order]

    def weight(self, quantize_activations: bool = False) -> Int8Weight | Int4Weight:
        """For the engine. Codes of two and three bits become ones of four.

        Args:
            quantize_activations: of a weight in more than four bits.

        Raises:
            ValueError: the engine has no weight of this kind.
        """
        if self.order is not None:
            raise ValueError("the engine has no weights whose groups are not neighbours")
        outputs, inputs = self.q.shape
        scales, zeros = self.scales.scales, self.scales.zeros
        if self.grid.group == TENSOR:
            scales = scales.expand(outputs, 1)
            zeros = None if zeros is None else zeros.expand(outputs, 1)
        if self.grid.bits > 4:
            if zeros is not None or self.grid.group not in (ROW, TENSOR, inputs):
                raise ValueError(
                    f"the engine takes weights of {self.grid.bits} bits if they are symmetric with "
                    "one scale for each output"
                )
            # codes from 1 to 255, less at most 128
            values = (self.q.to(torch.int16) - self.grid.middle).to(torch.int8)
            return Int8Weight(values, scales[:, 0].contiguous(), quantize_activations)
        if zeros is None and self.grid.middle != SYMMETRIC_ZERO:
            zeros = torch.full_like(scales, self.grid.middle, dtype=torch.uint8)
        zeros = None if zeros is None else zeros.contiguous()
        width = self.grid.width(inputs)
        return Int4Weight(pack_nibbles(self.q), scales.contiguous(), zeros, width)
