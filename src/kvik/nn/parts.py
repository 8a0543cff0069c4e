"""The way of a weight from the checkpoint into a matrix: gathered, quantised, packed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.weights import Matrix, Weight
from kvik.nn.formats.base import LinearShape, StoredTensor, WeightFormat
from kvik.nn.quantizer import Quantizer
from kvik.nn.runs import run_length

RUN_WEIGHTS = 1 << 22  # quantised and packed at a time


class Rows:
    """Takes weights into a matrix, a run of rows at a time, so that neither quantising nor packing
    needs much memory beside it."""

    def __init__(self, ops: Ops, matrix: Matrix, quantizer: Quantizer) -> None:
        self._ops = ops
        self._matrix = matrix
        self._quantizer = quantizer

    def put(self, first: int, weight: Weight) -> None:
        """Rows first.. of the matrix.

        Raises:
            ModelError: the weight cannot be quantised.
        """
        step = run_length(RUN_WEIGHTS // weight.inputs)
        for start in range(0, weight.outputs, step):
            run = self._quantizer(weight.rows(slice(start, start + step)))
            self._ops.pack_rows(self._matrix, first + start, run)


class Part:
    """A layer of the checkpoint, which is some rows of a matrix.

    Its tensors are kept until all are there, but for those that come in runs: each run is on its
    way as soon as it comes.
    """

    def __init__(
        self,
        format: WeightFormat,
        tensors: Mapping[str, StoredTensor],
        shape: LinearShape,
        rows: Rows,
        first: int,
    ) -> None:
        """
        Args:
            tensors: of the layer, by name.
            first: its first row in the matrix.
        """
        self._format = format
        self._tensors = tensors
        self._shape = shape
        self._rows = rows
        self._first = first
        self._kept: dict[str, Tensor] = {}

    def fill(self, name: str, row: int, values: Tensor) -> None:
        """A tensor, or a run of its rows from `row`.

        Raises:
            ModelError: the weight cannot be quantised.
        """
        if self._tensors[name].in_runs:
            self._rows.put(self._first + row, self._format.weight({name: values}, self._shape))
            return
        last = len(self._kept) + 1 == len(self._tensors)
        self._kept[name] = values if last else values.clone()  # its memory is read into again
        if last:
            self._rows.put(self._first, self._format.weight(self._kept, self._shape))
            self._kept = {}
