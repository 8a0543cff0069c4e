"""Plain float weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import FloatWeight
from kvik.nn.formats.base import LinearShape, Shard, StoredTensor


class Dense:
    """weight [outputs, inputs]; transposed ones have no rows to be read in runs."""

    unread = ()

    def __init__(self, shape: LinearShape) -> None:
        self.shape = shape

    def tensors(self, shard: Shard, dtype: torch.dtype) -> dict[str, StoredTensor]:
        shape = self.shape
        stored, axis = (shape.outputs, shape.inputs), {"column": 0, "row": 1, None: None}[shard]
        if shape.transposed:
            stored, axis = stored[::-1], None if axis is None else 1 - axis
        return {"weight": StoredTensor(stored, dtype, axis, in_runs=not shape.transposed)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> FloatWeight:
        weight = tensors["weight"]
        return FloatWeight((weight.t() if self.shape.transposed else weight)[rows])
