"""Keys and values in few bits: int8, fp8 (E4M3) and int4, with a scale for each vector.

A vector is K or V of one token and KV head. Its rounding depends only on its own numbers, so a
token's cache does not depend on the batch, on chunks or on blocks. The dtype of a cache is the
format: int8, float8_e4m3fn, or uint8 for two numbers of four bits per byte, the first in the
low bits. csrc/kv_numbers.hpp stores exactly the same bits of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_INT8, MAX_FP8, MAX_INT4 = 127, 448, 15
# A smaller vector would have a denormal scale; it is stored as zero.
LEAST, MOST = 1e-30, 3e38
_STEP = 1 << 19  # of the bits of fp32 in the scales of four bits, which have 4 bits of mantissa

# dtype of the stored numbers -> dtype of their scales: as many bits of fp32's exponent and mantissa
# as fit, or words of 16 bits that hold a scale and a zero point.
SCALES = {
    torch.int8: torch.bfloat16,
    torch.float8_e4m3fn: torch.bfloat16,
    torch.uint8: torch.int16,
}


def round_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x to the format of a cache of `dtype`.

    A vector that contains NaN or infinity gets a scale that is not finite, and all its numbers
    become NaN.

    Args:
        x: [..., head_dim], any float dtype; for four bits head_dim is even.

    Returns:
        Numbers [..., head_dim], in four bits [..., head_dim / 2], and scales [...].
    """
    wide = x.float()
    size = wide.abs().amax(-1)  # NaN if there is one
    usable = (size >= LEAST) & (size <= MOST)
    unusable = torch.where(size < LEAST, 0.0, size)  # the scale if not usable
    if dtype == torch.uint8:
        return _round_int4(wide, usable, unusable)
    limit = MAX_INT8 if dtype == torch.int8 else MAX_FP8
    scale = torch.where(usable, size * (1 / limit), unusable).bfloat16()
    inverse = torch.where(usable, 1 / scale.float(), 0.0)[..., None]
    # The scale may have been rounded down. In eight bits, 128 would wrap around.
    steps = torch.where(usable[..., None], wide * inverse, 0.0)
    steps = steps.round() if dtype == torch.int8 else steps
    return steps.clamp(-limit, limit).to(dtype), scale


def unround_vectors(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers rounded by `round_vectors`: [..., head_dim] fp32."""
    if numbers.dtype != torch.uint8:
        return numbers.float() * scales.float()[..., None]
    q = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
    words = scales.int()
    scale = ((words & 0xFFF0) << 15).view(torch.float32)
    return (q - (words & 15)[..., None]).float() * scale[..., None]


def movable(numbers: Tensor) -> Tensor:
    """Return the same memory in a dtype that torch can copy: fp8 as bytes."""
    return numbers.view(torch.uint8) if numbers.dtype == torch.float8_e4m3fn else numbers


def _round_int4(wide: Tensor, usable: Tensor, unusable: Tensor) -> tuple[Tensor, Tensor]:
    """Round to four bits over a range that includes 0, so that 0 stays exact."""
    low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
    # Divide each first: the difference of two finite numbers may be infinite.
    scale = torch.where(usable, high * (1 / MAX_INT4) - low * (1 / MAX_INT4), unusable)
    bits = scale.view(torch.int32)
    rounded = (bits + (_STEP // 2 - 1) + (bits // _STEP & 1)) // _STEP * _STEP
    rounded = torch.where(scale.isnan(), 0x7FC00000, rounded)
    inverse = torch.where(usable, 1 / rounded.view(torch.float32), 0.0)
    zero = torch.where(usable, -low * inverse, 0.0).round().clamp(max=MAX_INT4)
    steps = torch.where(usable[..., None], wide * inverse[..., None], 0.0).round()
    q = (steps + zero[..., None]).clamp(0, MAX_INT4).to(torch.uint8)
    words = (rounded >> 15 | zero.int()).to(torch.int16)
    return q[..., 0::2] | q[..., 1::2] << 4, words
