"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): two small matrices for each adapted weight.

Their product is added to the weight, W + s B A, while the model is loaded; or each request chooses
an adapter, and a layer adds s B A x to the rows of its tokens. A folder holds the matrices as PEFT
writes it: adapter_config.json and adapter_model.safetensors, which may also hold whole tensors that
were trained, such as an embedding or biases; these can only be merged. Merged weights are then
rounded, packed and computed like any others.

For a layer, the adapters are experts that requests choose in place of a router: B A of one, with
the rank as its inner size. Their kernels are those of mixtures of experts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import NOTES_LOG, ModelError, shown
from kvik.files import ADAPTER_FILES
from kvik.kernels.ops import Ops
from kvik.kernels.weights import ExpertSet, Matrix, MatrixSpec, float_kind, float_weight
from kvik.nn.checkpoint import (
    ROW_MULTIPLE,
    Checkpoint,
    Selection,
    TensorRun,
)
from kvik.nn.formats.base import LinearShape
from kvik.nn.layers import Adapters
from kvik.nn.safetensors import FLOATS, Stored, TensorEntry, read_header
from kvik.spec.adapters import TENSOR_NAME, Adapter, in_block
from kvik.spec.fields import Fields, read_json
from kvik.spec.stored_weights import Matcher, PatternError

ADAPTER, WEIGHTS = ADAPTER_FILES
MAX_ALPHA = 1e6
TRANSPOSED = "fan_in_fan_out"
# Kinds of initial values for which the weights of the model stay unchanged; others, such as PiSSA,
# take a part out of them.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Keys of adapter_config.json that ask for more than W + s B A, and the values that do not.
# fan_in_fan_out says that the model stores [inputs, outputs].
NOTHING: tuple[object, ...] = (None, False, [], {})
REFUSED: Mapping[str, tuple[object, ...]] = {
    "init_lora_weights": PLAIN_STARTS,
    **dict.fromkeys(
        (
            *("use_dora", "lora_bias", "layer_replication", "target_parameters"),
            *("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
            "arrow_config",
        ),
        NOTHING,
    ),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a weight [outputs, inputs]: scale * b @ a. The files are read when a matrix
    is used, so that adapters are never in memory twice.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank].
        turned: both are stored transposed.
    """

    a: Stored
    b: Stored
    scale: float
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.b.entry.shape[self.turned], self.a.entry.shape[not self.turned]

    @property
    def rank(self) -> int:
        return self.a.entry.shape[self.turned]

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return a and b, in the dtypes of the file."""
        a, b = self.a.read(), self.b.read()
        return (a.t(), b.t()) if self.turned else (a, b)

    def rows(self, first: int, count: int) -> Tensor:
        """Return rows first.. of the product, [count, inputs] fp32.

        They are computed in whole tiles from row 0 on, so that their bits do not depend on the run.
        """
        start, end = first // ROW_MULTIPLE * ROW_MULTIPLE, first + count
        a, b = (matrix.float() for matrix in self.matrices())
        b *= self.scale
        tiles = [b[i : i + ROW_MULTIPLE] @ a for i in range(start, end, ROW_MULTIPLE)]
        return torch.cat(tiles)[first - start : end - start]

    def merged_into(self, run: TensorRun, selection: Selection) -> Tensor:
        """Return the values of a run with the product added, rounded once to their dtype."""
        if selection.in_runs:
            added = self.rows(run.first, len(run.values))
        else:
            added = selection.of(self.rows(0, self.shape[0]))
        return added.add_(run.values).to(run.values.dtype)


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that takes the place of the model's."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.entry.shape

    def merged_into(self, run: TensorRun, selection: Selection) -> Tensor:
        """Return the values in place of those of a run."""
        if selection.in_runs:
            values = self.stored.read(run.first, len(run.values))
        else:
            values = selection.of(self.stored.read())
        return values.to(run.values.dtype)


Change = LowRank | Whole


@dataclass(frozen=True, slots=True)
class MergedCheckpoint:
    """A checkpoint with an adapter merged into it; see `Checkpoint`.

    Attributes:
        changes: by names of tensors; those of a tensor in order.
    """

    base: Checkpoint
    changes: Mapping[str, Sequence[Change]]

    @property
    def facts(self) -> str:
        return self.base.facts

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        return self.base.entries

    def runs(self, selections: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """See `Checkpoint`."""
        for run in self.base.runs(selections):
            selection, merged = selections[run.name], run
            for change in self.changes.get(run.name, ()):
                merged = replace(merged, values=change.merged_into(merged, selection))
            yield merged


def merged(base: Checkpoint, folder: Path) -> MergedCheckpoint:
    """Return a checkpoint with the adapter of a folder merged into it.

    Raises:
        ModelError: it is not a LoRA adapter, asks for more than sums and whole tensors, or does not
            fit the checkpoint.
    """
    config = _config(folder)
    if (value := config.raw(TRANSPOSED)) not in NOTHING:
        raise config.error(TRANSPOSED, f"cannot be merged: must be left out, not {shown(value)}")
    changes, entries = _read(folder, config), base.entries
    shapes = [(name, change.shape) for name, made in changes.items() for change in made]
    for name, shape in shapes:
        entry = entries.get(name)
        if entry is None:
            raise ModelError(WEIGHTS, f"adapts {shown(name)}, which the model does not have")
        if entry.dtype not in FLOATS:
            reason = f"adapts {shown(name)}, which is stored quantised: take the model in floats"
            raise ModelError(WEIGHTS, reason)
        _check_shape(name, shape, entry.shape)
    note = "the adapter of %d tensors in %s is merged; it was trained for %s"
    trained_for = config.raw("base_model_name_or_path") or "a model it does not name"
    logging.getLogger(NOTES_LOG).info(note, len(changes), folder.name, trained_for)
    return MergedCheckpoint(base, changes)


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """The slots of some layers that form one matrix.

    Attributes:
        layers: their names in checkpoints.
        ranks: the largest of each layer for which there is room.
        places: destinations of the first rows; see `nn.parts.Rows`.
        pairs: A and B of each slot. The A of all layers are stacked, and their B are blocks of a
            matrix, else of zeros; None: there is room for none.
    """

    layers: Sequence[str]
    shapes: Sequence[LinearShape]
    ranks: Sequence[int]
    places: Tensor | None
    pairs: ExpertSet | None

    def matrices(self, products: Mapping[str, LowRank]) -> tuple[Tensor, Tensor]:
        """Return A and B of an adapter in fp32."""
        width, (inputs, outputs) = sum(self.ranks), _size(self.shapes)
        a, b, row, column = torch.zeros(width, inputs), torch.zeros(outputs, width), 0, 0
        for layer, shape, rank in zip(self.layers, self.shapes, self.ranks, strict=True):
            if (product := products.get(layer)) is not None:
                rows = slice(row, row + product.rank)
                stored_a, stored_b = product.matrices()
                a[rows] = shape.ordered(stored_a)
                b[column : column + shape.outputs, rows] = stored_b
                b[column : column + shape.outputs, rows] *= product.scale
            row, column = row + rank, column + shape.outputs
        if self.places is not None:
            b[self.places] = b[: len(self.places)].clone()
        return a, b


class AdapterSlots:
    """Memory for the adapters from which requests choose: slots, each for one adapter.

    Attributes:
        elsewhere: prefixes of names of layers that other processes have.
    """

    def __init__(
        self,
        count: int,
        ranks: Mapping[str, int],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        fixed: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            ranks: the largest of each layer, by its name from its block on.
            ops: of this process alone: small matrices are not divided among processes.
            dtype: of activations and of the matrices.
            fixed: prefixes of names of layers without adapters.
        """
        self._count, self._ranks, self._fixed = count, ranks, fixed
        self._ops, self._dtype, self._device = ops, dtype, device
        self._layers: list[LayerSlots] = []
        self.elsewhere: Collection[str] = ()

    def of(
        self, layers: Sequence[str], shapes: Sequence[LinearShape], places: Tensor | None
    ) -> Adapters | None:
        """Make the slots of some layers that form one matrix; see `LayerSlots`. Returns None if
        there is room for none."""
        if layers[0].startswith(self._fixed):
            return None
        ranks, pairs = [self._ranks.get(in_block(layer), 0) for layer in layers], None
        if any(ranks):
            width, (inputs, outputs) = sum(ranks), _size(shapes)
            slots = range(self._count)
            up = [self._matrix(width, inputs) for _ in slots]
            pairs = self._ops.expert_set(up, [self._matrix(outputs, width) for _ in slots])
        self._layers.append(LayerSlots(layers, shapes, ranks, places, pairs))
        return None if pairs is None else Adapters(self._ops, pairs)

    def _matrix(self, rows: int, inputs: int) -> Matrix:
        kind = float_kind(self._dtype)
        spec = MatrixSpec(kind, rows, inputs, False, None, self._dtype, self._device)
        return self._ops.matrix(spec)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Read an adapter into a slot that no request uses, whatever is there.

        Raises:
            ModelError: it is not a LoRA adapter, asks for more than sums for linear layers, does
                not fit the model or the slots, or is not the one that was named.
        """
        products = _products(adapter)
        self._check(adapter.name, products)
        adapter.check_unchanged()
        for layer in self._layers:
            if layer.pairs is not None:
                with _of_adapter(adapter.name):
                    a, b = layer.matrices(products)
                for matrix, values in ((layer.pairs.up[slot], a), (layer.pairs.down[slot], b)):
                    self._ops.pack_rows(matrix, 0, float_weight(values.to(self._device)))

    def _check(self, name: str, products: Mapping[str, LowRank]) -> None:
        """Raise ModelError if an adapter does not fit the layers of this process."""
        limits = {
            layer: (shape, rank)
            for slots in self._layers
            for layer, shape, rank in zip(slots.layers, slots.shapes, slots.ranks, strict=True)
        }
        for layer, product in products.items():
            if layer in limits:
                shape, rank = limits[layer]
                with _of_adapter(name):
                    expected = shape.outputs, shape.inputs
                    _check_shape(f"{layer}.weight", product.shape, expected)
                if product.rank > rank:
                    reason = f"{shown(name)} has rank {product.rank} for {shown(layer)}: at most "
                    raise ModelError("adapters", f"{reason}{rank} fits (max_adapter_rank)")
            elif not layer.startswith(tuple(self.elsewhere)):
                reason = f"adapts {shown(layer)}, whose outputs requests cannot change"
                raise ModelError("adapters", f"{shown(name)} {reason}: merge it with lora")


def _size(shapes: Sequence[LinearShape]) -> tuple[int, int]:
    """Return inputs and outputs of layers that form one matrix."""
    return shapes[0].inputs, sum(shape.outputs for shape in shapes)


def _products(adapter: Adapter) -> dict[str, LowRank]:
    """Read an adapter that requests choose: what it adds, by names of layers."""
    folder = Path(adapter.folder)
    products: dict[str, LowRank] = {}
    with _of_adapter(adapter.name):
        changes_of = _read(folder, _config(folder))
    for name, changes in changes_of.items():
        for change in changes:
            if not isinstance(change, LowRank):
                reason = f"{shown(adapter.name)} replaces {shown(name)}: merge it with lora"
                raise ModelError("adapters", reason)
            products[name.removesuffix(".weight")] = change
    return products


@contextmanager
def _of_adapter(name: str) -> Iterator[None]:
    """Name the adapter in errors about its files."""
    try:
        yield
    except ModelError as error:
        raise ModelError("adapters", f"{shown(name)}: {error}") from None


def _config(folder: Path) -> Fields:
    """Read adapter_config.json.

    Raises:
        ModelError: it is no LoRA adapter, or asks for more than sums and whole tensors.
    """
    config = Fields(read_json(folder / ADAPTER), ADAPTER)
    if (kind := config.raw("peft_type")) != "LORA":
        raise config.error("peft_type", f"must be 'LORA', not {shown(kind)}")
    for key, allowed in REFUSED.items():
        if (value := config.raw(key)) not in allowed:
            only = "left out" if allowed[0] is None else shown(allowed[0])
            raise config.error(key, f"is not supported: must be {only}, not {shown(value)}")
    return config


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        reason = f"adapts {shown(name)} of shape {list(shape)}, the model's is {list(expected)}"
        raise ModelError(WEIGHTS, reason)


def _read(folder: Path, config: Fields) -> dict[str, list[Change]]:
    """Read all changes, by names of tensors in checkpoints."""
    if not (folder / WEIGHTS).exists():
        raise ModelError("lora", f"must hold {WEIGHTS}; {str(folder)!r} has none")
    entries = read_header(folder / WEIGHTS)
    matches = {entry.name: TENSOR_NAME.fullmatch(entry.name) for entry in entries}
    for entry in entries:
        match = matches[entry.name]
        sizes = (2,) if match and not match["whole"] else (1, 2)
        if match is None or len(entry.shape) not in sizes or entry.dtype not in FLOATS:
            reason = f"tensor {shown(entry.name)} is none of LoRA's tensors of floats"
            raise ModelError(WEIGHTS, reason)
    changes: dict[str, list[Change]] = {}
    pairs: dict[str, dict[str, Stored]] = {}
    for entry in entries:
        match, stored = matches[entry.name], Stored(folder / WEIGHTS, entry)
        assert match is not None
        if match["whole"]:
            changes[f"{match[1]}.{match['whole']}"] = [Whole(stored)]
        else:
            part = match["linear"] or f"embedding {match['embedding']}"
            pairs.setdefault(match[1], {})[part] = stored
    if not matches:
        raise ModelError(WEIGHTS, "holds no tensor")
    alphas, by_root = _alphas(config, pairs), config.boolean("use_rslora", False)
    for module, parts in pairs.items():
        if parts.keys() == {"A", "B"}:
            product = LowRank(parts["A"], parts["B"], 1.0)
        elif parts.keys() == {"embedding A", "embedding B"}:
            # The weight of an embedding is the transposed product, A^T B^T.
            product = LowRank(parts["embedding B"], parts["embedding A"], 1.0, turned=True)
        else:
            raise ModelError(WEIGHTS, f"must have both matrices of {shown(module)}")
        rank = product.rank
        if product.b.entry.shape[not product.turned] != rank or rank == 0:
            raise ModelError(WEIGHTS, f"must have both matrices of {shown(module)}, of one rank")
        scale = alphas[module] / (sqrt(rank) if by_root else rank)
        changes.setdefault(f"{module}.weight", []).append(replace(product, scale=scale))
    return changes


def _alphas(config: Fields, modules: Iterable[str]) -> dict[str, float]:
    """Return alpha of each module: that of the first pattern that its name or its end matches."""
    modules, matcher = list(modules), Matcher()
    alphas = dict.fromkeys(modules, config.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, 8.0))
    patterns = config.inside("alpha_pattern")
    for pattern in reversed(tuple(config.mapping("alpha_pattern") or ())):
        alpha = patterns.number(pattern, -MAX_ALPHA, MAX_ALPHA)
        try:
            matching = matcher.matching(rf"(.*\.)?({pattern})$", modules)
        except PatternError as error:
            raise patterns.error(pattern, str(error)) from None
        alphas |= dict.fromkeys(matching, alpha)
    return alphas
