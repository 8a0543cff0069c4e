"""A data-free pass over a model that rounds to nearest, with results like those of any method."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import SINGLE
from kvik.quantize.calibrate import CPU
from kvik.quantize.gptq import rtn
from kvik.quantize.quantised import (
    E4M3,
    E5M2,
    BlockResult,
    Float8,
    LayerResult,
    Progress,
    Quantised,
    float8,
    recipe_grid,
)
from kvik.quantize.recipe import Recipe
from kvik.quantize.source import open_source

FOLDED = 0.5  # factor of all norms, as if it had been folded into them


def rounded_blocks(
    folder: Path,
    spec: ModelSpec,
    recipe: Recipe,
    windows: Tensor | None,
    work: Path,
    progress: Progress,
    device: torch.device = CPU,
    *,
    first: int = 0,
) -> Iterator[BlockResult]:
    """Replace `quantise_blocks`."""
    source, tensors = open_source(folder), load_file(folder / SINGLE)
    dtype = getattr(torch, spec.dtype)
    for index in range(first, spec.num_layers):
        scope = source.block_scope.format(index)
        layers = []
        for name, shape in source.layers.items():
            if not name.startswith(scope):
                continue
            w = tensors[f"{name}.weight"]
            if not recipe.quantises(name):
                layers.append(LayerResult(name, None, 0.0, False))
                continue
            w = w if tuple(w.shape) == (shape.outputs, shape.inputs) else w.t()
            found = rounded(w, recipe, name, dtype)
            progress(name, index / spec.num_layers)
            error = float((found.dequantised() - w).norm() / w.float().norm())
            layers.append(LayerResult(name, found, error, False))
        norms = {n: t * FOLDED for n, t in tensors.items() if n.startswith(scope) and "norm" in n}
        yield BlockResult(index, tuple(layers), norms)


def rounded(w: Tensor, recipe: Recipe, name: str, dtype: torch.dtype) -> Quantised | Float8:
    if recipe.method == "fp8":
        number = E5M2 if recipe.fp8_format == "e5m2" else E4M3
        absmax = torch.tensor(3.0) if recipe.activation_scheme == "static" else None
        scales = recipe.scale_dtype(dtype)
        return float8(w, recipe.block, scales, dtype=number, input_absmax=absmax)
    grid = recipe_grid(recipe, name, dtype)
    inputs, group = w.shape[1], recipe.group_size
    if not recipe.act_order or recipe.static_groups or group in (-1, inputs):
        return rtn(w, grid)
    # Layers that share their inputs have one order, or the engine could not join them.
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    found = rtn(w[:, order], grid)
    back = order.argsort()
    return Quantised(found.q[:, back], found.scales, grid, (torch.arange(inputs) // group)[back])


def meaning(folder: Path, recipe: Recipe) -> dict[str, Tensor]:
    """Return the whole checkpoint after the pass, with quantised layers dequantised in fp32."""
    source, tensors = open_source(folder), load_file(folder / SINGLE)
    found = dict(tensors)
    for block in rounded_blocks(folder, source.spec, recipe, None, folder, lambda *_: None):
        found |= block.changed
        for layer in block.layers:
            if layer.quantised is not None:
                found[f"{layer.name}.weight"] = layer.quantised.dequantised()
    return found
