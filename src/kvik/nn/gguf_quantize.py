"""Weights as the blocks of a GGUF file: the inverse of `gguf_blocks`.

Rows become bytes [rows, bytes of a row] as they lie in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvik.nn.gguf_blocks import FLOAT_TYPES


def quantize(type: str, weights: Tensor) -> Tensor:
    """weights [rows, inputs] of whole blocks, any float dtype -> rows [rows, bytes] uint8.

    Types: F32, F16, BF16, Q8_0, Q4_0.
    """
    if type in FLOAT_TYPES:
        return _as_bytes(weights.to(FLOAT_TYPES[type]))
    return _QUANTIZE[type](weights)


def _as_bytes(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.uint8)


def _to_q8_0(weights: Tensor) -> Tensor:
    """Largest magnitude to 127, halves away from zero. The weights are divided by the scale before
    that is rounded to fp16, as the format's reference implementation does."""
    groups = _groups(weights)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    scaled = groups * _inverse(scales)
    whole = scaled.abs().floor()
    whole += (2 * (scaled.abs() - whole)).floor()
    return _stored(scales, (whole * scaled.sign()).to(torch.int8).view(torch.uint8))


def _to_q4_0(weights: Tensor) -> Tensor:
    """The weight of the largest magnitude to code 0, which is -8: the sign of the scale is
    chosen for that."""
    groups = _groups(weights)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = largest / -8
    codes = (groups * _inverse(scales) + 8.5).to(torch.uint8).clamp_(max=15)
    return _stored(scales, codes[..., :16] | codes[..., 16:] << 4)


def _groups(weights: Tensor) -> Tensor:
    return weights.float().reshape(len(weights), -1, 32)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


def _stored(scales: Tensor, codes: Tensor) -> Tensor:
    return torch.cat((_as_bytes(scales.to(torch.float16)), codes), dim=-1).flatten(1)


_QUANTIZE: Mapping[str, Callable[[Tensor], Tensor]] = {"Q8_0": _to_q8_0, "Q4_0": _to_q4_0}
