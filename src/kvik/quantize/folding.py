"""Factors of a layer's inputs, and where their inverse goes: W x = (W diag(s)) (diag(1/s) x).

The operation before the layer gives x / s: a norm by its weight, a linear layer by its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scale_inputs(w: Tensor, scales: Tensor) -> Tensor:
    """W diag(s), [outputs, inputs] fp32."""
    return w.float() * scales


def kept_scales(weight: Tensor, scales: Tensor) -> Tensor:
    """The factors near `scales` that a norm can take without its gain being rounded: what the
    layers behind it are multiplied with. 1 where its dtype does not reach. [inputs] fp32.

    Args:
        weight: [inputs], the gain in the dtype of the checkpoint.
    """
    kept = weight.float() / _divided(weight, scales).float()
    kept = kept.masked_fill(~(kept.isfinite() & (kept > 0)), 1.0)
    return torch.where(weight == 0, scales, kept)


def fold_into_norm(
    weight: Tensor, bias: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A norm whose result is 1/s of what it was.

    Args:
        weight: [inputs], what the normalised values are multiplied with.
        bias: [inputs]; None: there is none.
        scales: [inputs].

    Returns:
        Both in the dtypes they had.
    """
    return _divided(weight, scales), None if bias is None else _divided(bias, scales)


def fold_into_linear(
    weight: Tensor, bias: Tensor | None, scales: Tensor
) -> tuple[Tensor, Tensor | None]:
    """A linear layer whose outputs are 1/s of what they were.

    Between the layers there may be what is linear in each channel: attention after the value
    projection, the product with the gate after the up projection. Heads that share a value need
    equal factors: average mean |x| over them before the search, and give the shared ones here.

    Args:
        weight: [outputs, inputs].
        bias: [outputs]; None: there is none.
        scales: [outputs].

    Returns:
        Both in the dtypes they had.
    """
    folded = _divided(weight, scales[:, None])
    return folded, None if bias is None else _divided(bias, scales)


def _divided(values: Tensor, scales: Tensor) -> Tensor:
    return (values.float() / scales).to(values.dtype)
