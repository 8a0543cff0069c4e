"""Plain float weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import FloatWeight
from kvik.nn.formats.base import LinearShape, Param, Shard


class Dense:
    """weight [outputs, inputs] in the model's dtype; the fused parts are runs of rows."""

    name = "dense"

    def match(self, tensors: frozenset[str], quantization: Mapping[str, object] | None) -> bool:
        return tensors == {"weight"}

    def params(
        self, shape: LinearShape, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Param]:
        weight = torch.empty(sum(shape.outputs), shape.inputs, dtype=dtype, device=device)
        parts = weight.split(shape.outputs)
        axis = {"column": 0, "row": 1, None: None}[shard]
        if shape.transposed:
            parts = tuple(part.t() for part in parts)
            axis = None if axis is None else 1 - axis
        return {"weight": Param(weight, tuple(parts), axis)}

    def weight(self, params: dict[str, Tensor]) -> FloatWeight:
        return FloatWeight(params["weight"])
