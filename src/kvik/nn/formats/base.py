"""The weight-format seam: how a checkpoint stores the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvik.kernels.weights import Weight

# How tensor parallelism cuts a matrix (Shoeybi et al. 2019): "column" splits the outputs, "row"
# the inputs; None keeps the whole on every rank.
Shard = Literal["column", "row"] | None


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer, possibly fused from several of the checkpoint.

    Attributes:
        inputs: width of x.
        outputs: output width of each fused part, in order.
        transposed: the checkpoint stores [inputs, outputs] (GPT-2) and not [outputs, inputs].
    """

    inputs: int
    outputs: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Param:
    """A stored tensor and, for each fused part, the view that takes the checkpoint's tensor.

    `shard_axis` is the axis of the checkpoint's tensor that ranks divide among them.
    """

    tensor: Tensor
    parts: tuple[Tensor, ...]
    shard_axis: int | None = None


class WeightFormat(Protocol):
    """How a checkpoint stores weights. Stateless: one object serves all layers."""

    name: str

    def match(self, tensors: frozenset[str], quantization: Mapping[str, object] | None) -> bool:
        """Whether a layer that the checkpoint stores as these tensors ("weight", "qweight", ...)
        has this format; `quantization` is config.json's quantization_config."""
        ...

    def params(
        self, shape: LinearShape, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Param]:
        """Unfilled tensors of a layer by their name in the checkpoint, without the bias."""
        ...

    def weight(self, params: dict[str, Tensor]) -> Weight:
        """What the filled tensors mean: the weight of all parts, [outputs, inputs]."""
        ...
