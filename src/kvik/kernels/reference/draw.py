"""One token per row by inverse CDF."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.draws import Draws
from kvik.kernels.reference.truncation import truncate


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """logits [n, vocab] -> [n] int64: the first token whose cumulative weight exceeds u times the
    total."""
    weights = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    weights.div_(draws.temperature[:, None]).exp_()
    cumulative = truncate(weights, draws.truncation).cumsum(-1, dtype=torch.float64)
    # u is at most 1 - 2^-53, so the product is below the total however it is rounded
    point = draws.uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]
