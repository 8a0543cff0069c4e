"""Quantise the layers of one matrix, which have the same inputs, by each method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvik.kernels.rounding import round_tokens
from kvik.quantize.factors import InputStatistics, clip, search_clip
from kvik.quantize.gptq import gptq, rtn
from kvik.quantize.quantised import E4M3, E5M2, Float8, Grid, Quantised, Scales, float8, recipe_grid
from kvik.quantize.recipe import Recipe

Result = Quantised | Float8
NARROW = 448.0  # the largest number of E4M3, which a static scale of 1 holds


@dataclass(frozen=True, slots=True)
class MatrixInputs:
    """The calibration inputs of a matrix."""

    sample: Tensor  # [tokens, inputs], divided by the factors that were folded
    statistics: InputStatistics  # of all tokens, before that division


def quantise_layers(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    inputs: MatrixInputs | None,
    unclipped: Mapping[str, int],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Result]]:
    """Quantise the layers of one matrix by the method of the recipe.

    Args:
        weights: [outputs, inputs] of each layer by name, factors folded in.
        inputs: the inputs; None: there is no calibration text, or none of it reached the layer (an
            expert that is never chosen). Then weights are rounded to nearest.
        unclipped: number of first rows that must not be clipped, by name.
        dtype: of the model.

    Raises:
        ValueError: weights or inputs are not finite, or groups do not divide the inputs.
    """
    if recipe.method == "gptq" and inputs is not None:
        yield from _gptq(recipe, weights, inputs, dtype)
        return
    for name, w in weights.items():
        if recipe.method == "fp8":
            yield name, _float8(w, recipe, inputs, dtype)
        elif recipe.method == "awq" and inputs is not None:
            yield (
                name,
                _clipped(
                    w, inputs.sample, recipe_grid(recipe, name, dtype), unclipped.get(name, 0)
                ),
            )
        else:
            yield name, rtn(w, recipe_grid(recipe, name, dtype))


def as_multiplied(recipe: Recipe, quantised: Result, x: Tensor) -> Tensor:
    """Return the inputs x [tokens, inputs] as a quantised layer uses them; fp32 if rounded."""
    if isinstance(quantised, Float8):
        return quantised.kernel_inputs(x)
    return round_tokens(x) if recipe.rounds_activations else x


def output_error(w: Tensor, rounded: Tensor, x: Tensor, multiplied: Tensor) -> float:
    """Return || W X - Q X' || / || W X ||; 0 if W X is 0.

    Args:
        w, rounded: [outputs, inputs].
        x: [tokens, inputs] fp32.
        multiplied: [tokens, inputs] fp32, X': the inputs as Q multiplies them.
    """
    exact = x @ w.float().t()
    outputs = multiplied @ rounded.t()
    norm = float(exact.norm())
    return float((exact - outputs).norm()) / norm if norm else 0.0


def weight_error(w: Tensor, rounded: Tensor) -> float:
    """Return || W - Q || / || W ||."""
    norm = float(w.float().norm())
    return float((w.float() - rounded).norm()) / norm if norm else 0.0


def _float8(w: Tensor, recipe: Recipe, inputs: MatrixInputs | None, dtype: torch.dtype) -> Float8:
    absmax = None
    if recipe.activation_scheme == "static":
        # for an expert that no token reached, the scale is 1
        absmax = torch.full((1,), NARROW) if inputs is None else inputs.statistics.absmax
    number = E5M2 if recipe.fp8_format == "e5m2" else E4M3
    scales = recipe.scale_dtype(dtype)
    return float8(w, recipe.block, scales, dtype=number, input_absmax=absmax)


def _gptq(
    recipe: Recipe, weights: Mapping[str, Tensor], inputs: MatrixInputs, dtype: torch.dtype
) -> Iterator[tuple[str, Result]]:
    """Quantise the layers, which have equal bits, as one weight: rows are independent, and so the
    second moment of the inputs is factored once."""
    result = gptq(
        torch.cat([w.float() for w in weights.values()]),
        inputs.statistics.hessian(),
        recipe_grid(recipe, next(iter(weights)), dtype),
        damping=recipe.damping,
        act_order=recipe.act_order,
        static_groups=recipe.static_groups,
    )
    first = 0
    for name, w in weights.items():
        rows = slice(first, first + len(w))
        yield name, _rows(result, rows)
        first = rows.stop


def _rows(result: Quantised, rows: slice) -> Quantised:
    zeros = result.scales.zeros
    scales = Scales(
        result.scales.scales[rows].clone(), None if zeros is None else zeros[rows].clone()
    )
    return replace(result, q=result.q[rows].clone(), scales=scales)


def _clipped(w: Tensor, x: Tensor, grid: Grid, unclipped: int) -> Quantised:
    """Clip weights if that reduces the error of the outputs; not in the first rows."""
    if unclipped == len(w):
        return rtn(w, grid)
    limits = search_clip(w[unclipped:], x, grid)
    open_limits = torch.full((unclipped, limits.shape[1]), torch.inf, device=w.device)
    return rtn(clip(w, torch.cat((open_limits, limits))), grid)
