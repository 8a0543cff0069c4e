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

from kvik.files import write_whole
from kvik.kernels.weights import DTYPES
from kvik.models.model_spec import ModelSpec
from kvik.quantize.block import Block, BlockInputs, BlockLinear, unwatched
from kvik.quantize.calibrate import CPU, STEP_TOKENS, by_matrix
from kvik.quantize.gptq import rtn
from kvik.quantize.model_blocks import open_blocks, walk
from kvik.quantize.quantised import Progress, recipe_grid
from kvik.quantize.recipe import MANY, Recipe
from kvik.spec.declared import Role
from kvik.spec.fields import read_json

# Choice of the layers that have many bits: the least loss within a budget.
#
# Losses are measured with one layer changed at a time and assumed to add up. Then this is the
# knapsack problem (Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", chapter 2), solved by
# dynamic programming.

CELLS = 1 << 15  # largest number of units that the budget is divided into


@dataclass(frozen=True, slots=True)
class Upgrade:
    """More bits for some layers: how many in total, and by how much the loss falls."""

    bits: int
    gain: float


def choose_upgrades(upgrades: Sequence[Upgrade], budget: int) -> list[bool]:
    """Return which upgrades are made: the largest sum of gains among those that fit.

    Exact if the bits are multiples of a unit, and the budget is at most `CELLS` units. Otherwise
    they are rounded up to such a unit, which leaves at most one unit per upgrade unused: the gain
    is at least the optimum for a budget reduced by that. Ties go to fewer bits, then to the first.

    Args:
        budget: bits for all.

    Raises:
        ValueError: a gain is not finite.
    """
    if not all(math.isfinite(upgrade.gain) for upgrade in upgrades):
        raise ValueError("a measured loss is not finite")
    budget = min(budget, sum(upgrade.bits for upgrade in upgrades))
    unit = max(math.gcd(*(upgrade.bits for upgrade in upgrades)), -(-budget // CELLS), 1)
    cells = budget // unit
    sizes = [-(-upgrade.bits // unit) for upgrade in upgrades]
    best = torch.zeros(cells + 1, dtype=torch.float64)  # largest gain so far, by cells
    made = torch.zeros(len(upgrades), cells + 1, dtype=torch.bool)
    for n, (size, upgrade) in enumerate(zip(sizes, upgrades, strict=True)):
        if size <= cells:
            tried = best[: cells + 1 - size] + upgrade.gain
            made[n, size:] = tried > best[size:]
            best[size:] = torch.maximum(best[size:], tried)
    # the first maximum takes no more cells than necessary
    cells_left = int((best == best.max()).nonzero()[0])
    chosen = []
    for n in reversed(range(len(upgrades))):
        chosen.append(bool(made[n, cells_left]))
        cells_left -= sizes[n] * chosen[-1]
    return chosen[::-1]


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
        recipe: with the layers that stay floats skipped.
        windows: [windows, tokens] int64; a few of them are used.
        work: keeps the choice, so that an interrupted pass continues with it.

    Raises:
        ModelError: as `quantise_blocks`.
    """
    average_bits = recipe.average_bits
    assert average_bits is not None
    if (work / CHOICE).is_file():
        return recipe.with_layer_bits(_remembered(work / CHOICE))
    model = open_blocks(folder, spec, windows, device)
    model.check()
    dtype = DTYPES[spec.dtype]
    some = windows[:: -(-windows.numel() // STEP_TOKENS)]
    names: list[list[str]] = []
    upgrades: list[Upgrade] = []
    total = 0
    for index, (block, inputs, y) in enumerate(walk(model, some)):
        for group in _alike(block.layers, model.expert_roles(index)):
            layers = [layer for layer in group if recipe.quantises(layer.name)]
            if not layers:
                continue
            progress(f"sensitivity of {layers[0].name}", index / spec.num_layers)
            names.append([layer.name for layer in layers])
            few, more = (
                _loss(
                    block,
                    layers,
                    recipe.with_layer_bits(dict.fromkeys(names[-1], bits)),
                    dtype,
                    inputs,
                    y,
                )
                for bits in (recipe.bits, MANY)
            )
            weights = sum(layer.weight.numel() for layer in layers)
            upgrades.append(Upgrade(weights * (MANY - recipe.bits), few - more))
            total += weights
    made = choose_upgrades(upgrades, int(total * average_bits) - total * recipe.bits)
    chosen = {
        name: MANY if more else recipe.bits
        for alike, more in zip(names, made, strict=True)
        for name in alike
    }
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / CHOICE, json.dumps(chosen, indent=1).encode())
    return recipe.with_layer_bits(chosen)


def _alike(
    layers: Sequence[BlockLinear], experts: Mapping[str, Role]
) -> Iterator[list[BlockLinear]]:
    """Yield layers that must have equal bits: of one matrix, or of all experts of a block."""
    of_role: dict[Role, list[BlockLinear]] = {}
    for group in by_matrix(layers):
        role = experts.get(group[0].name)
        if role is None:
            yield group
        else:
            of_role.setdefault(role, []).extend(group)
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
    output = block.run(inputs, unwatched)
    for layer in layers:
        block.set_weight(layer.name, layer.weight)
    total = float(y.float().square().sum(dtype=torch.float64))
    off = float((output.float() - y.float()).square().sum(dtype=torch.float64))
    return off / total if total else 0.0


def _remembered(path: Path) -> dict[str, int]:
    return {name: int(str(bits)) for name, bits in read_json(path).items()}
