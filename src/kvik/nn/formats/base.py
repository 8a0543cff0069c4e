"""The weight-format seam: how a checkpoint stores the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, WeightKind

# How tensor parallelism cuts a matrix (Shoeybi et al. 2019): "column" splits the outputs, "row"
# the inputs; None keeps the whole on every rank.
Shard = Literal["column", "row"] | None


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
        dtype: any float dtype stands for all of them.
        shard_axis: axis that ranks divide among them; None: every rank has the whole.
        in_runs: any run of its rows is the weight of as many outputs, without other tensors. So it
            need never be in memory as a whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard_axis: int | None
    in_runs: bool


class WeightFormat(Protocol):
    """How a checkpoint stores weights. Stateless: one object serves all layers."""

    name: str

    def match(self, tensors: frozenset[str], quantization: Mapping[str, object] | None) -> bool:
        """Whether a layer that the checkpoint stores as these tensors ("weight", "qweight", ...)
        has this format; `quantization` is config.json's quantization_config."""
        ...

    def kind(self, dtype: torch.dtype) -> WeightKind:
        """Of what `weight` returns in a model of `dtype`."""
        ...

    def tensors(
        self, shape: LinearShape, shard: Shard, dtype: torch.dtype
    ) -> dict[str, StoredTensor]:
        """The tensors of a layer by their name in the checkpoint, without the bias."""
        ...

    def weight(self, tensors: Mapping[str, Tensor], shape: LinearShape) -> Weight:
        """What the tensors of a layer mean, or a run of their rows: [outputs, inputs], of as many
        outputs as there are.

        Args:
            tensors: on the model's device, floats of any dtype. The weight may be views of them.
            shape: of the layer.
        """
        ...
