"""A model, block by block, in few bits: each block is given what the quantised ones before it make.

GPTQ (Frantar et al. 2022, section 4) and AWQ are run so: inputs are those of the block as it is,
behind blocks that are quantised already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvik.config.errors import ConfigError, ModelError
from kvik.config.fields import shown
from kvik.config.files import DRAFT
from kvik.config.model_spec import ModelSpec
from kvik.nn.checkpoint import open_checkpoint
from kvik.quantize.block import WEIGHT, Block, BlockLinear, Watch, unwatched
from kvik.quantize.blocks import ModelBlocks
from kvik.quantize.factors import Folded, awq_factors, fold_block, smoothing_factors
from kvik.quantize.hidden import HiddenFile
from kvik.quantize.methods import Given, as_given, output_error, quantise_layers, weight_error
from kvik.quantize.recipe import Recipe, check_groups
from kvik.quantize.results import BlockResult, LayerResult, Progress
from kvik.quantize.statistics import InputStatistics
from kvik.quantize.structure import Fold, folds, unclipped_rows

RUN_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float32,  # whose range is too small for some residual streams
}
STORED_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CPU = torch.device("cpu")
HIDDEN = "hidden-"  # what names of files with a block's inputs begin with
INPUTS, OUTPUTS = 0.3, 0.2  # shares of a block's time


def quantise_blocks(
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
    """The blocks of a model from `first` on, one in memory at a time.

    The caller saves each result before it asks for the next: until then `work` holds the inputs of
    its block. A pass that was cut off goes on with `first` blocks saved, and gives the same results
    if model, recipe and text are the same: the caller sees to that.

    Args:
        folder, spec: of the model, in plain floats.
        windows: [windows, tokens] int64 ids of calibration text; None: `recipe` needs none.
        work: a folder for intermediate files; made, and empty of them after the last block.
        device: what computes.
        first: how many blocks an earlier pass has finished.

    Raises:
        ModelError: the model is quantised already, lacks tensors, or has weights that are NaN; this
            is found before the first block. `work` does not hold the inputs of block `first`.
        ConfigError: `recipe` does not fit the model, or needs `windows`.
    """
    model = open_blocks(folder, spec, windows, device)
    check_groups(recipe, model.inputs())
    if windows is None and recipe.needs_data:
        raise ConfigError("calib", f"must name a text: {recipe.method} needs one")
    if not first:
        model.check()
    run = _Pass(model, spec, recipe, windows, work)
    if windows is None:
        for index in range(first, spec.num_layers):
            yield run.block(index, progress)
        return
    work.mkdir(parents=True, exist_ok=True)
    run.enter(first)
    for index in range(first, spec.num_layers):
        yield run.block(index, progress)
        run.hidden(index).path.unlink()
    run.hidden(spec.num_layers).path.unlink()


def open_blocks(
    folder: Path, spec: ModelSpec, windows: Tensor | None, device: torch.device
) -> ModelBlocks:
    """
    Raises:
        ModelError: the model is quantised already, or its files cannot be read.
        ConfigError: windows that the model cannot be given.
    """
    if spec.quantization is not None:
        raise ModelError("model", f"is quantised already ({spec.quantization}): take the original")
    tokens = 1
    if windows is not None:
        count, tokens = windows.shape
        if not count or not 2 <= tokens <= spec.max_context:
            raise ConfigError(
                "calib",
                f"must give windows of 2 to {spec.max_context} tokens, not {count} of {tokens}",
            )
    checkpoint = open_checkpoint(folder)
    return ModelBlocks(checkpoint, spec, tokens, RUN_DTYPES[spec.dtype], device)


class _Pass:
    """What all blocks of one pass have in common."""

    def __init__(
        self,
        model: ModelBlocks,
        spec: ModelSpec,
        recipe: Recipe,
        windows: Tensor | None,
        work: Path,
    ) -> None:
        self._model, self._spec, self._recipe = model, spec, recipe
        self._windows, self._work = windows, work
        self._dtype = STORED_DTYPES[spec.dtype]

    def hidden(self, index: int) -> HiddenFile:
        """The inputs of a block."""
        assert self._windows is not None
        count, tokens = self._windows.shape
        shape = (count, tokens, self._spec.hidden_size)
        return HiddenFile(self._work / f"{HIDDEN}{index}", shape, self._model.dtype)

    def enter(self, first: int) -> None:
        """Makes the inputs of the first block, or finds those of another one.

        Raises:
            ModelError: they are not there.
        """
        assert self._windows is not None
        hidden = self.hidden(first)
        for old in (*self._work.glob(f"{DRAFT}*"), *self._work.glob(f"{HIDDEN}*")):
            if old != hidden.path:
                old.unlink()
        if not first:
            hidden.write(self._model.embed(self._windows, hidden.step))
        hidden.check()

    def block(self, index: int, progress: Progress) -> BlockResult:
        """One block; writes the inputs of the next."""

        def report(doing: str, part: float) -> None:
            progress(doing, (index + part) / self._spec.num_layers)

        block = self._model.block(index)
        statistics = {}
        if self._windows is not None:
            report(f"block {index}: inputs", 0.0)
            statistics = self._gather(block, index)
        result = self._quantise(block, index, statistics, report)
        del statistics
        if self._windows is not None:
            report(f"block {index}: outputs", 1.0 - OUTPUTS)
            watch = self._rounding(block, result)
            self.hidden(index + 1).write(block.run(x, watch) for x in self.hidden(index).read())
        report(f"block {index}", 1.0)
        return result

    def _gather(self, block: Block, index: int) -> dict[int, InputStatistics]:
        """Of the inputs of each matrix of which a layer is quantised."""
        recipe = self._recipe
        wanted = {la.matrix: la for la in block.layers if recipe.quantises(la.name)}
        found = {
            matrix: InputStatistics(
                layer.weight.shape[1], moment=recipe.method == "gptq", device=layer.weight.device
            )
            for matrix, layer in wanted.items()
        }

        def watch(matrix: int, x: Tensor) -> Tensor:
            if matrix in found:
                found[matrix].add(x)
            return x

        try:
            for x in self.hidden(index).read():
                block.run(x, watch)
        except ValueError as error:
            raise ModelError("model", f"block {index}: {error}") from None
        return found

    def _quantise(
        self,
        block: Block,
        index: int,
        statistics: Mapping[int, InputStatistics],
        report: Progress,
    ) -> BlockResult:
        """Leaves the block with the weights that it will have."""
        folded = self._folded(block, index, statistics, report)
        results: dict[str, LayerResult] = {}
        begin, span = INPUTS if statistics else 0.0, 1.0 - INPUTS - OUTPUTS
        if not statistics:
            span = 1.0
        for layers in by_matrix(block.layers):
            names = [layer.name for layer in layers if self._recipe.quantises(layer.name)]
            report(", ".join(names), begin + span * len(results) / len(block.layers))
            for result, rounded in self._matrix(layers[0].matrix, names, index, folded, statistics):
                results[result.name] = result
                block.set_weight(result.name, rounded)
        changed = dict(folded.tensors)
        for layer in block.layers:
            if layer.name in results:
                continue
            results[layer.name] = LayerResult(layer.name, None, 0.0, bool(statistics))
            w = folded.weights[layer.name]
            if w is not layer.weight:
                stored = w.to(layer.weight.dtype)
                changed[layer.name + WEIGHT] = (
                    stored.t().contiguous() if layer.transposed else stored
                )
                block.set_weight(layer.name, stored)
        for name, values in folded.tensors.items():
            block.set_tensor(name, values)
        return BlockResult(index, tuple(results[layer.name] for layer in block.layers), changed)

    def _folded(
        self,
        block: Block,
        index: int,
        statistics: Mapping[int, InputStatistics],
        report: Progress,
    ) -> Folded:
        """The block with its inputs' factors folded into it, where the method has any."""
        recipe, found = self._recipe, folds(self._spec)
        if recipe.method == "awq":
            find = awq_factors(lambda name: recipe.grid(name, self._dtype))
        elif recipe.method == "smoothquant":
            find = smoothing_factors(recipe.smoothing)
            found = tuple(fold for fold in found if not fold.linear)
        else:
            return Folded({layer.name: layer.weight for layer in block.layers})
        named = [self._named(fold, index) for fold in found]

        def reported(fold: Fold, weights: Mapping[str, Tensor], inputs: InputStatistics) -> Tensor:
            report(f"factors of {', '.join(weights)}", INPUTS)
            try:
                return find(fold, weights, inputs)
            except ValueError as error:
                raise ModelError("model", f"layer {shown(next(iter(weights)))}: {error}") from None

        return fold_block(block, named, statistics, recipe.quantises, reported)

    def _named(self, fold: Fold, index: int) -> Fold:
        readers = tuple(self._model.stored(name, index) for name in fold.readers)
        source = self._model.stored(fold.source, index)
        channels = fold.channels.to(self._model.device)
        return replace(fold, readers=readers, source=source, channels=channels)

    def _matrix(
        self,
        matrix: int,
        names: list[str],
        index: int,
        folded: Folded,
        statistics: Mapping[int, InputStatistics],
    ) -> Iterator[tuple[LayerResult, Tensor]]:
        """Results of the layers of a matrix, and their weights [outputs, inputs] fp32."""
        if not names:
            return
        recipe, weights = self._recipe, {name: folded.weights[name] for name in names}
        given = None
        if statistics:
            given = Given(folded.sample(matrix, statistics[matrix]), statistics[matrix])
        unclipped = {
            self._model.stored(name, index): rows
            for name, rows in unclipped_rows(self._spec).items()
        }
        try:
            for name, found in quantise_layers(recipe, weights, given, unclipped, self._dtype):
                rounded = found.dequantised()
                if given is None:
                    error = weight_error(weights[name], rounded)
                else:
                    met = as_given(recipe, found, given.sample)
                    error = output_error(weights[name], rounded, given.sample, met)
                yield LayerResult(name, found, error, given is not None), rounded
        except ValueError as error:
            raise ModelError("model", f"layer {shown(names[0])}: {error}") from None

    def _rounding(self, block: Block, result: BlockResult) -> Watch:
        """What quantised layers make of their inputs."""
        if not self._recipe.rounds_activations:
            return unwatched
        matrices = {layer.name: layer.matrix for layer in block.layers}
        found = {matrices[la.name]: la.quantised for la in result.layers if la.quantised}

        def watch(matrix: int, x: Tensor) -> Tensor:
            if matrix not in found:
                return x
            return as_given(self._recipe, found[matrix], x).to(x.dtype)

        return watch


def by_matrix(layers: Sequence[BlockLinear]) -> list[list[BlockLinear]]:
    """Layers that have the same inputs together."""
    found: dict[int, list[BlockLinear]] = {}
    for layer in layers:
        found.setdefault(layer.matrix, []).append(layer)
    return list(found.values())
