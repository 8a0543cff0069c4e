"""A model quantised from one folder into another, block by block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.config.model_source import CONFIG
from kvik.errors import ConfigError, KvikError
from kvik.nn.safetensors_writer import Stored
from kvik.quantize.block import WEIGHT
from kvik.quantize.budget import choose_bits
from kvik.quantize.calibrate import CPU, STORED_DTYPES, quantise_blocks
from kvik.quantize.float8 import Float8
from kvik.quantize.layouts import LayerLayout, layouts, quantization_config
from kvik.quantize.output import Output, SavedLayer
from kvik.quantize.quantised import Quantised
from kvik.quantize.recipe import MANY, Recipe, check_groups
from kvik.quantize.results import BlockResult, LayerResult, Progress
from kvik.quantize.source import Source

HIDDEN_BYTES = 8  # of a number of the calibration's hidden states: two of fp32 at a time


@dataclass(frozen=True, slots=True)
class Saved:
    """
    Attributes:
        recipe: with the bits of each layer, where a budget decided them.
        layers: all linear layers of blocks.
        bytes_before, bytes_after: of all tensors.
    """

    recipe: Recipe
    layers: tuple[SavedLayer, ...]
    bytes_before: int
    bytes_after: int


def check_request(source: Source, recipe: Recipe, folder: Path, windows: Tensor | None) -> None:
    """All that can be known before work begins, and before anything is written.

    Raises:
        KvikError: the recipe does not fit the model, or the folder or its disk will not do.
    """
    check_groups(recipe, {name: shape.inputs for name, shape in source.layers.items()})
    if not any(recipe.quantises(name) for name in source.layers):
        raise ConfigError("skip", "leaves no layer to quantise")
    # with a budget, the most that layers can have
    most = {} if recipe.average_bits is None else dict.fromkeys(source.layers, MANY)
    found = layouts(recipe.with_layer_bits(most), source.layers, STORED_DTYPES[source.spec.dtype])
    if folder.exists() and not folder.is_dir():
        raise ConfigError("output", f"must be a folder, and {str(folder)!r} is a file")
    if folder.resolve() == source.folder.resolve():
        raise ConfigError("output", "must not be the model's own folder")
    need = source.num_bytes
    for name, layout in found.items():
        need += layout.num_bytes - source.tensors[name + WEIGHT].entry.size
    if windows is not None:
        need += windows.numel() * source.spec.hidden_size * HIDDEN_BYTES
    Output(folder, source).check_room(need)


def quantise_folder(
    source: Source,
    recipe: Recipe,
    windows: Tensor | None,
    output: Output,
    progress: Progress,
    device: torch.device = CPU,
) -> Saved:
    """Quantises a model and saves it; goes on with what the same call has begun before.

    Args:
        windows: [windows, tokens] ids of the calibration text; None: `recipe` needs none.
        device: what computes.

    Raises:
        KvikError: as `check_request`; weights or a text that cannot be; a file cannot be written.
    """
    check_request(source, recipe, output.folder, windows)
    with output.begin(_run(source, recipe, windows)):
        try:
            return _quantise(source, recipe, windows, output, progress, device)
        except KvikError:
            output.abandon()
            raise
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError("output", f"stopped ({why}); the same command goes on") from None


def _quantise(
    source: Source,
    recipe: Recipe,
    windows: Tensor | None,
    output: Output,
    progress: Progress,
    device: torch.device,
) -> Saved:
    folder, spec = source.folder, source.spec
    dtype, blocks = STORED_DTYPES[source.spec.dtype], spec.num_layers
    if recipe.average_bits is not None:
        assert windows is not None
        recipe = choose_bits(folder, spec, recipe, windows, output.work, progress, device)
    found = layouts(recipe, source.layers, dtype)
    first = len(output.saved())
    if first < blocks:
        results = quantise_blocks(
            folder, spec, recipe, windows, output.work, progress, device, first=first
        )
        for result in results:
            _save_block(source, result, found, output)
    total = output.finish(quantization_config(recipe, source.layers))
    layers = tuple(layer for block in output.saved() for layer in block)
    return Saved(recipe, layers, source.num_bytes, total)


def _save_block(
    source: Source, result: BlockResult, found: Mapping[str, LayerLayout], output: Output
) -> None:
    tensors: dict[str, Tensor | Stored] = {**source.block(result.index), **result.changed}
    layers = []
    for layer in result.layers:
        if layer.quantised is not None:
            del tensors[layer.name + WEIGHT]
            written = found[layer.name].tensors(layer.quantised)
            tensors |= {f"{layer.name}.{part}": tensor for part, tensor in written.items()}
            layers.append(_saved(source, layer, sum(t.nbytes for t in written.values())))
        else:
            layers.append(_saved(source, layer, source.tensors[layer.name + WEIGHT].entry.size))
    output.save_block(result.index, tensors, layers)


def _saved(source: Source, layer: LayerResult, num_bytes: int) -> SavedLayer:
    shape = source.layers[layer.name]
    bits = None
    if isinstance(layer.quantised, Quantised):
        bits = layer.quantised.grid.bits
    elif isinstance(layer.quantised, Float8):
        bits = 8
    weights = shape.inputs * shape.outputs
    return SavedLayer(layer.name, bits, weights, num_bytes, layer.error, layer.on_inputs)


def _run(source: Source, recipe: Recipe, windows: Tensor | None) -> dict[str, object]:
    """What tells this run from others: recipe, model and text."""
    model = hashlib.sha256((source.folder / CONFIG).read_bytes())
    for path in sorted({stored.path for stored in source.tensors.values()}):
        facts = path.stat()
        model.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    text = None if windows is None else hashlib.sha256(windows.cpu().numpy().tobytes()).hexdigest()
    wishes: dict[str, object] = json.loads(json.dumps(asdict(recipe)))
    return {"recipe": wishes, "model": model.hexdigest(), "text": text}
