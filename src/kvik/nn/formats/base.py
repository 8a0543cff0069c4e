"""The protocol of weight formats: how a checkpoint stores the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, float_weight
from kvik.nn.checkpoint import IN_RUNS, WHOLE, Selection

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors of a layer, by their names in it

# Plain float weights.


class Dense:
    """weight [outputs, inputs]; a transposed weight cannot be read in runs of rows."""

    unread = ()

    def __init__(self, shape: LinearShape) -> None:
        self.shape = shape

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        shape = self.shape
        stored = shape.outputs, shape.inputs
        if shape.transposed:
            stored = stored[::-1]
        outputs = OutputAxis(1 if shape.transposed else 0)
        return {"weight": StoredTensor(stored, dtype, outputs, in_runs=not shape.transposed)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        weight = tensors["weight"]
        weight = (weight.t() if self.shape.transposed else weight)[rows]
        return float_weight(self.shape.ordered(weight))


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer of the checkpoint."""

    inputs: int
    outputs: int
    # The checkpoint stores [inputs, outputs] (GPT-2) and not [outputs, inputs].
    transposed: bool = False
    # The input of the checkpoint at each place; (): in the stored order.
    columns: tuple[int, ...] = ()

    def ordered(self, values: Tensor) -> Tensor:
        """Reorder values [rows, groups], of groups of neighbouring inputs, as `columns` says.

        Raises:
            ValueError: a group would be split.
        """
        if not self.columns:
            return values
        size = self.inputs // values.shape[1]
        starts = self.columns[::size]
        order = tuple(start + i for start in starts for i in range(size))
        if order != self.columns or any(start % size for start in starts):
            raise ValueError(f"its inputs are reordered, but each {size} neighbours share a scale")
        return values[:, torch.tensor(starts, device=values.device) // size]


@dataclass(frozen=True, slots=True)
class OutputAxis:
    """Maps the outputs of a layer to a dimension of a tensor: every `outputs` outputs take
    `entries` entries of dimension `axis`."""

    axis: int = 0
    outputs: int = 1
    entries: int = 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that the checkpoint must hold for a layer."""

    shape: tuple[int, ...]
    # A float dtype of 16 or 32 bits accepts all such dtypes, and so does E8M0; int64 also accepts
    # int32.
    dtype: torch.dtype
    output_axis: OutputAxis | None = None  # None: all outputs share the tensor
    # Any range of rows alone is the weight of those outputs, so that the whole tensor never has to
    # be in memory.
    in_runs: bool = False
    # Why the shape is not given by the sizes of the model alone, for error messages.
    because: str = ""

    def selection(self, runs: Sequence[tuple[int, int]] | None) -> Selection:
        """Return the part to read for some outputs.

        Args:
            runs: first and end of each run of outputs, each first at the start of an entry; None:
                all outputs.
        """
        axis = self.output_axis
        if runs is None or axis is None:
            return IN_RUNS if self.in_runs else WHOLE
        length = self.shape[axis.axis]
        ranges = (
            (
                first // axis.outputs * axis.entries,
                min(-(-end // axis.outputs) * axis.entries, length),
            )
            for first, end in runs
        )
        return Selection(self.in_runs, axis.axis, tuple(ranges))


class TensorError(ValueError):
    """A tensor has invalid values; `name` is its name within the layer."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class WeightFormat(Protocol):
    """How a checkpoint stores one layer."""

    @property
    def unread(self) -> Collection[str]:
        """Tensors that the layer may also have and that are not read."""
        ...

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        """Return the tensors of the layer in a model of `dtype`, by their name in the checkpoint,
        without the bias."""
        ...

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        """Return the weight of some outputs, [rows, inputs].

        Args:
            tensors: of the whole layer, or of some runs of its rows, concatenated (see
                `StoredTensor.selection`); on the model's device, floats of any dtype. The weight
                may be a view of them.
            rows: a start and a stop, counted from the first row of the tensors.

        Raises:
            TensorError: invalid values.
        """
        ...
