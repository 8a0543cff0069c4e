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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import NOTES_LOG, ModelError, shown
from kvik.files import ADAPTER_FILES
from kvik.kernels.ops import Ops
from kvik.kernels.weights import ExpertSet, Matrix, MatrixSpec, float_kind, float_weight
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import ROW_MULTIPLE, Checkpoint, Selection, TensorRun
from kvik.nn.formats.base import LinearShape
from kvik.nn.layers import Adapters
from kvik.nn.safetensors import FLOATS, Stored, TensorEntry, read_header
from kvik.spec.adapters import INNER, TENSOR_NAME, Adapter, in_block, is_stack
from kvik.spec.architecture import SEPARATE
from kvik.spec.declared import DeclaredLinear
from kvik.spec.fields import Fields, read_json
from kvik.spec.patterns import Matcher, PatternError
from kvik.spec.stored_weights import stored_names

ADAPTER, WEIGHTS = ADAPTER_FILES
MAX_ALPHA = 1e6
TRANSPOSED = "fan_in_fan_out"
TARGETS = "target_parameters"  # ends of the names of parameters that PEFT adapts as such
ROUTERS = ("gate", "router")  # modules of transformers
KEPT = 4  # tensors of an adapter in memory: of all first and all last matrices of a layer's experts
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
            *("use_dora", "lora_bias", "layer_replication"),
            *("trainable_token_indices", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
            "arrow_config",
        ),
        NOTHING,
    ),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a weight: scale * b @ a. The files are read when a matrix is used."""

    # a, b: [rank, inputs] and [outputs, rank]; for all experts of a layer, as PEFT stores them,
    # [experts * rank, inputs] and [outputs, rank * experts].
    a: Stored
    b: Stored
    # alpha, by_root: the scale is alpha over the rank, or over its root.
    alpha: float
    by_root: bool
    turned: bool = False  # the product is transposed
    # Whose product it is, and the number of experts whose products are stored together.
    expert: tuple[int, int] = (0, 1)
    # First and end of the product's rows, which are added to the weight; None: all.
    span: tuple[int, int] | None = None
    # Keeps the latest tensors in memory, since many experts read the same ones.
    read: Callable[[Stored], Tensor] = Stored.read

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        sizes = self.b.entry.shape[0], self.a.entry.shape[1]
        rows, inputs = sizes[::-1] if self.turned else sizes
        return rows if self.span is None else self.span[1] - self.span[0], inputs

    @property
    def rank(self) -> int:
        return self.a.entry.shape[0] // self.expert[1]

    @property
    def scale(self) -> float:
        return self.alpha / (sqrt(self.rank) if self.by_root else self.rank)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, inputs] and B [rows, rank] of the weight, in the dtypes of the file."""
        expert, count = self.expert
        a = self.read(self.a).unflatten(0, (count, -1))[expert]
        b = self.read(self.b)[:, expert::count]
        if self.turned:
            a, b = b.t(), a.t()
        return a, b if self.span is None else b[slice(*self.span)]

    def rows(self, first: int, count: int) -> Tensor:
        """Return rows first.. of the product, [count, inputs] fp32.

        They are computed in whole tiles from row 0 on, so that their bits do not depend on the run.
        """
        start, end = first // ROW_MULTIPLE * ROW_MULTIPLE, first + count
        a, b = (matrix.float() for matrix in self.matrices())
        b = b * self.scale
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
    """A checkpoint with an adapter merged into it; see `Checkpoint`."""

    base: Checkpoint
    changes: Mapping[str, Sequence[Change]]  # by names of tensors; those of a tensor in order

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


def merged(base: Checkpoint, folder: Path, spec: ModelSpec) -> MergedCheckpoint:
    """Return a checkpoint with the adapter of a folder merged into it.

    Args:
        spec: of the model.

    Raises:
        ModelError: it is not a LoRA adapter, asks for more than sums and whole tensors, or does not
            fit the checkpoint.
    """
    config = _config(folder)
    if (value := config.raw(TRANSPOSED)) not in NOTHING:
        raise config.error(TRANSPOSED, f"cannot be merged: must be left out, not {shown(value)}")
    entries = base.entries
    place = partial(_placed, spec=spec, known=entries, older=_is_older(config))
    changes: dict[str, list[Change]] = {}
    for stored_name, made in _read(folder, config).items():
        for name, change in chain(*(place(stored_name, change) for change in made)):
            entry, layer = entries.get(name), name.removesuffix("weight")
            if entry is None and not any(other.startswith(layer) for other in entries):
                raise ModelError(WEIGHTS, f"adapts {shown(name)}, which the model does not have")
            if entry is None or entry.dtype not in FLOATS:
                reason = "which is stored quantised: take the model in floats"
                raise ModelError(WEIGHTS, f"adapts {shown(name)}, {reason}")
            _check_shape(name, change.shape, entry.shape)
            changes.setdefault(name, []).append(change)
    note = "the adapter of %d tensors in %s is merged; it was trained for %s"
    trained_for = config.raw("base_model_name_or_path") or "a model it does not name"
    logging.getLogger(NOTES_LOG).info(note, len(changes), folder.name, trained_for)
    return MergedCheckpoint(base, changes)


def _placed(
    name: str, change: Change, spec: ModelSpec, known: Collection[str], older: bool
) -> Iterator[tuple[str, Change]]:
    """Yield what a change does to tensors of the checkpoint, by their names.

    An adapter may have names of transformers' modules where the checkpoint has others: of all
    experts of a block, which PEFT adapts by stacked matrices, and of its router.

    Args:
        known: names of tensors.
        older: see `_is_older`.

    Raises:
        ModelError: a product for experts does not fit them.
    """
    layer = name.removesuffix(".weight").replace(INNER, "")
    if name in known or isinstance(change, Whole):
        yield name, change
        return
    if routed := _stacked(layer, spec):
        for linear, part in _parts(layer, change, routed, older):
            end, turned = 0, part.turned != linear.mixed  # interleaved floats are transposed
            weights = [f"{of_expert}.weight" for of_expert in linear.names]
            for weight, width in zip(weights, linear.outputs, strict=True):
                first, end = end, end + width
                span = None if len(weights) == 1 else (first, end)
                yield _stored(weight, known, weight), replace(part, span=span, turned=turned)
        return
    if layer.rpartition(".")[2] in ROUTERS:
        for linear in _of_block(layer, spec):
            if linear.role == "router":
                name = _stored(f"{linear.names[0]}.weight", known, name)
    yield name, change


def _of_block(layer: str, spec: ModelSpec) -> list[DeclaredLinear]:
    """Return the linear layers of the block that has a layer."""
    block = in_block(layer)
    return [] if block == layer else spec.declaration.of_block(int(block.split(".")[1]))


def _stacked(layer: str, spec: ModelSpec) -> list[DeclaredLinear]:
    """Return the layers of all experts of a block if an adapter stacks them in `layer`.

    Raises:
        ModelError: a GGUF file may have their rows in another order than the adapter.
    """
    routed = [linear for linear in _of_block(layer, spec) if linear.router is not None]
    if not any(is_stack(layer, linear.names[0]) for linear in routed):
        return []
    if spec.wiring == SEPARATE:
        reason = "whose matrices GGUF files divide: take the model as safetensors"
        raise ModelError(WEIGHTS, f"adapts {shown(layer)}, {reason}")
    return routed


def _stored(name: str, known: Collection[str], otherwise: str) -> str:
    """Return the form of a declared name that is known, if one is."""
    return next((stored for stored in stored_names(name) if stored in known), otherwise)


def _parts(
    name: str, product: LowRank, routed: Sequence[DeclaredLinear], older: bool
) -> Iterator[tuple[DeclaredLinear, LowRank]]:
    """Yield the part of a product for each expert of a block, with the layers that it changes.

    PEFT adds it to all of their first matrices or to all of their last ones, and does not say which
    nor whether it is transposed: the sizes tell, and for square matrices the version.

    Args:
        routed: the layers of all experts.
        older: see `_is_older`.

    Raises:
        ModelError: it fits none of them, or two.
    """
    roles = {linear.role: linear for linear in routed}
    older = older and not routed[0].mixed  # those are [inputs, outputs]
    for turned in (older, not older):
        fits = []
        for role, first in roles.items():
            assert first.router is not None
            made = replace(product, expert=(0, first.router.experts), turned=turned)
            divisible = product.rank % first.router.experts == 0
            if divisible and made.shape == (sum(first.outputs), first.inputs):
                fits.append((role, made))
        if fits:
            break
    if len(fits) != 1:
        sizes = " and ".join(str(list(part.entry.shape)) for part in (product.a, product.b))
        reason = f"adapts {shown(name)} by matrices {sizes}, which do not fit the experts"
        raise ModelError(WEIGHTS, reason)
    ((role, made),) = fits
    for expert, linear in enumerate(each for each in routed if each.role == role):
        yield linear, replace(made, expert=(expert, made.expert[1]))


def _is_older(config: Fields) -> bool:
    """Return whether PEFT, before 0.19, took all stacks of experts to be [inputs, outputs]."""
    version = config.raw("peft_version")
    return version is None or str(version).startswith(("0.17.", "0.18."))


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """The slots of some layers that form one matrix."""

    layers: Sequence[str]  # their names in checkpoints
    shapes: Sequence[LinearShape]
    ranks: Sequence[int]  # the largest of each layer for which there is room
    width: int  # the same of all together
    places: Tensor | None  # destinations of the first rows; see `nn.parts.Rows`
    # A and B of each slot. The A of all layers are stacked, and their B are blocks of a matrix,
    # else of zeros; None: there is room for none.
    pairs: ExpertSet | None
    # Whose layers they are, and the number of experts, all of which have their pairs of a slot in
    # `pairs`.
    expert: tuple[int, int] = (0, 1)

    def limits(self) -> Iterator[tuple[str, LinearShape, int]]:
        """Yield what an adapter may change: name, sizes, largest rank."""
        yield from zip(self.layers, self.shapes, self.ranks, strict=True)
        if len(self.layers) > 1 and self.expert[1] > 1:  # a product of all
            _, outputs = _size(self.shapes)
            yield _joined(self.layers), replace(self.shapes[0], outputs=outputs), self.width

    def pair_of(self, slot: int) -> tuple[Matrix, Matrix]:
        """Return A and B of a slot."""
        assert self.pairs is not None
        expert, experts = self.expert
        return self.pairs.up[slot * experts + expert], self.pairs.down[slot * experts + expert]

    def matrices(self, products: Mapping[str, LowRank]) -> tuple[Tensor, Tensor]:
        """Return A and B of an adapter in fp32.

        Raises:
            ModelError: its ranks together are too large.
        """
        inputs, outputs = _size(self.shapes)
        a, b, row, column = torch.zeros(self.width, inputs), torch.zeros(outputs, self.width), 0, 0
        for layer, shape, _ in self.limits():
            column %= outputs  # a product of all layers comes last
            if (product := products.get(layer)) is not None:
                rows, row = slice(row, row + product.rank), row + product.rank
                if row > self.width:
                    reason = f"has rank {row} for {shown(layer)}: at most {self.width} fits"
                    raise ModelError(WEIGHTS, reason)
                stored_a, stored_b = product.matrices()
                a[rows] = shape.ordered(stored_a)
                b[column : column + shape.outputs, rows] = stored_b
                b[column : column + shape.outputs, rows] *= product.scale
            column += shape.outputs
        if self.places is not None:
            b[self.places] = b[: len(self.places)].clone()
        return a, b


class AdapterSlots:
    """Memory for the adapters from which requests choose: slots, each for one adapter."""

    def __init__(
        self,
        count: int,
        ranks: Mapping[str, int],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        spec: ModelSpec,
        fixed: tuple[str, ...],
    ) -> None:
        """
        Args:
            ranks: the largest of each layer, by its name from its block on; of the first expert's,
                the largest of all experts.
            ops: of this process alone: small matrices are not divided among processes.
            dtype: of activations and of the matrices.
            spec: of the model.
            fixed: prefixes of names of layers without adapters.
        """
        self._count, self._ranks, self._fixed = count, ranks, fixed
        self._ops, self._dtype, self._device = ops, dtype, device
        self._spec = spec
        self._layers: list[LayerSlots] = []
        # Prefixes of names of layers that other processes have.
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
        self._layers.append(LayerSlots(layers, shapes, ranks, sum(ranks), places, pairs))
        return None if pairs is None else Adapters(self._ops, pairs)

    def of_experts(
        self, experts: Sequence[Sequence[str]], shapes: Sequence[LinearShape], places: Tensor | None
    ) -> Adapters | None:
        """Make the slots of the layers of each expert that form one matrix. Returns None if there
        is room for none."""
        rank, count = self.room(experts[0]), len(experts)
        if not rank:
            return None
        (inputs, outputs), numbers = _size(shapes), range(self._count * count)
        up = [self._matrix(rank, inputs) for _ in numbers]
        pairs = self._ops.expert_set(up, [self._matrix(outputs, rank) for _ in numbers])
        for expert, layers in enumerate(experts):
            ranks, number = [rank] * len(layers), (expert, count)
            slots = LayerSlots(layers, shapes, ranks, rank, places, pairs, number)
            self._layers.append(slots)
        return Adapters(self._ops, pairs)

    def room(self, layers: Sequence[str]) -> int:
        """Return the largest rank of the layers of each expert, given those of the first."""
        fixed = layers[0].startswith(self._fixed)
        return 0 if fixed else self._ranks.get(in_block(layers[0]), 0)

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
        named = {layer for slots in self._layers for layer in slots.layers}
        products = _products(adapter, named, self._spec)
        self._check(adapter.name, products)
        adapter.check_unchanged()
        for layer in self._layers:
            if layer.pairs is not None:
                with _of_adapter(adapter.name):
                    a, b = layer.matrices(products)
                for matrix, values in zip(layer.pair_of(slot), (a, b), strict=True):
                    self._ops.pack_rows(matrix, 0, float_weight(values.to(self._device)))

    def _check(self, name: str, products: Mapping[str, LowRank]) -> None:
        """Raise ModelError if an adapter does not fit the layers of this process."""
        limits = {
            layer: (shape, rank) for slots in self._layers for layer, shape, rank in slots.limits()
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


def _joined(layers: Iterable[str]) -> str:
    """Return the name of a product for several layers."""
    return " + ".join(layers)


def _products(adapter: Adapter, named: Collection[str], spec: ModelSpec) -> dict[str, LowRank]:
    """Read an adapter that requests choose: what it adds, by names of layers.

    Args:
        named: names of layers that are here; others may be stacks of experts.
    """
    folder = Path(adapter.folder)
    products: dict[str, LowRank] = {}
    with _of_adapter(adapter.name):
        config = _config(folder)
        changes_of, older = _read(folder, config), _is_older(config)
    for name, changes in changes_of.items():
        for change in changes:
            if not isinstance(change, LowRank):
                reason = f"{shown(adapter.name)} replaces {shown(name)}: merge it with lora"
                raise ModelError("adapters", reason)
            layer = name.removesuffix(".weight")
            with _of_adapter(adapter.name):
                routed = [] if layer in named else _stacked(layer, spec)
                if not routed:
                    products[layer] = change
                    continue
                for linear, part in _parts(layer, change, routed, older):
                    outside = layer.removesuffix(in_block(layer))
                    names = (_stored(of, named, outside + in_block(of)) for of in linear.names)
                    products[_joined(names)] = part
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
    read = lru_cache(KEPT)(Stored.read)
    for entry in entries:
        match, stored = matches[entry.name], Stored(folder / WEIGHTS, entry)
        assert match is not None
        if match["whole"]:
            changes[f"{match[1]}.{match['whole']}"] = [Whole(stored)]
        else:
            part = match["linear"] or f"embedding {match['embedding']}"
            pairs.setdefault(match[1] + match["inner"], {})[part] = stored
    if not matches:
        raise ModelError(WEIGHTS, "holds no tensor")
    alphas, by_root = _alphas(config, pairs), config.boolean("use_rslora", False)
    for module, parts in pairs.items():
        if parts.keys() not in ({"A", "B"}, {"embedding A", "embedding B"}):
            raise ModelError(WEIGHTS, f"must have both matrices of {shown(module)}")
        (_, a), (_, b) = sorted(parts.items())
        rank = a.entry.shape[0]
        if b.entry.shape[1] != rank or rank == 0:
            raise ModelError(WEIGHTS, f"must have both matrices of {shown(module)}, of one rank")
        turned = "A" not in parts  # the weight of an embedding is the transposed product
        product = LowRank(a, b, alphas[module], by_root, turned, read=read)
        changes.setdefault(f"{module}.weight", []).append(product)
    return changes


def _alphas(config: Fields, modules: Iterable[str]) -> dict[str, float]:
    """Return alpha of each module: that of the first pattern that its name or its end matches.

    The name of a module with adapted parameters is that of the parameter. PEFT wraps the first one
    first, and `down_proj` is the last.
    """
    targets = () if config.raw(TARGETS) is None else config.strings(TARGETS)
    targets = tuple(sorted(targets, key=lambda name: not name.endswith("down_proj")))
    names = {}
    for module in modules:
        outer, depth = module.replace(INNER, ""), module.count(INNER)
        leaves = {target: f"{outer}.{target.rpartition('.')[2]}" for target in targets}
        params = [name for target, name in leaves.items() if f".{name}".endswith(f".{target}")]
        names[module] = params[depth] if depth < len(params) else outer
    matcher = Matcher()
    alphas = dict.fromkeys(names, config.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, 8.0))
    patterns = config.inside("alpha_pattern")
    for pattern in reversed(tuple(config.mapping("alpha_pattern") or ())):
        alpha = patterns.number(pattern, -MAX_ALPHA, MAX_ALPHA)
        try:
            matching = {*matcher.matching(rf"(.*\.)?({pattern})$", names.values())}
        except PatternError as error:
            raise patterns.error(pattern, str(error)) from None
        alphas |= {module: alpha for module, name in names.items() if name in matching}
    return alphas
