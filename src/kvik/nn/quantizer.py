"""Quantising a layer while it is loaded."""

from __future__ import annotations

from collections.abc import Callable

from kvik.config.errors import ModelError
from kvik.config.fields import shown
from kvik.config.quantization import LayerScheme
from kvik.kernels.rounding import round_int4, round_int8
from kvik.kernels.weights import FloatWeight, Weight

Quantizer = Callable[[Weight], Weight]


def quantizer(scheme: LayerScheme | None, layer: str) -> Quantizer:
    """What turns the stored weight of a layer into the one that is used.

    Weights that the checkpoint stores quantised are used as they are.

    Args:
        scheme: None: as stored.
        layer: its name, for errors.
    """

    def quantize(weight: Weight) -> Weight:
        if scheme is None or not isinstance(weight, FloatWeight):
            return weight
        try:
            if scheme.bits == 4:
                return round_int4(weight.values, scheme.group, symmetric=False)
            return round_int8(weight.values, scheme.quantize_activations)
        except ValueError as error:
            raise ModelError("model", f"layer {shown(layer)}: {error}") from None

    return quantize
