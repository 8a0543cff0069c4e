"""Round to nearest: float weights -> eight or four bits, without data to calibrate on.

A weight is `values`, [outputs, inputs] of any float dtype; if one is NaN or infinite, a ValueError
is raised. Works on a few rows at a time, so that the fp32 copies are small compared to the weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvik.kernels.fp8 import PIECE, ROW, fp8_scales, round_fp8
from kvik.kernels.weights import E2M1, Weight, fp8_weight, int4_weight, int8_weight, mxfp4_weight
from kvik.spec.weight_kind import MX_GROUP

INT8_MAX = 127
INT4_MAX = 15
E8M0_BIAS = 127


def round_int8(values: Tensor, quantize_activations: bool) -> Weight:
    """Round to int8, symmetric, with one scale for each output: absmax / 127."""
    rounded = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    scales = torch.empty(len(values), dtype=torch.float32, device=values.device)
    for rows, wide in _row_ranges(values):
        scale = _nonzero(_finite(_absmax(wide)).div_(INT8_MAX))
        q = wide.div_(scale[:, None]).round_()
        # With a scale so small that it has lost digits, q could exceed the range.
        rounded[rows] = q.clamp_(-INT8_MAX, INT8_MAX)
        scales[rows] = scale
    return int8_weight(rounded, scales, quantize_activations)


def round_int4(values: Tensor, group: int) -> Weight:
    """Round to four bits with one scale for each `group` neighbouring inputs of an output.

    The range, which always includes 0, is spread over 0..15 with an integer zero point, so that 0
    stays exactly 0. Scales have eleven binary digits.

    Args:
        group: even, divides the inputs.
    """
    outputs, inputs = values.shape
    groups = (outputs, inputs // group)
    packed = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(groups, dtype=torch.float32, device=values.device)
    zeros = torch.empty(groups, dtype=torch.uint8, device=values.device)
    # No weight is more than 31 steps from 0, even with a scale too small to have any digits left,
    # so eight bits suffice for every q before it is clamped.
    for rows, wide in _row_ranges(values):
        grouped = wide.view(len(wide), -1, group)  # [rows, groups, group]
        low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
        # Divide first: the difference of two finite numbers may be infinite.
        scale = _short(_finite(high.div_(INT4_MAX) - low / INT4_MAX))
        zero = low.neg_().div_(scale).round_().clamp_(0, INT4_MAX).to(torch.int8)
        q = grouped.div_(scale[:, :, None]).round_().to(torch.int8)
        q = q.add_(zero[:, :, None]).clamp_(0, INT4_MAX)
        zeros[rows] = zero
        # Two bytes of four bits each, 0000aaaa 0000bbbb, become one: bbbbaaaa.
        pairs = q.view(len(wide), -1).view(torch.int16)
        packed[rows] = pairs | pairs >> 4
        scales[rows] = scale
    return int4_weight(packed, scales, zeros, group)


def round_to_fp8(values: Tensor) -> Weight:
    """Round to E4M3 with one scale for each output: absmax / 448."""
    scales = fp8_scales(values, torch.float8_e4m3fn, ROW)
    return fp8_weight(round_fp8(values, scales, torch.float8_e4m3fn, ROW), scales[:, 0])


def round_mxfp4(values: Tensor) -> Weight:
    """Round to E2M1 with a power of two for each 32 neighbouring inputs of an output, which scales
    the largest of them to at least 4 and below 8; numbers above 6 become 6 (OCP Microscaling
    Formats v1.0, section 6.3). 32 divides the inputs.
    """
    outputs, inputs = values.shape
    packed = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=values.device)
    groups = (outputs, inputs // MX_GROUP)
    scales = torch.empty(groups, dtype=torch.uint8, device=values.device)
    # Midpoints between the numbers of E2M1. Ties go to the even code: if that is the upper one, the
    # bound is the next smaller fp32 number.
    bounds = torch.tensor(E2M1[:8]).unfold(0, 2, 1).mean(1)
    bounds[1::2] = bounds[1::2].nextafter(torch.zeros(()))
    bounds = bounds.to(values.device)
    for rows, wide in _row_ranges(values):
        grouped = wide.view(len(wide), -1, MX_GROUP)
        # frexp returns a mantissa of at least a half and below 1.
        exponent = torch.frexp(_finite(_absmax(grouped)))[1].sub_(3).clamp_(min=-E8M0_BIAS)
        inverse = (E8M0_BIAS - exponent << 23).view(torch.float32)
        grouped = grouped.mul_(inverse[:, :, None]).view(len(wide), -1, 2)
        q = torch.bucketize(grouped.abs(), bounds, out_int32=True).to(torch.uint8)
        q |= (grouped < 0).to(torch.uint8) << 3
        packed[rows] = q[:, :, 0] | q[:, :, 1] << 4
        scales[rows] = (exponent + E8M0_BIAS).to(torch.uint8)
    return mxfp4_weight(packed, scales)


def round_tokens(x: Tensor, group: int = 0) -> Tensor:
    """Round each token to eight bits: symmetric, scale = absmax / 127, ties to even.

    Args:
        x: [tokens, inputs], any float dtype.
        group: neighbouring inputs of a token that share a scale; 0: all of them.

    Returns:
        The result in fp32, multiplied by the scales again.
    """
    wide = x.float()
    if group:
        parts = [round_tokens(part) for part in wide.split(group, dim=-1)]
        return torch.cat(parts, dim=-1)
    scale = _nonzero(wide.abs().amax(-1, keepdim=True) / INT8_MAX)
    return (wide / scale).round_().mul_(scale)


def _row_ranges(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield ranges of rows, and a copy of these rows in fp32."""
    rows = max(1, PIECE // values.shape[1])
    for start in range(0, len(values), rows):
        piece = slice(start, start + rows)
        wide = torch.empty(values[piece].shape, dtype=torch.float32, device=values.device)
        yield piece, wide.copy_(values[piece])


def _absmax(x: Tensor) -> Tensor:
    """Return the largest magnitude over the last axis, without a copy of x; NaN if there is one."""
    return torch.maximum(x.amax(-1), x.amin(-1).neg_())


def _finite(largest: Tensor) -> Tensor:
    """Check and return the largest magnitudes.

    Raises:
        ValueError: one is NaN or infinite, and so is a weight.
    """
    if not bool(largest.isfinite().all()):
        raise ValueError("its weights hold NaN or infinity, which cannot be quantised")
    return largest


def _short(scale: Tensor) -> Tensor:
    """Round scales of groups to the eleven binary digits that kernels store, so that values are
    rounded with the same scale that they are multiplied by later."""
    bits = scale.view(torch.int32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF  # half to even
    return _nonzero(rounded.view(torch.float32))


def _nonzero(scale: Tensor) -> Tensor:
    """Replace scales of 0 by 1."""
    return scale.masked_fill_(scale == 0, 1.0)
