"""E4M3 times E4M3 by cuBLAS, through torch: scales of rows, of the whole, or of square blocks.

What torch 2.11 to 2.13 ask for (aten/src/ATen/native/cuda/ScaledBlas.cpp): x by rows, the weight by
columns, both with multiples of 16 inputs and outputs; fp32 scales of the whole as [1] each; those
of rows as [tokens, 1] and [1, outputs] with a bfloat16 result; those of blocks as [tokens, blocks]
with tokens next to each other and a multiple of 4 of them, and [blocks of inputs, blocks of
outputs] with inputs next to each other, filled up to a multiple of 4, on Hopper alone.

Floor: 2 * tokens * rows * inputs operations at twice the rate of bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

SQUARE = 128  # inputs, and outputs, of a block
TOKEN_STEP = 4  # tokens of products with scales of blocks

# (x [tokens, inputs], weight [inputs, outputs], scales of x, how, scales of the weight, how, dtype)
# -> [tokens, outputs]
Product = Callable[[Tensor, Tensor, Tensor, ScalingType, Tensor, ScalingType, torch.dtype], Tensor]


def scaled_mm(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    x_scaling: ScalingType,
    scales: Tensor,
    scaling: ScalingType,
    dtype: torch.dtype,
) -> Tensor:
    """See `Product`."""
    return torch.nn.functional.scaled_mm(
        x, weight, x_scales, x_scaling, scales, scaling, output_dtype=dtype
    )


def product(
    codes: Tensor, x_scales: Tensor, values: Tensor, scales: Tensor, multiply: Product = scaled_mm
) -> Tensor:
    """Multiply, where each row of the weight and each token has a scale.

    Args:
        codes: [tokens, inputs]. values: [rows, inputs]; both E4M3.
        x_scales: [tokens]. scales: [rows]; both fp32.

    Returns:
        [tokens, rows] bf16.
    """
    row_wise = ScalingType.RowWise
    by_column, by_row = x_scales[:, None], scales[None, :]
    return multiply(codes, values.t(), by_column, row_wise, by_row, row_wise, torch.bfloat16)


def product_of_wholes(
    codes: Tensor, x_scale: Tensor, values: Tensor, scale: Tensor, multiply: Product = scaled_mm
) -> Tensor:
    """Multiply, where the whole weight has one scale and all tokens have one.

    So do calibrated layers that were not joined with others, whose scales differ.

    Args:
        codes: [tokens, inputs]. values: [rows, inputs]; both E4M3.
        x_scale, scale: [1] fp32.

    Returns:
        [tokens, rows] bf16.
    """
    one = ScalingType.TensorWise
    return multiply(codes, values.t(), x_scale, one, scale, one, torch.bfloat16)


def product_of_blocks(
    codes: Tensor, x_scales: Tensor, values: Tensor, scales: Tensor, multiply: Product = scaled_mm
) -> Tensor:
    """Multiply, where square blocks of the weight have a scale, and as many inputs of each token.

    Args:
        codes: [tokens, inputs], tokens filled up to a multiple of 4. values: [rows, inputs]; E4M3.
        x_scales: [inputs / 128, tokens]. scales: [rows / 128, inputs / 128 up to a multiple of 4];
            both fp32.

    Returns:
        [tokens, rows] bf16.
    """
    tokens, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return multiply(codes, values.t(), x_scales.t(), tokens, scales.t(), blocks, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Library:
    """What a device and its libraries can do with E4M3.

    Attributes:
        tensor_cores: multiply it at all.
        rows: `product` and `product_of_wholes` can be called.
        blocks: `product_of_blocks` can be called.
        multiply: by what.
    """

    tensor_cores: bool
    rows: bool
    blocks: bool
    multiply: Product = scaled_mm


def library_of(device: torch.device) -> Library:
    """On anything but a GPU kernels run in Triton's interpreter, which has no products of E4M3."""
    if device.type != "cuda":
        return Library(tensor_cores=False, rows=False, blocks=False)
    capability = torch.cuda.get_device_capability(device)
    return Library(capability >= (8, 9), rows=capability >= (8, 9), blocks=capability == (9, 0))
