"""Weights that GGUF files store as rows of blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.gguf.types import BLOCK_TYPES
from kvik.kernels.weights import (
    SYMMETRIC_ZERO,
    Weight,
    float_weight,
    int4_min_weight,
    int4_weight,
    int8_weight,
    mxfp4_weight,
)
from kvik.nn.formats.base import Along, LinearShape, StoredTensor, TensorError
from kvik.nn.formats.bits import pack_nibbles
from kvik.nn.formats.mxfp4 import powers_of_two
from kvik.nn.gguf_blocks import BlockParts, mxfp4_parts, take_apart
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weights import loaded_kind

WEIGHT = "weight"


class Blocks:
    """weight [outputs, bytes of a row]: blocks of the type that the layout names."""

    unread = ()

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        """
        Raises:
            ValueError: the layer cannot be stored like this.
        """
        self.type = BLOCK_TYPES[scheme.layout]
        if shape.inputs % self.type.weights:
            raise ValueError(f"its {shape.inputs} inputs are no blocks of {self.type.weights}")
        self.shape = shape
        self.loaded = loaded_kind(scheme, shape.inputs)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        size = (self.shape.outputs, self.type.row_bytes(self.shape.inputs))
        why = f"{self.type.name}, in bytes"
        return {WEIGHT: StoredTensor(size, torch.uint8, Along(), in_runs=True, because=why)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        if self.type.name == "MXFP4":
            codes, powers = map(self.shape.ordered, mxfp4_parts(tensors[WEIGHT][rows]))
            return mxfp4_weight(pack_nibbles(codes), powers_of_two(WEIGHT, powers))
        parts = take_apart(self.type.name, tensors[WEIGHT][rows])
        if self.shape.columns:
            parts = BlockParts(
                self.shape.ordered(parts.codes),
                self.shape.ordered(parts.scales),
                None if parts.minima is None else self.shape.ordered(parts.minima),
            )
        scales, minima, loaded = _finite(parts.scales), parts.minima, self.loaded
        if minima is not None:
            _finite(minima)
        if loaded is None:
            return float_weight(parts.weights())
        if loaded.bits == 8:
            scales = scales if loaded.group else scales[:, 0]
            return int8_weight(parts.codes, scales, loaded.activations != "float", loaded.group)
        if minima is not None:
            return int4_min_weight(pack_nibbles(parts.codes), scales, minima, loaded.group)
        codes = (parts.codes + SYMMETRIC_ZERO).view(torch.uint8)
        return int4_weight(pack_nibbles(codes), scales, None, loaded.group)


def _finite(values: Tensor) -> Tensor:
    """
    Raises:
        TensorError: one is NaN or infinite.
    """
    if not bool(values.isfinite().all()):
        raise TensorError(WEIGHT, "holds NaN or infinity")
    return values
