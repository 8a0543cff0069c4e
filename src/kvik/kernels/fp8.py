"""Eight-bit floats: E4M3 and E5M2 with a scale for each block of numbers.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# The largest numbers. A cast of larger ones gives infinity in E5M2, and in E4M3 NaN or the largest
# number, depending on version and device. So values are clamped before the cast.
LARGEST: Mapping[torch.dtype, float] = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}

# Rows and columns that share a scale; 0: all of them. Blocks at the ends may be smaller.
Block = tuple[int, int]
WHOLE: Block = (0, 0)
ROW: Block = (1, 0)  # a channel of a weight, a token of activations
SQUARE: Block = (128, 128)

PIECE = 1 << 19  # numbers converted to fp32 at a time; a few copies exist at once


def fp8_scales(values: Tensor, dtype: torch.dtype, block: Block) -> Tensor:
    """Return absmax / the largest number of `dtype`, or 1 where all values are 0.

    Args:
        values: [rows, columns], any float dtype.

    Returns:
        [blocks of rows, blocks of columns] fp32.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    parts = values.split(block[1] or max(1, values.shape[1]), dim=1)
    absmax = torch.stack([torch.maximum(p.amax(1), -p.amin(1)) for p in parts], dim=1)
    band = block[0] or max(1, len(values))
    absmax = torch.nn.functional.pad(absmax, (0, 0, 0, -len(values) % band))
    absmax = absmax.view(-1, band, len(parts)).amax(1)
    return fp8_scale(absmax, dtype)


def fp8_scale(absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale for numbers up to absmax, from calibration: any shape, fp32.

    Raises:
        ValueError: absmax is NaN or infinite.
    """
    if not bool(absmax.isfinite().all()):
        raise ValueError("its values hold NaN or infinity, which cannot be quantised")
    scale = absmax.float() / LARGEST[dtype]
    return scale.masked_fill(scale == 0, 1.0)


def round_fp8(values: Tensor, scales: Tensor, dtype: torch.dtype, block: Block) -> Tensor:
    """Return values / scales, clamped and rounded: [rows, columns] of `dtype`.

    Args:
        values: [rows, columns], any float dtype; values beyond a calibrated scale are clamped.
        scales: see `fp8_scales`, or [] with `WHOLE`.
    """
    rounded = torch.empty(values.shape, dtype=dtype, device=values.device)
    limit = LARGEST[dtype]
    rows = max(1, PIECE // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        piece = slice(start, start + rows)
        steps = _spread(scales, values.shape, block, piece)
        rounded[piece] = (values[piece].float() / steps).clamp_(-limit, limit).to(dtype)
    return rounded


def unround_fp8(rounded: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return the numbers rounded by `round_fp8`: [rows, columns] fp32."""
    return rounded.float() * _spread(scales, rounded.shape, block, slice(0, len(rounded)))


def round_activations(x: Tensor, group: int = 0, scale: Tensor | None = None) -> Tensor:
    """Round each token to E4M3: x / scale, clamped and rounded, ties to even.

    Args:
        x: [tokens, inputs], any float dtype. NaN makes its token NaN, there or as a whole; so does
            infinity, but with a calibrated scale it may be clamped like any large number.
        group: neighbouring inputs of a token that share a scale; 0: all of them.
        scale: [1] fp32, from calibration, for all tokens; None: absmax / 448 of each token and
            group, or 1 where all values are 0.

    Returns:
        [tokens, inputs] fp32, multiplied by the scales again.
    """
    wide = x.float()
    if group and scale is None:
        parts = [round_activations(part) for part in wide.split(group, dim=-1)]
        return torch.cat(parts, dim=-1)
    dtype = torch.float8_e4m3fn
    if scale is None:
        scale = wide.abs().amax(-1, keepdim=True) / LARGEST[dtype]
        scale = scale.masked_fill_(scale == 0, 1.0)
    q = (wide / scale).clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return q.float().mul_(scale)


def _spread(scales: Tensor, shape: torch.Size, block: Block, rows: slice) -> Tensor:
    """Return the scale of each number of some rows; axes that share one scale have size 1."""
    spread = scales.view(1, 1) if not scales.dim() else scales
    if block[0]:
        band = torch.arange(shape[0], device=scales.device)[rows] // block[0]
        spread = spread[band]
    if block[1]:
        spread = spread.repeat_interleave(block[1], dim=1)[:, : shape[1]]
    return spread
