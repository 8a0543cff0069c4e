"""E4M3 times E4M3 by cuBLAS, through torch: scales of rows, of the whole, or of square blocks.

Requirements of torch 2.11 to 2.13 (aten/src/ATen/native/cuda/ScaledBlas.cpp): x row-major, the
weight column-major, both with multiples of 16 inputs and outputs; fp32 scales of the whole as [1]
each; scales of rows as [tokens, 1] and [1, outputs] with a bfloat16 result; scales of blocks as
[tokens, blocks], contiguous in tokens, whose number is a multiple of 4, and [blocks of inputs,
blocks of outputs], contiguous in inputs and padded to a multiple of 4, only on Hopper.

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
    """Multiply with a scale for each row of the weight and each token.

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
    codes: Tensor, x_scale: Tensor, values: Tensor, scale: Tensor, multiply: Product
) -> Tensor:
    """Multiply with one scale for the whole weight and one for all tokens.

    This is for calibrated layers that were not fused with others, whose scales differ.

    Args:
        codes: [tokens, inputs]. values: [rows, inputs]; both E4M3.
        x_scale, scale: [1] fp32.

    Returns:
        [tokens, rows] bf16.
    """
    scaling = ScalingType.TensorWise
    return multiply(codes, values.t(), x_scale, scaling, scale, scaling, torch.bfloat16)


def product_of_blocks(
    codes: Tensor, x_scales: Tensor, values: Tensor, scales: Tensor, multiply: Product
) -> Tensor:
    """Multiply with a scale for each square block of the weight, and for each 128 inputs of a
    token.

    Args:
        codes: [tokens, inputs], tokens padded to a multiple of 4. values: [rows, inputs]; E4M3.
        x_scales: [inputs / 128, tokens]. scales: [rows / 128, inputs / 128 up to a multiple of 4];
            both fp32.

    Returns:
        [tokens, rows] bf16.
    """
    tokens, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return multiply(codes, values.t(), x_scales.t(), tokens, scales.t(), blocks, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Library:
    """Support for E4M3 by a device and its libraries."""

    tensor_cores: bool  # they can multiply it
    rows: bool  # `product` and `product_of_wholes` can be called
    blocks: bool  # `product_of_blocks` can be called
    multiply: Product = scaled_mm  # the function that multiplies


def library_of(device: torch.device) -> Library:
    """Return the support of a device. Without a GPU, kernels run in Triton's interpreter, which has
    no products of E4M3."""
    if device.type != "cuda":
        return Library(tensor_cores=False, rows=False, blocks=False)
    return library_on(torch.cuda.get_device_capability(device))


def library_on(capability: tuple[int, int]) -> Library:
    """See `library_of`."""
    return Library(capability >= (8, 9), rows=capability >= (8, 9), blocks=capability == (9, 0))
