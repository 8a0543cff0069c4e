"""Round to nearest in eight-bit floats: a linear layer in E4M3 or E5M2 with its scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.fp8 import (
    ROW,
    Block,
    fp8_scale,
    fp8_scales,
    round_activations,
    round_fp8,
    unround_fp8,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True)
class Float8:
    """w = value * scale.

    Attributes:
        values: [outputs, inputs] E4M3 or E5M2.
        scales: [blocks of outputs, blocks of inputs] fp32.
        block: outputs and inputs that share a scale; 0: all of them.
        input_scale: [1] fp32, of its inputs; None: each token finds its own.
    """

    values: Tensor
    scales: Tensor
    block: Block
    input_scale: Tensor | None = None

    def dequantised(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return unround_fp8(self.values, self.scales, self.block)

    def given(self, x: Tensor) -> Tensor:
        """What the weights meet of x [tokens, inputs]; fp32. E5M2 meets x as it is."""
        if self.values.dtype != E4M3:
            return x.float()
        return round_activations(x, self.block[1], self.input_scale)


def float8(
    w: Tensor,
    block: Block = ROW,
    scale_dtype: torch.dtype = torch.float32,
    *,
    dtype: torch.dtype = E4M3,
    input_absmax: Tensor | None = None,
) -> Float8:
    """
    Args:
        w: [outputs, inputs], any float dtype.
        scale_dtype: what the checkpoint holds scales in; the weights are rounded by such ones.
        dtype: E4M3 or E5M2.
        input_absmax: [inputs] or [], of calibration: inputs have a static scale.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    scales = fp8_scales(w, dtype, block).to(scale_dtype).float()
    input_scale = None
    if input_absmax is not None:
        input_scale = fp8_scale(input_absmax.amax().reshape(1), E4M3).to(scale_dtype).float()
    return Float8(round_fp8(w, scales, dtype, block), scales, block, input_scale)
