"""Quantising a layer while it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.config.quantization import LayerScheme
from kvik.kernels.rounding import round_int4, round_int8
from kvik.kernels.weights import FloatKind, FloatWeight, Int4Kind, Int8Kind, Weight, WeightKind


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Turns the stored weight of a layer into the one that is used, any run of rows on its own.

    Weights that the checkpoint stores quantised are used as they are.

    Attributes:
        scheme: None: as stored.
        layer: its name, for errors.
    """

    scheme: LayerScheme | None
    layer: str

    def kind(self, stored: WeightKind) -> WeightKind:
        """What becomes of a weight of this kind."""
        if self.scheme is None or not isinstance(stored, FloatKind):
            return stored
        if self.scheme.bits == 4:
            return Int4Kind(self.scheme.group, zeros=True)
        return Int8Kind(self.scheme.quantize_activations)

    def __call__(self, weight: Weight) -> Weight:
        """
        Raises:
            ModelError: the weight cannot be quantised.
        """
        if self.scheme is None or not isinstance(weight, FloatWeight):
            return weight
        try:
            if self.scheme.bits == 4:
                return round_int4(weight.values, self.scheme.group, symmetric=False)
            return round_int8(weight.values, self.scheme.quantize_activations)
        except ValueError as error:
            raise ModelError("model", f"layer {shown(self.layer)}: {error}") from None
