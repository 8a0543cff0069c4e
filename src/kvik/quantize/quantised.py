"""A linear layer in few bits: what every method returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvik.kernels.weights import Weight
from kvik.nn.formats.integers import Codes, weight_of
from kvik.quantize.grid import Grid, Scales, dequantise
from kvik.spec.stored_weights import StoredScheme

BYTE = 8


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

    def codes(self) -> Codes:
        """As checkpoint layouts take them: [outputs, groups] scales, also where one is for all."""
        outputs = len(self.q)
        scales, zeros = self.scales.scales, self.scales.zeros
        zeros = None if zeros is None else zeros.expand(outputs, -1)
        return Codes(self.q, scales.expand(outputs, -1), zeros, self.grid.bits, self.order)

    def weight(self, quantize_activations: bool = False) -> Weight:
        """For the engine, as it would load it from a checkpoint: codes of two and three bits in
        four, those of five to seven in eight, and floats where no kernel multiplies it.

        Args:
            quantize_activations: of a weight in more than four bits.
        """
        codes, symmetric = self.codes(), self.scales.zeros is None
        if BYTE > codes.bits > 4 and symmetric:
            codes = replace(codes, q=codes.q + (2 ** (BYTE - 1) - self.grid.middle), bits=BYTE)
        scheme = StoredScheme(
            "pack-quantized",
            codes.bits,
            max(self.grid.group, 0),
            symmetric=symmetric,
            ordered=self.order is not None,
            quantize_activations=quantize_activations and codes.bits == BYTE,
        )
        return weight_of(codes, scheme)
