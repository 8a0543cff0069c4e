"""Loads a weight of the checkpoint into a matrix: gathers, quantises and packs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.kernels.ops import Ops
from kvik.kernels.rounding import round_int4, round_int8, round_mxfp4, round_to_fp8
from kvik.kernels.weights import Matrix, MatrixSpec, Weight, float_weight
from kvik.nn.checkpoint import ROW_MULTIPLE, run_length
from kvik.nn.formats.base import LinearShape, StoredTensor, TensorError, WeightFormat
from kvik.spec.rope import RopeSpec
from kvik.spec.weight_kind import WeightKind


class Storage(Protocol):
    """Provides the memory of weights, by the names of the checkpoint. The name of a matrix joins
    the names of its layers."""

    @property
    def names(self) -> Collection[str]:
        """Names of the weights that it already holds; none: its memory is new."""
        ...

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        """Return a matrix as `spec` describes it; its kind may differ if it holds values."""
        ...

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...


class FreshStorage:
    """New memory, to be filled by a loader. It keeps references to all of it."""

    names: Collection[str] = ()

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.matrices: dict[str, Matrix] = {}
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, spec: MatrixSpec) -> Matrix:
        self.matrices[name] = self._ops.matrix(spec)
        return self.matrices[name]

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self.tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Converts the stored weight of a layer to the kind of its matrix, for any range of rows.

    Weights that the checkpoint stores quantised are used as they are, or dequantised."""

    kind: WeightKind  # of the matrix
    layer: str  # its name, for errors

    def __call__(self, weight: Weight) -> Weight:
        """
        Raises:
            ModelError: the weight cannot be quantised.
        """
        if self.kind.floats:
            return weight if weight.kind.floats else float_weight(weight.dequantized())
        if not weight.kind.floats:
            return weight
        try:
            match self.kind.codes:
                case "fp8":
                    return round_to_fp8(weight.values)
                case "mxfp4":
                    return round_mxfp4(weight.values)
                case "int4":
                    return round_int4(weight.values, self.kind.group)
            return round_int8(weight.values, self.kind.activations != "float")
        except ValueError as error:
            raise ModelError("model", f"layer {shown(self.layer)}: {error}") from None


HEAD_ROWS = 32  # the rows of a head's matrix are padded to a multiple of this (`Ops.linear_each`)


def head_rows(outputs: int) -> int:
    """Return the rows of one head with `outputs` outputs in a matrix of all heads."""
    return -(-outputs // HEAD_ROWS) * HEAD_ROWS


RUN_WEIGHTS = 1 << 20  # weights quantised and packed at a time


class Rows:
    """Packs weights into the rows of a matrix.

    Args:
        places: [rows] int64, destinations of the first rows in the order of the checkpoint. Other
            rows, or all if None, keep their places.
    """

    def __init__(
        self, ops: Ops, matrix: Matrix, quantizer: Quantizer, places: Tensor | None = None
    ) -> None:
        self._ops = ops
        self._matrix = matrix
        self._quantizer = quantizer
        self._places = places

    def owned(self, first: int, count: int) -> list[tuple[int, int]]:
        """See `Target`. For rows that change places, runs include small gaps between own rows."""
        if self._places is None or first >= len(self._places):
            return [*self._ops.owned(self._matrix, first, count)]
        places, mask = self._places_of(first, count), torch.zeros(count, dtype=torch.bool)
        for begin, end in self._ops.owned(self._matrix, 0, self._matrix.spec.rows):
            mask |= (places >= begin) & (places < end)
        rows = mask.nonzero().flatten() + first
        breaks = (rows.diff() > ROW_MULTIPLE).nonzero().flatten().add_(1).tolist()
        runs = pairwise([0, *breaks, len(rows)] if len(rows) else ())
        return [(int(rows[begin]), int(rows[end - 1]) + 1) for begin, end in runs]

    def _places_of(self, first: int, count: int) -> Tensor:
        """Return the destinations of rows first.. of the checkpoint: [count] int64."""
        places = torch.arange(first, first + count)
        assert self._places is not None
        moved = self._places[first : first + count]
        places[: len(moved)] = moved
        return places

    def put(self, first: int, weight: Weight) -> None:
        """Pack a weight into rows first.. of the matrix.

        Raises:
            ModelError: the weight cannot be quantised.
            ValueError: its inputs are in another order than in the rows before.
        """
        if self._places is None or first >= len(self._places):
            count = weight.outputs
            # If this process owns no row, one is packed anyway, for the data that all rows share.
            for begin, end in self._ops.owned(self._matrix, first, count) or ((first, first + 1),):
                part = weight
                if (begin, end) != (first, first + count):
                    part = weight.rows(torch.arange(begin - first, end - first))
                self._ops.pack_rows(self._matrix, begin, self._quantizer(part))
            return
        weight = self._quantizer(weight)
        places, order = self._places_of(first, len(weight.values)).sort()
        breaks = (places.diff() != 1).nonzero().flatten().add_(1).tolist()
        for begin, end in pairwise([0, *breaks, len(order)]):
            run = weight.rows(order[begin:end].to(weight.values.device))
            self._ops.pack_rows(self._matrix, int(places[begin]), run)


class HeadRows:
    """Packs the rows of all heads, stored head by head, into matrices of `Ops.linear_each`.

    Args:
        rows: of a head.
        parts: the matrices, each with the function that selects its part of a head's rows,
            [rows, inputs].
    """

    def __init__(
        self,
        ops: Ops,
        quantizer: Quantizer,
        rows: int,
        parts: Sequence[tuple[Matrix, Callable[[Tensor], Tensor]]],
    ) -> None:
        self._ops = ops
        self._quantizer = quantizer
        self._rows = rows
        self._parts = parts
        self._begun: dict[int, tuple[Tensor, int]] = {}  # head -> its rows, and how many are filled

    def owned(self, first: int, count: int) -> list[tuple[int, int]]:
        """See `Target`; called for the whole layer."""
        matrix, _ = self._parts[0]  # all have the same heads
        size, rows = self._rows, matrix.spec.rows * self._rows // count  # head rows: layer, matrix
        ranges = self._ops.owned(matrix, 0, matrix.spec.rows)
        return [(first + low // rows * size, first + high // rows * size) for low, high in ranges]

    def put(self, first: int, weight: Weight) -> None:
        """Take rows first.. of the layer; pack each head when its rows are complete."""
        values, size = self._quantizer(weight).values, self._rows
        while len(values):
            head, at = divmod(first, size)
            run = values[: size - at]
            rows, count = self._begun.pop(head, (run.new_empty(size, run.shape[1]), 0))
            rows[at : at + len(run)] = run
            if count + len(run) == size:
                self._pack(head, rows)
            else:
                self._begun[head] = rows, count + len(run)
            first, values = first + len(run), values[len(run) :]

    def _pack(self, head: int, rows: Tensor) -> None:
        for matrix, selector in self._parts:
            part = selector(rows)
            block = part.new_zeros(head_rows(len(part)), part.shape[1])
            block[: len(part)] = part
            self._ops.pack_rows(matrix, head * len(block), float_weight(block))


class Target(Protocol):
    """Destination of the rows of a layer: `Rows` or `HeadRows`."""

    def owned(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the runs, as first and end, of rows first .. first + count that this process
        owns; other processes own the rest."""
        ...

    def put(self, first: int, weight: Weight) -> None: ...


def rows_to_read(
    to: Target, first: int, outputs: int, tensors: Iterable[StoredTensor]
) -> list[tuple[int, int]] | None:
    """Return the runs of rows to read of a layer with these tensors, as first and end; None: all
    rows.

    Args:
        first: first row of the layer in its destination.
    """
    owned = to.owned(first, outputs)
    if owned == [(first, first + outputs)]:
        return None
    axes = [tensor.output_axis for tensor in tensors]
    unit = math.lcm(*(axis.outputs for axis in axes if axis is not None))
    if not owned and None in axes:
        owned = [(first, first + 1)]  # to read the tensors that all outputs share
    runs: list[tuple[int, int]] = []
    for low, high in owned:
        begin, end = (low - first) // unit * unit, -(-(high - first) // unit) * unit
        if runs and begin <= runs[-1][1]:
            begin, _ = runs.pop()
        runs.append((begin, min(end, outputs)))
    return runs


class LayerFiller:
    """Loads a layer of the checkpoint into its rows of a matrix.

    Rows are unpacked, quantised and packed a run at a time, which takes little memory in addition
    to the matrix. If a layer's tensor is read in runs, each run is packed when it arrives; the
    tensors of other layers are kept until all of the layer have been read.
    """

    def __init__(
        self,
        layer: str,
        format: WeightFormat,
        tensors: Mapping[str, StoredTensor],
        shape: LinearShape,
        rows: Target,
        first: int,
        runs: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            layer: its name.
            tensors: of the layer, by name.
            first: its first row in the matrix.
            runs: of its rows, as first and end; tensors read at once hold only these; None: all.
        """
        self._layer = layer
        self._format = format
        self._tensors = tensors
        self._shape = shape
        self._rows = rows
        self._first = first
        self._runs = ((0, shape.outputs),) if runs is None else runs
        self._buffered: dict[str, Tensor] = {}

    def fill(self, name: str, row: int, values: Tensor) -> None:
        """Take a tensor, or a run of its rows from `row`.

        Raises:
            ModelError: the values are invalid, or cannot be quantised.
        """
        if self._tensors[name].in_runs:
            self._put(row, {name: values}, 0, len(values))
            return
        last = len(self._buffered) + 1 == len(self._tensors)
        self._buffered[name] = values if last else values.clone()  # the reader reuses its memory
        if last:
            begin = 0
            for first, end in self._runs:
                self._put(first, self._buffered, begin, end - first)
                begin += end - first
            self._buffered = {}

    def _put(self, first: int, tensors: Mapping[str, Tensor], begin: int, count: int) -> None:
        """Pack rows first.. of the layer, which the tensors hold from row `begin`."""
        step = run_length(RUN_WEIGHTS // self._shape.inputs)
        for start in range(0, count, step):
            rows = slice(begin + start, begin + min(start + step, count))
            try:
                weight = self._format.weight(tensors, rows)
                self._rows.put(self._first + first + start, weight)
            except TensorError as error:
                name = shown(f"{self._layer}.{error.name}")
                raise ModelError("model", f"tensor {name} {error}") from None
            except ModelError:
                raise
            except ValueError as error:
                raise ModelError("model", f"layer {shown(self._layer)}: {error}") from None


# Destinations of rows; see `Rows`.


def head_places(rope: RopeSpec | None, heads: int, head_dim: int) -> Tensor | None:
    """Return the destinations of the rows of queries and keys for a rotation that pairs the halves
    of a head; None: unchanged."""
    rows = None if rope is None else rope.rows(head_dim)
    if rows is None:
        return None
    place = torch.empty(head_dim, dtype=torch.int64)
    place[torch.tensor(rows)] = torch.arange(head_dim)
    return (torch.arange(heads)[:, None] * head_dim + place).flatten()


def gate_then_up(rows: int) -> Tensor:
    """Return the destinations of rows of gate and up, stored by turns, in a matrix of both."""
    order = torch.arange(rows)
    return order % 2 * (rows // 2) + order // 2


def with_gates(places: Tensor | None, heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Return the destinations of rows of queries, each head's followed by its gate, and of keys,
    given the destinations `places` without gates."""
    if places is None:
        places = torch.arange((heads + kv_heads) * head_dim)
    count = heads * head_dim  # rows of all queries, which the gates follow
    queries = places[:count].view(heads, head_dim)
    gates = torch.arange(count, 2 * count).view(heads, head_dim)
    return torch.cat((torch.stack((queries, gates), 1).flatten(), places[count:] + count))


def in_parts(
    places: Tensor | None,
    heads: tuple[int, ...],
    head_dim: int,
    count: int,
    order: tuple[int, ...] = (0, 1, 2),
) -> Tensor:
    """Return the destinations of rows stored in equal parts of the heads, given the destinations
    `places` of rows stored as q, k, v.

    Args:
        order: of q, k and v in each part.
    """
    rows = torch.arange(sum(heads) * head_dim)
    if places is not None:
        rows[: len(places)] = places
    parts = rows.split_with_sizes([count * head_dim for count in heads])
    return torch.cat([parts[i].view(count, -1) for i in order], 1).flatten()
