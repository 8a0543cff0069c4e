"""Reads the weights of a GGUF file by the names and in the layout of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from math import lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.files import is_gguf
from kvik.gguf.facts import family_of, gguf_model_spec, named_tensors
from kvik.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from kvik.gguf.reader import GgufFile, GgufTensor, read_gguf
from kvik.models.model_spec import ModelSpec
from kvik.nn.checkpoint import (
    ROW_MULTIPLE,
    RUN_BYTES,
    Checkpoint,
    Selection,
    Spans,
    TensorRun,
    open_checkpoint,
    read_ahead,
    run_length,
)
from kvik.nn.gguf_blocks import permute_rotary, unpermute_rotary
from kvik.nn.safetensors import TORCH_DTYPES, TensorEntry
from kvik.spec.architecture import Architecture
from kvik.spec.fields import MAX_LAYERS


@dataclass(frozen=True, slots=True)
class Change:
    """Converts a tensor of a checkpoint to the file's form, and back."""

    unit: int  # number of rows within which rows change places
    # to_file, from_file: take and return [whole units, ...].
    to_file: Callable[[Tensor], Tensor]
    from_file: Callable[[Tensor], Tensor]

    @property
    def reason(self) -> str:
        """What a tensor must be."""
        return f"must have whole heads, of {self.unit} rows each"


def changes(spec: ModelSpec, family: Architecture) -> dict[str, Change]:
    """Return the changes of a model's tensors, by their names in checkpoints.

    Args:
        family: the architecture that names the files.
    """
    result: dict[str, Change] = {}
    heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
    pairs = Change(
        size, partial(permute_rotary, head_dim=size), partial(unpermute_rotary, head_dim=size)
    )
    group = (heads // kv_heads * size, size, size)
    by_kind = Change(
        kv_heads * sum(group), partial(_by_kind, group=group), partial(_by_group, group=group)
    )
    for linear in spec.declaration.linears:
        names = [f"{name}.{last}" for name in linear.names for last in ("weight", "bias")]
        if linear.by_head:
            result |= dict.fromkeys(names, by_kind)
        elif linear.role == "qkv" and family.gguf_pairs and spec.layers[linear.layer or 0].attends:
            result |= dict.fromkeys(names[:4], pairs)  # of q and k
    for norm in spec.declaration.norms:
        if norm.offset:
            shifts = partial(_plus, offset=norm.offset), partial(_plus, offset=-norm.offset)
            result[f"{norm.name}.weight"] = Change(1, *shifts)
    for other in spec.declaration.others:
        if other.logarithm:
            result[other.name] = Change(1, _rates, _logarithms)
    if family.gguf_factors is not None:
        for name, runs in family.gguf_factors(spec).items():
            if any(factor != 1.0 for _, factor in runs):
                blocks = map(spec.declaration.block.format, range(spec.num_layers))
                scopes = ("", *blocks)
                result |= {scope + name: _multiplied(runs) for scope in scopes}
    moved = {} if family.gguf_rows is None else family.gguf_rows(spec)
    for number in range(spec.num_layers):
        for name, order in moved.items():
            full = spec.declaration.block.format(number) + name
            result[full] = _moved(torch.tensor(order), result.get(full))
    return result


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors from which files drop dimensions of size 1, by their names in
    checkpoints."""
    result = {other.name: other.shape for other in spec.declaration.others if other.shape}
    gates = (linear for linear in spec.declaration.linears if linear.role == "shared_gate")
    return result | {f"{gate.names[0]}.weight": (1, gate.inputs) for gate in gates}


def file_shapes(spec: ModelSpec, family: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes in files of tensors with other dimensions, by their names in checkpoints,
    where they are vectors."""
    block = spec.declaration.block
    of_block = {} if family.gguf_shapes is None else family.gguf_shapes(spec)
    return {
        block.format(number) + name: shape
        for number in range(spec.num_layers)
        for name, shape in of_block.items()
    }


def _moved(order: Tensor, change: Change | None) -> Change:
    """Return a change that first moves row `order[i]` of the checkpoint to row i."""
    back = order.argsort()
    if change is None:
        return Change(len(order), lambda rows: rows[order], lambda rows: rows[back])
    first, last = change.to_file, change.from_file
    return Change(len(order), lambda rows: first(rows[order]), lambda rows: last(rows)[back])


def _multiplied(runs: Sequence[tuple[int, float]]) -> Change:
    """Return a change that multiplies rows; files give no factors to divide by."""
    counts, values = zip(*runs, strict=True)
    factors = torch.tensor(values).repeat_interleave(torch.tensor(counts))[:, None]
    return Change(1, lambda rows: rows.float() * factors, lambda rows: rows)


def _by_kind(rows: Tensor, group: tuple[int, ...]) -> Tensor:
    """[groups * (queries, a key, a value), ...] -> all queries, all keys, all values."""
    grouped = rows.reshape(-1, sum(group), *rows.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in grouped.split_with_sizes(group, 1)])


def _by_group(rows: Tensor, group: tuple[int, ...]) -> Tensor:
    """Undo `_by_kind`."""
    groups = len(rows) // sum(group)
    parts = rows.split_with_sizes([groups * size for size in group])
    grouped = [part.reshape(groups, -1, *rows.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).reshape(rows.shape)


def _rates(logarithms: Tensor) -> Tensor:
    """Return the decay rates of the heads' states, the form in files."""
    return -logarithms.float().exp()


def _logarithms(rates: Tensor) -> Tensor:
    """Undo `_rates`.

    Raises:
        ModelError: a state would grow.
    """
    if not bool((rates < 0).all()):
        raise ModelError("model", "must hold negative numbers in ssm_a, by which states decay")
    return (-rates.float()).log()


def _plus(gains: Tensor, offset: float) -> Tensor:
    """Return gains with the offset added, the form in files; a negative one undoes that."""
    return gains.float() + offset


BYTES = "U8"


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A `TensorRun` to be read: `rows` rows of a tensor from `first` on."""

    tensor: GgufTensor
    first: int
    rows: int
    # [rows] int64, their rows in the file; None: rows `first`.. of the file, still to be converted
    # by the tensor's change.
    order: Tensor | None = None

    @property
    def spans(self) -> Spans:
        size, start = _row_bytes(self.tensor), self.tensor.start
        if self.order is None:
            return Spans(((start + self.first * size, self.rows * size),))
        rows = self.order.sort().values
        breaks = (rows.diff() != 1).nonzero().flatten().add_(1).tolist()
        runs = pairwise([0, *breaks, len(rows)])
        return Spans(tuple((start + int(rows[a]) * size, (b - a) * size) for a, b in runs))


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """The weights of a GGUF file; see `Checkpoint`. Floats are returned as they are, blocks as
    bytes [rows, bytes of a row], which a weight format decodes."""

    file: GgufFile
    tensors: Mapping[str, GgufTensor]  # by their names in checkpoints, in the order of the file
    # Conversions between file and checkpoint, by names in checkpoints.
    changes: Mapping[str, Change]
    numbers: Mapping[str, float]  # tensors of one number, which the metadata have

    @property
    def facts(self) -> str:
        return f"the metadata of {self.file.path.name}"

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        stored = {
            name: TensorEntry(name, _dtype(tensor), _shape(tensor), tensor.start, tensor.size)
            for name, tensor in self.tensors.items()
        }
        return stored | {name: TensorEntry(name, "F32", (1,), 0, 4) for name in self.numbers}

    def runs(self, selections: Mapping[str, Selection]) -> Iterator[TensorRun]:
        """See `Checkpoint`: in the order of the file. Tensors that are not read in runs are read
        whole."""
        for name in self.numbers.keys() & selections.keys():
            yield TensorRun(name, 0, torch.tensor([self.numbers[name]]))
        chunks = [
            (name, chunk)
            for name, tensor in self.tensors.items()
            if name in selections and selections[name].ranges != ()
            for chunk in self._chunks(name, tensor, selections[name])
        ]
        for path, part in groupby(chunks, key=lambda chunk: chunk[1].tensor.path):
            of_part = list(part)
            data = read_ahead(path, [chunk.spans for _, chunk in of_part])
            for (name, chunk), read in zip(of_part, data, strict=True):
                values = self._values(name, chunk, read)
                if not selections[name].in_runs:
                    values = selections[name].of(values)
                yield TensorRun(name, chunk.first, values)

    def _chunks(self, name: str, tensor: GgufTensor, selection: Selection) -> Iterator[_Chunk]:
        rows, change = prod(tensor.shape[:-1]), self.changes.get(name)
        if not selection.in_runs or len(tensor.shape) != 2:
            yield _Chunk(tensor, 0, rows)
            return
        step = run_length(RUN_BYTES // _row_bytes(tensor))
        ranges, order = selection.ranges, None
        unit = 1 if change is None else lcm(change.unit, ROW_MULTIPLE)
        if change is not None and ranges is None and unit <= step:
            step = step // unit * unit
        elif change is not None:  # a change of a matrix only moves rows
            order = change.from_file(torch.arange(rows)[:, None]).flatten()
        for begin, end in ((0, rows),) if ranges is None else ranges:
            for first in range(begin, end, step):
                last = min(first + step, end)
                yield _Chunk(
                    tensor, first, last - first, None if order is None else order[first:last]
                )

    def _values(self, name: str, chunk: _Chunk, read: Tensor) -> Tensor:
        """read [bytes] -> the values of a chunk."""
        _, *rest = _shape(chunk.tensor)
        values = read.view(TORCH_DTYPES[_dtype(chunk.tensor)])
        values = values.view(chunk.rows, *rest) if rest else values
        if chunk.order is not None:
            return values[chunk.order.argsort().argsort()]
        change = self.changes.get(name)
        return values if change is None else change.from_file(values)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Return the weights of a file.

    A tensor without a name in checkpoints keeps its own, so that the loader reports it.

    Raises:
        ModelError: it is not a GGUF file, its architecture is unknown, queries or keys are not
            whole heads, or experts are missing.
    """
    file = read_gguf(path)
    spec = gguf_model_spec(file)
    family = family_of(file.metadata)
    made, full_shapes = changes(spec, family), shapes(spec)
    flat = {name: (prod(shape),) for name, shape in file_shapes(spec, family).items()}
    tensors = {
        name: replace(
            tensor, shape=_stored_shape(tensor.shape, full_shapes.get(name), flat.get(name))
        )
        for name, tensor in named_tensors(file)
        if tensor.name not in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
    }
    for name, tensor in tensors.items():
        if name in made and tensor.shape[0] % made[name].unit:
            raise ModelError(path.name, f"tensor {shown(tensor.name)} {made[name].reason}")
    return GgufCheckpoint(file, tensors, made, _numbers(file, spec, family))


def _numbers(file: GgufFile, spec: ModelSpec, family: Architecture) -> dict[str, float]:
    """Return the numbers of blocks in the metadata, by their names in checkpoints."""
    result: dict[str, float] = {}
    for key, name in family.gguf_numbers.items():
        values = file.metadata.number_array(key, MAX_LAYERS)
        if len(values) != spec.num_layers:
            reason = f"must have {spec.num_layers} numbers, not {len(values)}"
            raise file.metadata.error(key, reason)
        names = (spec.declaration.block.format(i) + name for i in range(spec.num_layers))
        result |= zip(names, values, strict=True)
    return result


def _stored_shape(
    shape: tuple[int, ...], target: tuple[int, ...] | None, flat: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the shape in a checkpoint: that of the vector `flat`, or with the dimensions of size 1
    of `target`, and the matrices of all heads joined."""
    if flat is not None and prod(shape) == flat[0]:
        return flat
    if target is not None and [n for n in shape if n > 1] == [n for n in target if n > 1]:
        return target
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape


def _dtype(tensor: GgufTensor) -> str:
    return tensor.type.name if tensor.type.name in TORCH_DTYPES else BYTES


def _shape(tensor: GgufTensor) -> tuple[int, ...]:
    """Return the shape of the values; the last dimension of blocks counts bytes."""
    if _dtype(tensor) != BYTES:
        return tensor.shape
    return *tensor.shape[:-1], _row_bytes(tensor)


def _row_bytes(tensor: GgufTensor) -> int:
    return tensor.type.row_bytes(tensor.shape[-1])


def open_weights(path: Path, modules: Sequence[str] = ()) -> Checkpoint:
    """Open a folder with safetensors files, or a GGUF file; only descriptions are read.

    Args:
        modules: see `open_checkpoint`.

    Raises:
        ModelError: there is nothing that can be loaded, or a description is malformed.
    """
    return open_gguf(path) if is_gguf(path) else open_checkpoint(path, modules)
