"""The weight-format seam: how a checkpoint stores the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, float_weight

# Plain float weights.


class Dense:
    """weight [outputs, inputs]; transposed ones have no rows to be read in runs."""

    unread = ()

    def __init__(self, shape: LinearShape) -> None:
        self.shape = shape

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        shape = self.shape
        stored = shape.outputs, shape.inputs
        if shape.transposed:
            stored = stored[::-1]
        return {"weight": StoredTensor(stored, dtype, in_runs=not shape.transposed)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        weight = tensors["weight"]
        return float_weight((weight.t() if self.shape.transposed else weight)[rows])


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer of the checkpoint.

    Attributes:
        transposed: the checkpoint stores [inputs, outputs] (GPT-2) and not [outputs, inputs].
    """

    inputs: int
    outputs: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that the checkpoint must hold for a layer.

    Attributes:
        dtype: any float dtype stands for all of them, but for those of eight bits; int64 also for
            int32.
        in_runs: any run of its rows is the weight of as many outputs, without other tensors. So it
            need never be in memory as a whole.
        because: the key of config.json that decides the shape, if not the sizes of the model.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    in_runs: bool = False
    because: str = ""


class TensorError(ValueError):
    """The values of a tensor cannot be; `name` is its name within the layer."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class WeightFormat(Protocol):
    """How a checkpoint stores one layer."""

    @property
    def unread(self) -> Collection[str]:
        """Tensors that the layer may have too, and that are not needed."""
        ...

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        """Return the tensors of the layer in a model of `dtype`, by their name in the checkpoint,
        without the bias."""
        ...

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        """Return what the tensors mean: some outputs, [rows, inputs].

        Args:
            tensors: of the whole layer or, of one that comes in runs, of such a run; on the model's
                device, floats of any dtype. The weight may be views of them.
            rows: a start and a stop, counted from the first row that the tensors hold.

        Raises:
            TensorError: values that cannot be.
        """
        ...
