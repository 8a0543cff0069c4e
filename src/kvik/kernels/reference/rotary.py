"""Rotary position embedding, applied to queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each head in halves: dimension i turns with dimension i + head_dim / 2
    (Su et al. 2021, in the layout of the published checkpoints; not interleaved pairs).

    Args:
        q: [tokens, heads, head_dim]. k: [tokens, kv_heads, head_dim].
        rotation: [tokens, head_dim] fp32, cosines and then sines of the angles.
    """
    cos, sin = rotation[:, None, :].chunk(2, dim=-1)  # the same for every head
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
