"""How many bits each layer gets when only so many are there on average: by measured sensitivity.

The layers of one matrix (q, k and v, say) have the same bits, or no kernel could multiply them
together. What a matrix loses is measured at the output of its block, where the residual stream is
what all that follows sees: || y' - y ||^2 / || y ||^2 with this matrix alone rounded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ConfigError
from kvik.files import write_whole
from kvik.models.model_spec import ModelSpec
from kvik.quantize.block import Block, BlockLinear, unwatched
from kvik.quantize.calibrate import CPU, STEP_TOKENS, STORED_DTYPES, by_matrix, open_blocks
from kvik.quantize.gptq import rtn
from kvik.quantize.recipe import MANY, Recipe, check_groups
from kvik.quantize.results import Progress
from kvik.quantize.sensitivity import Candidate, choose_formats
from kvik.spec.fields import read_json

CHOICE = "layer_bits.json"
BYTE = 8


def choose_bits(
    folder: Path,
    spec: ModelSpec,
    recipe: Recipe,
    windows: Tensor,
    work: Path,
    progress: Progress,
    device: torch.device = CPU,
) -> Recipe:
    """The recipe with `layer_bits` for its `average_bits`; as it is without a budget.

    Args:
        windows: [windows, tokens] int64; a few of them are used.
        work: remembers the choice, so that a pass that was cut off goes on with it.

    Raises:
        ModelError, ConfigError: as `quantise_blocks`.
    """
    if recipe.average_bits is None:
        return recipe
    if (work / CHOICE).is_file():
        return recipe.with_layer_bits(_remembered(work / CHOICE))
    model = open_blocks(folder, spec, windows, device)
    check_groups(recipe, model.inputs())
    model.check()
    dtype = STORED_DTYPES[spec.dtype]
    some = windows[:: -(-windows.numel() // STEP_TOKENS)]
    x = torch.cat(list(model.embed(some, len(some))))
    names: list[list[str]] = []
    candidates: list[list[Candidate]] = []
    total = 0
    for index in range(spec.num_layers):
        block = model.block(index)
        y = block.run(x, unwatched)
        for together in by_matrix(block.layers):
            layers = [layer for layer in together if recipe.quantises(layer.name)]
            if not layers:
                continue
            progress(f"sensitivity of {layers[0].name}", index / spec.num_layers)
            names.append([layer.name for layer in layers])
            found = []
            for bits in (recipe.bits, MANY):
                tried = recipe.with_layer_bits(dict.fromkeys(names[-1], bits))
                loss = _loss(block, layers, tried, dtype, x, y)
                weights = sum(layer.weight.numel() for layer in layers)
                found.append(Candidate(str(bits), weights * bits // BYTE, loss))
            candidates.append(found)
            total += sum(layer.weight.numel() for layer in layers)
        x = y
    if not candidates:
        raise ConfigError("skip", "leaves no layer to quantise")
    choice = choose_formats(candidates, int(total * recipe.average_bits / BYTE))
    chosen = {
        name: int(bits)
        for layers, bits in zip(names, choice.formats, strict=True)
        for name in layers
    }
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / CHOICE, json.dumps(chosen, indent=1).encode())
    return recipe.with_layer_bits(chosen)


def _loss(
    block: Block,
    layers: Sequence[BlockLinear],
    recipe: Recipe,
    dtype: torch.dtype,
    x: Tensor,
    y: Tensor,
) -> float:
    """Of the outputs y [windows, tokens, hidden] of a block when some layers are rounded."""
    for layer in layers:
        block.set_weight(
            layer.name, rtn(layer.weight, recipe.grid(layer.name, dtype)).dequantised()
        )
    found = block.run(x, unwatched)
    for layer in layers:
        block.set_weight(layer.name, layer.weight)
    whole = float(y.float().square().sum(dtype=torch.float64))
    off = float((found.float() - y.float()).square().sum(dtype=torch.float64))
    return off / whole if whole else 0.0


def _remembered(path: Path) -> dict[str, int]:
    return {name: int(str(bits)) for name, bits in read_json(path).items()}
