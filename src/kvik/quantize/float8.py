"""Round to nearest in eight-bit floats: a linear layer in E4M3 with its scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.fp8 import ROW, Block, fp8_scales, round_fp8, unround_fp8
from kvik.kernels.weights import Fp8Weight

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Float8:
    """w = value * scale.

    Attributes:
        values: [outputs, inputs] E4M3.
        scales: [blocks of outputs, blocks of inputs] fp32.
        block: outputs and inputs that share a scale; 0: all of them.
    """

    values: Tensor
    scales: Tensor
    block: Block

    def dequantised(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return unround_fp8(self.values, self.scales, self.block)

    def weight(self) -> Fp8Weight:
        """For the engine."""
        outputs = len(self.values)
        band, group = self.block
        rows = torch.arange(outputs, device=self.values.device) // (band or outputs)
        scales = self.scales[rows]  # [outputs, blocks of inputs]
        return Fp8Weight(self.values, scales if group else scales[:, 0], group)


def float8(w: Tensor, block: Block = ROW, scale_dtype: torch.dtype = torch.float32) -> Float8:
    """
    Args:
        w: [outputs, inputs], any float dtype.
        scale_dtype: what the checkpoint holds scales in; the weights are rounded by such ones.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    scales = fp8_scales(w, E4M3, block).to(scale_dtype).float()
    return Float8(round_fp8(w, scales, E4M3, block), scales, block)
