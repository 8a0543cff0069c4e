"""One token per row by inverse CDF, and what each token's share of the draws is."""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.kernels.draws import Draws, Truncation
from kvik.kernels.reference.truncation import truncate


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """logits [n, vocab] -> [n] int64: the first token whose cumulative weight exceeds u times the
    total."""
    weights = _weights(logits, draws.temperature, draws.truncation)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # u is at most 1 - 2^-53, so the product is below the total however it is rounded
    point = draws.uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


def probabilities(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    """logits [n, vocab] -> [n, vocab] float32, what `draw` draws from."""
    weights = _weights(logits, temperature, truncation)
    total = weights.cumsum(-1, dtype=torch.float64)[:, -1:]
    return weights.div_(total)


def _weights(logits: Tensor, temperature: Tensor, truncation: Truncation) -> Tensor:
    weights = logits.float() - logits.amax(dim=-1, keepdim=True).float()
    return truncate(weights.div_(temperature[:, None]).exp_(), truncation)
