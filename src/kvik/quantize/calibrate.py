"""Quantise a model block by block: each block reads the outputs of the quantised blocks before it.

GPTQ (Frantar et al. 2022, section 4) and AWQ do the same: statistics come from the float block,
after blocks that are quantised already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from kvik.errors import ConfigError, ModelError, shown
from kvik.files import DRAFT, writing_whole
from kvik.kernels.weights import DTYPES
from kvik.models.model_spec import ModelSpec
from kvik.quantize.block import WEIGHT, Block, BlockInputs, BlockLinear, Watch, unwatched
from kvik.quantize.factors import (
    Folded,
    InputStatistics,
    awq_factors,
    fold_block,
    smoothing_factors,
)
from kvik.quantize.methods import (
    MatrixInputs,
    as_multiplied,
    output_error,
    quantise_layers,
    weight_error,
)
from kvik.quantize.model_blocks import ModelBlocks, open_blocks
from kvik.quantize.quantised import BlockResult, LayerResult, Progress, recipe_grid
from kvik.quantize.recipe import Recipe
from kvik.quantize.source import Fold, folds, unclipped_rows
from kvik.text.tokenizer import Tokenizer

# The inputs of blocks for all calibration windows are in files, not in memory.

STEP_TOKENS = 4096  # tokens that run through a block together


@dataclass(frozen=True, slots=True)
class WindowFile:
    """A file of [windows, tokens, width] in `dtype`, complete or absent."""

    path: Path
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def step(self) -> int:
        """The number of windows that are read together."""
        return max(1, STEP_TOKENS // self.shape[1])

    def check(self) -> None:
        """Check that the file is complete.

        Raises:
            ModelError: the file is missing or has another size.
        """
        count, tokens, width = self.shape
        size = count * tokens * width * self.dtype.itemsize
        if not self.path.is_file() or self.path.stat().st_size != size:
            raise ModelError(
                "work", f"{str(self.path)!r} is missing or from another run: begin again"
            )

    def read(self) -> Iterator[Tensor]:
        """Yield [up to `step`, tokens, width] at a time.

        Raises:
            ModelError: the file has become shorter.
        """
        windows, tokens, width = self.shape
        row = tokens * width * self.dtype.itemsize
        with self.path.open("rb") as file:
            for first in range(0, windows, self.step):
                count = min(self.step, windows - first)
                data = bytearray(count * row)
                if file.readinto(data) != len(data):
                    raise ModelError("work", f"{str(self.path)!r} has become shorter")
                flat = torch.frombuffer(data, dtype=self.dtype)
                yield flat.view(count, tokens, width)

    @contextmanager
    def writing(self) -> Iterator[Callable[[Tensor], None]]:
        """Return a function that writes pieces [windows, tokens, width], in order."""
        with writing_whole(self.path) as file:

            def write(piece: Tensor) -> None:
                flat = piece.to(self.dtype).cpu().contiguous().view(-1)
                file.write(flat.view(torch.uint8).numpy().data)

            yield write


# Calibration text, bundled or from a file, as windows of tokens.

BUILTIN = "builtin"
TEXT = Path(__file__).parents[1] / "bundled" / "calibration" / "text.txt"
PART = 1 << 16  # characters that are tokenised together
PROBE = 4  # at most this many times the requested tokens are read, to spread the windows over
MOST = 1 << 24  # largest number of tokens that can be requested


def calibration_windows(
    source: str | Path, tokenizer: Tokenizer, *, samples: int, tokens: int
) -> Tensor:
    """Return windows spread evenly over a text, or over the beginning of a long one.

    Args:
        source: "builtin", or a text file in UTF-8.
        samples: largest number of windows.
        tokens: of a window.

    Returns:
        [up to samples, tokens] int64.

    Raises:
        ConfigError: the file cannot be read, is not text, or is too short for one window.
    """
    for field, count, minimum in (("samples", samples, 1), ("calib_tokens", tokens, 2)):
        if count < minimum:
            raise ConfigError(field, f"must be at least {minimum}, not {count}")
    if samples * tokens > MOST:
        raise ConfigError("samples", f"must be at most {MOST // tokens} of {tokens} tokens")
    path = TEXT if source == BUILTIN else Path(source)
    try:
        with path.open(encoding="utf-8-sig") as file:
            ids = np.fromiter(islice(_ids(file, tokenizer), PROBE * samples * tokens), np.int64)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError("calib", f"cannot read {str(path)!r} ({reason})") from None
    num_windows = len(ids) // tokens
    if not num_windows:
        raise ConfigError(
            "calib",
            f"{str(source)!r} has {len(ids)} tokens, one window needs {tokens}: name a longer text "
            "or fewer tokens",
        )
    windows = torch.from_numpy(ids[: num_windows * tokens]).view(num_windows, tokens)
    num_samples = min(samples, num_windows)
    return windows[torch.arange(num_samples) * num_windows // num_samples]


def _ids(file: TextIO, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the tokens of a text, tokenised in parts that end between paragraphs or lines; within a
    very long line, between words or anywhere."""
    rest = ""
    for part in iter(lambda: file.read(PART), ""):
        rest += part
        cut = rest.rfind("\n\n") + 2 if "\n\n" in rest else rest.rfind("\n") + 1
        if not cut and len(rest) > PART:
            cut = rest.rfind(" ") if rest.rfind(" ") > 0 else len(rest)
        if cut:
            yield from tokenizer.encode(rest[:cut], add_special_tokens=False)
            rest = rest[cut:]
    yield from tokenizer.encode(rest, add_special_tokens=False)


CPU = torch.device("cpu")
# Prefixes of the files with inputs of blocks: residual stream, token inputs, keys and values.
HIDDEN, TOKENS, KV = "hidden-", "tokens-", "kv-"
INPUTS, OUTPUTS = 0.3, 0.2  # shares of a block's time, for the progress


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
    """Quantise the blocks of a model from `first` on, with one block in memory at a time.

    The caller saves each result before it asks for the next: until then `work` holds the inputs of
    that block. An interrupted pass continues with `first` blocks saved. It gives the same results
    if model, recipe and text are the same, which the caller ensures.

    Args:
        folder, spec: of the model, in plain floats.
        recipe: with the layers that stay floats skipped.
        windows: [windows, tokens] int64 ids of calibration text; None: `recipe` needs none.
        work: a folder for intermediate files; created, and cleared after the last block.
        device: of the computation.
        first: number of blocks that an earlier pass has finished.

    Yields:
        The result of each block.

    Raises:
        ModelError: the model lacks tensors, or has weights that are NaN (found before the first
            block), or `work` lacks the inputs of block `first`.
    """
    model = open_blocks(folder, spec, windows, device)
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
        run.keep(run.files(index + 1))
    run.keep(())


class _Pass:
    """One pass over the blocks of a model."""

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
        self._dtype = DTYPES[spec.dtype]

    def _file(self, name: str, width: int) -> WindowFile:
        assert self._windows is not None
        count, tokens = self._windows.shape
        return WindowFile(self._work / name, (count, tokens, width), self._model.dtype)

    def _hidden(self, index: int) -> WindowFile:
        """Return the file of the residual stream before a block, or after the last one."""
        return self._file(f"{HIDDEN}{index}", self._spec.residual_width)

    def _token_inputs(self, index: int) -> WindowFile | None:
        width = self._model.layers[index].token_input
        return self._file(f"{TOKENS}{index}", width) if width else None

    def _kv(self, index: int) -> WindowFile:
        """Return the file of keys and values of a block."""
        return self._file(f"{KV}{index}", self._model.kv_width(index))

    def files(self, first: int) -> list[WindowFile]:
        """Return the files that blocks from `first` on read and earlier blocks have written."""
        layers = self._model.layers[first:]
        owners = {layer.kv_from for layer in layers if layer.kv_from is not None}
        token_inputs = map(self._token_inputs, range(first, first + len(layers)))
        kv = (self._kv(owner) for owner in owners if owner < first)
        return [self._hidden(first), *(file for file in token_inputs if file is not None), *kv]

    def keep(self, files: Iterable[WindowFile]) -> None:
        """Delete all other files with inputs of blocks."""
        paths = {file.path for file in files}
        for prefix in (DRAFT, HIDDEN, TOKENS, KV):
            for path in self._work.glob(f"{prefix}*"):
                if path not in paths:
                    path.unlink()

    def enter(self, first: int) -> None:
        """Compute the inputs of the first block and all token inputs; or, for a later block, check
        that its inputs exist.

        Raises:
            ModelError: some are missing.
        """
        assert self._windows is not None
        self.keep(self.files(first) if first else ())
        if not first:
            input_layers = self._model.input_layers(self._windows)
            _write(self._hidden(0), input_layers.embed)
            for index in range(self._spec.num_layers):
                if (file := self._token_inputs(index)) is not None:
                    _write(file, partial(input_layers.token_inputs, index))
        for file in self.files(first):
            file.check()

    def _inputs(self, index: int) -> Iterator[BlockInputs]:
        """Yield the inputs of a block, some windows at a time."""
        owner, nothing = self._model.layers[index].kv_from, repeat(None)
        token_inputs, kv = self._token_inputs(index), None if owner is None else self._kv(owner)
        files = (nothing if file is None else file.read() for file in (token_inputs, kv))
        for x, *more in zip(self._hidden(index).read(), *files, strict=False):
            yield BlockInputs(x, *more)

    def block(self, index: int, progress: Progress) -> BlockResult:
        """Quantise one block, and write the inputs of the next."""

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
            self._run(block, index, self._rounding(block, result))
        report(f"block {index}", 1.0)
        return result

    def _run(self, block: Block, index: int, watch: Watch) -> None:
        """Run a block, and write its outputs for later blocks."""
        with ExitStack() as files:
            store = None
            if self._model.shared(index):
                store = files.enter_context(self._kv(index).writing())
            write = files.enter_context(self._hidden(index + 1).writing())
            for inputs in self._inputs(index):
                write(block.run(inputs, watch, store))

    def _gather(self, block: Block, index: int) -> dict[int, InputStatistics]:
        """Return statistics of the inputs of each matrix with a layer to quantise."""
        recipe = self._recipe
        factors = {fold.readers[0] for fold in self._folds(index)}  # searched by their inputs
        layers = {
            layer.matrix: layer
            for layer in block.layers
            if recipe.quantises(layer.name) or layer.name in factors
        }
        statistics = {
            matrix: InputStatistics(
                layer.weight.shape[1], moment=recipe.method == "gptq", device=layer.weight.device
            )
            for matrix, layer in layers.items()
        }

        def watch(matrix: int, x: Tensor) -> Tensor:
            if matrix in statistics:
                statistics[matrix].add(x)
            return x

        try:
            for inputs in self._inputs(index):
                block.run(inputs, watch)
        except ValueError as error:
            raise ModelError("model", f"block {index}: {error}") from None
        return statistics

    def _quantise(
        self, block: Block, index: int, statistics: Mapping[int, InputStatistics], report: Progress
    ) -> BlockResult:
        """Quantise the layers; the block keeps its new weights."""
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
        self, block: Block, index: int, statistics: Mapping[int, InputStatistics], report: Progress
    ) -> Folded:
        """Return the weights with the factors of the method, if it has any, folded in."""
        recipe, named = self._recipe, self._folds(index)
        if not named:
            return Folded({layer.name: layer.weight for layer in block.layers})
        if recipe.method == "awq":
            find = awq_factors(lambda name: recipe_grid(recipe, name, self._dtype))
        else:
            find = smoothing_factors(recipe.smoothing)

        def reported(fold: Fold, weights: Mapping[str, Tensor], inputs: InputStatistics) -> Tensor:
            report(f"factors of {', '.join(weights)}", INPUTS)
            try:
                return find(fold, weights, inputs)
            except ValueError as error:
                raise ModelError("model", f"layer {shown(next(iter(weights)))}: {error}") from None

        return fold_block(block, named, statistics, recipe.quantises, reported)

    def _folds(self, index: int) -> list[Fold]:
        """Return the folds of a block that the method uses, with the names of the checkpoint."""
        if self._recipe.method not in ("awq", "smoothquant"):
            return []
        linear = self._recipe.method == "awq"
        block_folds = folds(self._spec, index)
        return [self._named(fold, index) for fold in block_folds if linear or fold.outputs is None]

    def _named(self, fold: Fold, index: int) -> Fold:
        readers = tuple(self._model.stored(name, index) for name in fold.readers)
        source = self._model.stored(fold.source, index)
        channels, outputs = fold.channels.to(self._model.device), fold.outputs
        if outputs is not None:
            outputs = outputs.to(self._model.device)
        return replace(fold, readers=readers, source=source, channels=channels, outputs=outputs)

    def _matrix(
        self,
        matrix: int,
        names: list[str],
        index: int,
        folded: Folded,
        statistics: Mapping[int, InputStatistics],
    ) -> Iterator[tuple[LayerResult, Tensor]]:
        """Yield results of the layers of a matrix, and their weights [outputs, inputs] fp32."""
        if not names:
            return
        recipe, weights = self._recipe, {name: folded.weights[name] for name in names}
        inputs = None
        if statistics and statistics[matrix].tokens:  # else an expert that no token reached
            inputs = MatrixInputs(folded.sample(matrix, statistics[matrix]), statistics[matrix])
        unclipped = {
            self._model.stored(name, index): rows
            for name, rows in unclipped_rows(self._spec, index).items()
        }
        try:
            for name, result in quantise_layers(recipe, weights, inputs, unclipped, self._dtype):
                rounded = result.dequantised()
                if inputs is None:
                    error = weight_error(weights[name], rounded)
                else:
                    multiplied = as_multiplied(recipe, result, inputs.sample)
                    error = output_error(weights[name], rounded, inputs.sample, multiplied)
                yield LayerResult(name, result, error, inputs is not None), rounded
        except ValueError as error:
            raise ModelError("model", f"layer {shown(names[0])}: {error}") from None

    def _rounding(self, block: Block, result: BlockResult) -> Watch:
        """Return a watch that rounds the inputs of quantised layers like the engine."""
        if not self._recipe.rounds_activations:
            return unwatched
        matrices = {layer.name: layer.matrix for layer in block.layers}
        layers = {matrices[la.name]: la.quantised for la in result.layers if la.quantised}

        def watch(matrix: int, x: Tensor) -> Tensor:
            if matrix not in layers:
                return x
            return as_multiplied(self._recipe, layers[matrix], x).to(x.dtype)

        return watch


def _write(file: WindowFile, make: Callable[[int], Iterable[Tensor]]) -> None:
    with file.writing() as write:
        for piece in make(file.step):
            write(piece)


def by_matrix(layers: Sequence[BlockLinear]) -> list[list[BlockLinear]]:
    """Return the layers grouped by matrix, and so by common inputs."""
    groups: dict[int, list[BlockLinear]] = {}
    for layer in layers:
        groups.setdefault(layer.matrix, []).append(layer)
    return list(groups.values())
