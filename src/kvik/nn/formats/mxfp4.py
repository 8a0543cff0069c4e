"""Floats of four bits (E2M1) in groups of 32 that share a power of two (E8M0): MXFP4 of the OCP
Microscaling Formats, in the orders of compressed-tensors and of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, mxfp4_weight
from kvik.nn.formats.base import Along, LinearShape, StoredTensor, TensorError
from kvik.nn.formats.compressed_tensors import ACTIVATIONS, PACKED, SCALE
from kvik.nn.formats.integers import because, check_group
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weight_kind import MX_GROUP

E8M0_NAN = 255
BLOCKS, SCALES = "blocks", "scales"


class Mxfp4Packed:
    """weight_packed [outputs, inputs / 2] uint8, the even input in the low half of a byte, and
    weight_scale [outputs, inputs / 32] uint8."""

    unread = ACTIVATIONS

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        """
        Raises:
            ValueError: the layer cannot be stored like this.
        """
        self.scheme, self.shape = scheme, shape
        self.groups = check_group(scheme, shape)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        def stored(columns: int) -> StoredTensor:
            size = self.shape.outputs, columns
            return StoredTensor(size, torch.uint8, Along(), because=because(self.scheme))

        return {PACKED: stored(self.shape.inputs // 2), SCALE: stored(self.groups)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        return mxfp4_weight(tensors[PACKED][rows], powers_of_two(SCALE, tensors[SCALE][rows]))


class Mxfp4Blocks:
    """blocks [outputs, inputs / 32, 16] uint8, the even input in the low half of a byte, and scales
    [outputs, inputs / 32] uint8: an expert of gpt-oss."""

    unread = ()

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        """
        Raises:
            ValueError: the layer cannot be stored like this.
        """
        self.scheme, self.shape = scheme, shape
        self.groups = check_group(scheme, shape)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        def stored(*rest: int) -> StoredTensor:
            size = (self.shape.outputs, self.groups, *rest)
            return StoredTensor(size, torch.uint8, Along(), because=because(self.scheme))

        return {BLOCKS: stored(MX_GROUP // 2), SCALES: stored()}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        scales = powers_of_two(SCALES, tensors[SCALES][rows])
        return mxfp4_weight(tensors[BLOCKS][rows].flatten(1), scales)


def powers_of_two(name: str, scales: Tensor) -> Tensor:
    """Return scales [outputs, groups] uint8, all of them numbers.

    Args:
        name: of the tensor, for errors.

    Raises:
        TensorError: a scale is NaN.
    """
    if bool((scales == E8M0_NAN).any()):
        raise TensorError(name, "holds NaN")
    return scales
