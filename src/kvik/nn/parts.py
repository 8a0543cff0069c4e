"""The way of a weight from the checkpoint into a matrix: gathered, quantised, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.kernels.ops import Ops
from kvik.kernels.rounding import round_int4, round_int8, round_mxfp4, round_to_fp8
from kvik.kernels.weights import Matrix, Weight, float_weight
from kvik.nn.checkpoint import run_length
from kvik.nn.formats.base import LinearShape, StoredTensor, TensorError, WeightFormat
from kvik.spec.weight_kind import WeightKind


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Turns the stored weight of a layer into the one that is used, any run of rows on its own.

    Weights that the checkpoint stores quantised are used as they are, or multiplied out.

    Attributes:
        kind: of the matrix that they become rows of.
        layer: its name, for errors.
    """

    kind: WeightKind
    layer: str

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
                    return round_int4(weight.values, self.kind.group, symmetric=False)
            return round_int8(weight.values, self.kind.activations != "float")
        except ValueError as error:
            raise ModelError("model", f"layer {shown(self.layer)}: {error}") from None


HEAD_ROWS = 32  # those of a head's matrix come in multiples of this (`Ops.linear_each`)


def head_rows(outputs: int) -> int:
    """Return the rows of one head with `outputs` outputs in a matrix of all heads."""
    return -(-outputs // HEAD_ROWS) * HEAD_ROWS


RUN_WEIGHTS = 1 << 20  # quantised and packed at a time


class Rows:
    """Takes weights into a matrix.

    Args:
        places: [rows] int64, where each of the first rows goes, in the order of the checkpoint;
            None, and further rows: where they are.
    """

    def __init__(
        self, ops: Ops, matrix: Matrix, quantizer: Quantizer, places: Tensor | None = None
    ) -> None:
        self._ops = ops
        self._matrix = matrix
        self._quantizer = quantizer
        self._places = places

    def put(self, first: int, weight: Weight) -> None:
        """Rows first.. of the matrix.

        Raises:
            ModelError: the weight cannot be quantised.
            ValueError: its inputs are in another order than those of the rows before.
        """
        if self._places is None or first >= len(self._places):
            count = weight.outputs
            for begin, end in self._ops.owned(self._matrix, first, count):
                own = weight
                if (begin, end) != (first, first + count):
                    own = weight.rows(torch.arange(begin - first, end - first))
                self._ops.pack_rows(self._matrix, begin, self._quantizer(own))
            return
        weight = self._quantizer(weight)
        last = first + len(weight.values)
        places = torch.arange(first, last)
        moved = self._places[first:last]
        places[: len(moved)] = moved
        places, order = places.sort()
        breaks = (places.diff() != 1).nonzero().flatten().add_(1).tolist()
        for begin, end in pairwise([0, *breaks, len(order)]):
            run = weight.rows(order[begin:end].to(weight.values.device))
            self._ops.pack_rows(self._matrix, int(places[begin]), run)


class HeadRows:
    """Takes the rows of all heads, one head's behind the other's, into matrices of
    `Ops.linear_each`.

    Args:
        rows: of a head.
        parts: the matrices and what each takes of a head's rows, [rows, inputs].
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
        self._begun: dict[int, tuple[Tensor, int]] = {}  # heads: their rows, how many are there

    def put(self, first: int, weight: Weight) -> None:
        """Rows first.. of the layer."""
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
        for matrix, taken in self._parts:
            part = taken(rows)
            whole = part.new_zeros(head_rows(len(part)), part.shape[1])
            whole[: len(part)] = part
            self._ops.pack_rows(matrix, head * len(whole), float_weight(whole))


class Target(Protocol):
    """What takes the rows of a layer: `Rows` or `HeadRows`."""

    def put(self, first: int, weight: Weight) -> None: ...


class LayerFiller:
    """A layer of the checkpoint, which is some rows of a matrix.

    They are unpacked, quantised and packed a run at a time, so that this needs little memory beside
    the matrix. Its tensors are kept until all are there, but for those that come in runs: each run
    is on its way as soon as it comes.
    """

    def __init__(
        self,
        layer: str,
        format: WeightFormat,
        tensors: Mapping[str, StoredTensor],
        shape: LinearShape,
        rows: Target,
        first: int,
    ) -> None:
        """
        Args:
            layer: its name.
            tensors: of the layer, by name.
            first: its first row in the matrix.
        """
        self._layer = layer
        self._format = format
        self._tensors = tensors
        self._shape = shape
        self._rows = rows
        self._first = first
        self._kept: dict[str, Tensor] = {}

    def fill(self, name: str, row: int, values: Tensor) -> None:
        """A tensor, or a run of its rows from `row`.

        Raises:
            ModelError: values that cannot be, or that cannot be quantised.
        """
        if self._tensors[name].in_runs:
            self._put(row, {name: values}, len(values))
            return
        last = len(self._kept) + 1 == len(self._tensors)
        self._kept[name] = values if last else values.clone()  # its memory is read into again
        if last:
            self._put(0, self._kept, self._shape.outputs)
            self._kept = {}

    def _put(self, first: int, tensors: Mapping[str, Tensor], count: int) -> None:
        """Rows first.. of the layer, of which the tensors hold `count`."""
        step = run_length(RUN_WEIGHTS // self._shape.inputs)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
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
