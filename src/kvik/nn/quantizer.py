"""What a layer becomes while it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.config.quantization import LayerScheme
from kvik.kernels.rounding import round_int4, round_int8, round_to_fp8
from kvik.kernels.weights import (
    FloatKind,
    FloatWeight,
    Fp8Kind,
    Int4Kind,
    Int4MinKind,
    Int8Kind,
    OrderedKind,
    PlainKind,
    Weight,
    WeightKind,
)


def weight_kind(scheme: LayerScheme | None, dtype: torch.dtype) -> WeightKind:
    """Of a matrix of this scheme; None: floats of `dtype`."""
    if scheme is None:
        return FloatKind(dtype)
    if scheme.float8:
        plain: PlainKind = Fp8Kind(scheme.group, scheme.fp8_activations)
    elif scheme.minima:
        plain = Int4MinKind(scheme.group)
    elif scheme.bits == 4:
        plain = Int4Kind(scheme.group, scheme.zeros)
    else:
        plain = Int8Kind(scheme.quantize_activations, scheme.group)
    return OrderedKind(plain) if scheme.ordered else plain


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Turns the stored weight of a layer into the one that is used, any run of rows on its own.

    Weights that the checkpoint stores quantised are used as they are, or multiplied out.

    Attributes:
        scheme: of the matrix that they become rows of; None: floats.
        layer: its name, for errors.
    """

    scheme: LayerScheme | None
    layer: str

    def __call__(self, weight: Weight) -> Weight:
        """
        Raises:
            ModelError: the weight cannot be quantised.
        """
        if not isinstance(weight, FloatWeight):
            return weight if self.scheme is not None else FloatWeight(weight.dequantized())
        if self.scheme is None:
            return weight
        try:
            if self.scheme.float8:
                return round_to_fp8(weight.values)
            if self.scheme.bits == 4:
                return round_int4(weight.values, self.scheme.group, symmetric=False)
            return round_int8(weight.values, self.scheme.quantize_activations)
        except ValueError as error:
            raise ModelError("model", f"layer {shown(self.layer)}: {error}") from None
