"""Choose the bits of each layer for a given average, by measured sensitivity.

The layers of one matrix (such as q, k and v) have equal bits, because a kernel multiplies them
together. The loss of a matrix is measured at the output y of its block, the residual stream that
all later blocks read: || y' - y ||^2 / || y ||^2 with only this matrix rounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ConfigError
from kvik.files import write_whole
from kvik.kernels.weights import DTYPES
from kvik.models.model_spec import ModelSpec
from kvik.quantize.block import Block, BlockInputs, BlockLinear, unwatched
from kvik.quantize.calibrate import CPU, STEP_TOKENS, by_matrix
from kvik.quantize.gptq import rtn
from kvik.quantize.model_blocks import open_blocks, walk
from kvik.quantize.quantised import BYTE, Progress, recipe_grid
from kvik.quantize.recipe import MANY, Recipe, check_groups
from kvik.quantize.source import keeping_floats
from kvik.spec.declare import Role
from kvik.spec.fields import read_json

# Choice of a format for each layer: the least loss within a budget of bytes.
#
# Losses are measured with one layer changed at a time and assumed to add up. Then this is the
# multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems",
# chapter 11), solved by dynamic programming.

CELLS = 1 << 15  # largest number of units that the budget is divided into


@dataclass(frozen=True, slots=True)
class Candidate:
    """The bytes of a layer in one format, and the loss of the model if this layer alone has it."""

    bytes: int
    loss: float


def choose_formats(layers: Sequence[Sequence[Candidate]], budget: int) -> list[int]:
    """Return the index of each layer's format: the least sum of losses among those that fit.

    Exact if the differences of sizes are multiples of a unit, and the budget is at most `CELLS`
    units. Otherwise they are rounded up to such a unit, which leaves at most one unit per layer
    unused: the loss is at most the optimum for a budget reduced by that. Ties go to fewer bytes,
    then to the candidate named first.

    Args:
        layers: the candidates of each.
        budget: bytes for all.

    Raises:
        ValueError: the smallest candidates do not fit, a loss is not finite, or a layer has no
            candidate.
    """
    if not all(layers):
        raise ValueError("a layer has no candidate")
    if not all(math.isfinite(c.loss) for layer in layers for c in layer):
        raise ValueError("a measured loss is not finite")
    least = [min(c.bytes for c in layer) for layer in layers]
    spare = budget - sum(least)
    if spare < 0:
        raise ValueError(f"the smallest formats take {sum(least)} bytes, the budget is {budget}")
    spare = min(spare, sum(max(c.bytes for c in layer) for layer in layers) - sum(least))
    unit = math.gcd(
        *(c.bytes - low for layer, low in zip(layers, least, strict=True) for c in layer)
    )
    unit = max(unit, -(-spare // CELLS), 1)
    return _dynamic_programme(layers, least, unit, spare // unit)


def _dynamic_programme(
    layers: Sequence[Sequence[Candidate]], least: Sequence[int], unit: int, cells: int
) -> list[int]:
    """Return the candidate of each layer: least loss in at most `cells` units beyond the least
    sizes."""
    best = torch.zeros(cells + 1, dtype=torch.float64)  # least loss of the layers so far, by cells
    picked = torch.zeros(len(layers), cells + 1, dtype=torch.int16)
    sizes = [
        [-(-(c.bytes - low) // unit) for c in layer]
        for layer, low in zip(layers, least, strict=True)
    ]
    for n, layer in enumerate(layers):
        losses = torch.full_like(best, torch.inf)
        by_size = sorted(range(len(layer)), key=lambda i: (layer[i].bytes, i))
        for i in by_size:
            size = sizes[n][i]
            if size > cells:
                continue
            tried = best[: cells + 1 - size] + layer[i].loss
            better = tried < losses[size:]
            losses[size:][better] = tried[better]
            picked[n, size:][better] = i
        best = losses
    # the first minimum takes no more cells than necessary
    left = int((best == best.min()).nonzero()[0])
    picks = []
    for n in reversed(range(len(layers))):
        picks.append(int(picked[n, left]))
        left -= sizes[n][picks[-1]]
    return picks[::-1]


CHOICE = "layer_bits.json"


def choose_bits(
    folder: Path,
    spec: ModelSpec,
    recipe: Recipe,
    windows: Tensor,
    work: Path,
    progress: Progress,
    device: torch.device = CPU,
) -> Recipe:
    """Return the recipe, which has a budget of `average_bits`, with `layer_bits`.

    Args:
        windows: [windows, tokens] int64; a few of them are used.
        work: keeps the choice, so that an interrupted pass continues with it.

    Raises:
        ModelError, ConfigError: as `quantise_blocks`.
    """
    average_bits = recipe.average_bits
    assert average_bits is not None
    if (work / CHOICE).is_file():
        return recipe.with_layer_bits(_remembered(work / CHOICE))
    model, recipe = open_blocks(folder, spec, windows, device), keeping_floats(recipe, spec)
    check_groups(recipe, model.inputs())
    model.check()
    dtype, choices = DTYPES[spec.dtype], (recipe.bits, MANY)
    some = windows[:: -(-windows.numel() // STEP_TOKENS)]
    names: list[list[str]] = []
    candidates: list[list[Candidate]] = []
    total = 0
    for index, (block, inputs, y) in enumerate(walk(model, some)):
        for together in _alike(block.layers, model.expert_roles(index)):
            layers = [layer for layer in together if recipe.quantises(layer.name)]
            if not layers:
                continue
            progress(f"sensitivity of {layers[0].name}", index / spec.num_layers)
            names.append([layer.name for layer in layers])
            found = []
            for bits in choices:
                tried = recipe.with_layer_bits(dict.fromkeys(names[-1], bits))
                loss = _loss(block, layers, tried, dtype, inputs, y)
                weights = sum(layer.weight.numel() for layer in layers)
                found.append(Candidate(weights * bits // BYTE, loss))
            candidates.append(found)
            total += sum(layer.weight.numel() for layer in layers)
    if not candidates:
        raise ConfigError("skip", "leaves no layer to quantise")
    picked = choose_formats(candidates, int(total * average_bits / BYTE))
    chosen = {name: choices[i] for alike, i in zip(names, picked, strict=True) for name in alike}
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / CHOICE, json.dumps(chosen, indent=1).encode())
    return recipe.with_layer_bits(chosen)


def _alike(
    layers: Sequence[BlockLinear], experts: Mapping[str, Role]
) -> Iterator[list[BlockLinear]]:
    """Yield layers that must have equal bits: of one matrix, or of all experts of a block."""
    of_role: dict[Role, list[BlockLinear]] = {}
    for together in by_matrix(layers):
        role = experts.get(together[0].name)
        if role is None:
            yield together
        else:
            of_role.setdefault(role, []).extend(together)
    yield from of_role.values()


def _loss(
    block: Block,
    layers: Sequence[BlockLinear],
    recipe: Recipe,
    dtype: torch.dtype,
    inputs: BlockInputs,
    y: Tensor,
) -> float:
    """Return the loss at a block's outputs y [windows, tokens, hidden] if layers are rounded."""
    for layer in layers:
        block.set_weight(
            layer.name, rtn(layer.weight, recipe_grid(recipe, layer.name, dtype)).dequantised()
        )
    found = block.run(inputs, unwatched)
    for layer in layers:
        block.set_weight(layer.name, layer.weight)
    whole = float(y.float().square().sum(dtype=torch.float64))
    off = float((found.float() - y.float()).square().sum(dtype=torch.float64))
    return off / whole if whole else 0.0


def _remembered(path: Path) -> dict[str, int]:
    return {name: int(str(bits)) for name, bits in read_json(path).items()}
