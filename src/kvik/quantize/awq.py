"""AWQ: inputs that matter get finer steps, by larger weights for smaller inputs.

Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
section 3.2. No weight stays in higher precision. The clip search is that of the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.quantize.folding import scale_inputs
from kvik.quantize.gptq import rtn
from kvik.quantize.grid import TENSOR, Grid
from kvik.quantize.quantised import Quantised

PIECE = 1 << 22  # numbers of a product that are held at a time
FLOOR = 1e-6  # of the largest mean |x|: what is less counts as that, or factors were too large


@dataclass(frozen=True, slots=True)
class Scaling:
    """Factors of the inputs that layers share.

    Attributes:
        scales: [inputs] fp32, above 0; what comes before gives x / scales.
        alpha: the power of mean |x| they are.
        losses: by each alpha tried, from 0 to 1: the squared error of the outputs.
    """

    scales: Tensor
    alpha: float
    losses: tuple[float, ...]


def search_scaling(
    weights: Sequence[Tensor], x: Tensor, mean_abs: Tensor, grid: Grid, *, steps: int = 20
) -> Scaling:
    """s = mean |x|^alpha with the alpha in [0, 1] that minimises
    || Q(W diag(s)) diag(s)^-1 X - W X ||^2. Ties go to the smaller alpha.

    Args:
        weights: [outputs, inputs] each, of all layers that read these inputs.
        x: [tokens, inputs], a sample of them. The transposed Cholesky factor of the second moment
            stands for all tokens.
        mean_abs: [inputs], of all tokens.
        steps: alpha goes by 1/steps.
    """
    best = torch.ones_like(mean_abs)
    losses: list[float] = []
    for step in range(steps + 1):
        scales = _powers(mean_abs, step / steps)
        loss = 0.0
        for w in weights:
            rounded = rtn(scale_inputs(w, scales), grid).dequantised().div_(scales)
            loss += _squared_outputs(rounded.sub_(w), x)
        if not losses or loss < min(losses):
            best = scales
        losses.append(loss)
    return Scaling(best, losses.index(min(losses)) / steps, tuple(losses))


def search_clip(
    w: Tensor, x: Tensor, grid: Grid, *, steps: int = 10, smallest: float = 0.5
) -> Tensor:
    """How far each group may reach: of some shares of its largest weight the one with the least
    squared error of the group's part of the outputs. Steps become finer, large weights are cut.

    The error of queries and keys is not that of attention: leave their weights whole.

    Args:
        w: [outputs, inputs] as it will be rounded, scaled already.
        x: [tokens, inputs], a sample of what it is multiplied with.
        smallest: the least share; `steps` lie between it and 1.

    Returns:
        [outputs, groups], or [1, 1] for a whole tensor.
    """
    width = grid.width(w.shape[1])
    grouped = x.float().reshape(len(x), -1, width).transpose(0, 1)  # [groups, tokens, width]
    moments = grouped.transpose(1, 2) @ grouped  # [groups, width, width]
    widest = w.float().reshape(len(w), -1, width).abs().amax(-1)
    if grid.group == TENSOR:
        widest = widest.amax().view(1, 1)
    limits, least = widest, torch.full_like(widest, torch.inf)
    for step in range(steps + 1):
        tried = widest * (1 - (1 - smallest) * step / steps)
        off = rtn(clip(w, tried), grid).dequantised().sub_(w)
        parts = off.view(len(w), -1, width).transpose(0, 1)  # [groups, outputs, width]
        loss = ((parts @ moments) * parts).sum(-1).t()  # [outputs, groups]
        if grid.group == TENSOR:
            loss = loss.sum().view(1, 1)
        limits = torch.where(loss < least, tried, limits)
        least = torch.minimum(loss, least)
    return limits


def clip(w: Tensor, limits: Tensor) -> Tensor:
    """w [outputs, inputs] within +-limits [outputs, groups], fp32."""
    grouped = w.float().reshape(len(w), limits.shape[1], -1)
    return grouped.clamp(-limits[:, :, None], limits[:, :, None]).view(w.shape)


def awq(w: Tensor, scales: Tensor, limits: Tensor | None, grid: Grid) -> Quantised:
    """W diag(s) in few bits, for a layer that is given x / s.

    Args:
        w: [outputs, inputs].
        scales: [inputs], of `search_scaling`.
        limits: of `search_clip` with W diag(s) and x / s; None: no weight is cut.

    Raises:
        ValueError: as `Grid.fit`.
    """
    scaled = scale_inputs(w, scales)
    return rtn(scaled if limits is None else clip(scaled, limits), grid)


def _powers(mean_abs: Tensor, alpha: float) -> Tensor:
    """mean |x|^alpha, normalised so that the largest and the smallest have the product 1. An input
    that never was anything but 0 counts as the smallest of the others."""
    live = mean_abs > 0
    if not bool(live.any()):
        return torch.ones_like(mean_abs)
    least = max(float(mean_abs[live].min()), FLOOR * float(mean_abs.max()))
    powers = mean_abs.clamp(min=least).pow(alpha)
    return powers / (powers.max() * powers.min()).sqrt()


def _squared_outputs(w: Tensor, x: Tensor) -> float:
    """|| W X ||^2, some rows of W at a time."""
    rows = max(1, PIECE // len(x))
    return sum(float((part @ x.t()).square_().sum(dtype=torch.float64)) for part in w.split(rows))
