"""Chooses a linear layer's weight kind, from its storage in the checkpoint and the quantisation
while loading.

The memory plan and the loader share this code, so that they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from kvik.spec.stored_weights import (
    BNB_TABLES,
    IQ4_LAYOUTS,
    MXFP4_LAYOUTS,
    NVFP4_LAYOUTS,
    TERNARY_LAYOUTS,
    StoredScheme,
)
from kvik.spec.weight_kind import MX_GROUP, Rounding, WeightKind

# Values of `EngineConfig.quantization` and their description in help texts.
SCHEMES: Mapping[str, str] = {
    "none": "weights as the checkpoint stores them",
    "int8": "weights and activations in 8 bits, a scale for each output and each token",
    "int8-weight-only": "weights in 8 bits, a scale for each output",
    "int4": "weights in 4 bits in groups of up to 128 inputs; the head in 8 bits",
    "mxfp4": "weights in four-bit floats (E2M1), a power of two for 32 inputs; the head in 8 bits",
    "fp8": "weights in eight-bit floats (E4M3), a scale for each output",
}
INT4_GROUPS = (128, 64, 32)  # group sizes; the first that divides the inputs is taken

MXFP4 = WeightKind("mxfp4", MX_GROUP)

# Group sizes must be multiples of these, because kernels multiply that many inputs at a time.
MIN_INT4_GROUP, MIN_INT8_GROUP = 8, 4


def layer_kind(quantization: str, inputs: int, *, head: bool) -> WeightKind | None:
    """Return the kind of a layer with `inputs` that is stored as floats; None: not quantised.

    With "int4" and "mxfp4", the head keeps eight bits, because no later layer reduces its errors,
    and so do layers whose inputs no group size divides.
    """
    if quantization == "none":
        return None
    if quantization == "int4" and not head:
        for group in INT4_GROUPS:
            if inputs % group == 0:
                return WeightKind("int4", group, "zeros")
    if quantization == "mxfp4" and not head and inputs % MX_GROUP == 0:
        return MXFP4
    if quantization == "fp8":
        return WeightKind("fp8")
    weight_only = quantization == "int8-weight-only"
    return WeightKind("int8", activations="float" if weight_only else "token")


def loaded_kind(stored: StoredScheme, inputs: int) -> WeightKind | None:
    """Return the weight kind of a layer that the checkpoint stores quantised. The conversion rounds
    only scales. None: floats, because no kernel supports this scheme."""
    if stored.layout in MXFP4_LAYOUTS:
        return MXFP4
    if stored.layout in IQ4_LAYOUTS:
        return WeightKind("iq4", stored.group)
    if stored.layout in NVFP4_LAYOUTS:
        return WeightKind("nvfp4", stored.group)
    if stored.layout in BNB_TABLES:  # blocks of a flattened matrix must not span two rows
        table = BNB_TABLES[stored.layout]
        return None if inputs % stored.group else WeightKind(table, stored.group)
    group = stored.group if stored.group < inputs else 0
    if stored.layout == "fp8":
        if group % MIN_INT8_GROUP or stored.e5m2:
            return None
        rounded: Rounding = stored.fp8_activations
        if rounded == "group" and not group:
            rounded = "token"
        return WeightKind("fp8", group, activations=rounded)
    ordered = stored.ordered and group > 0
    if stored.bits > 4 or stored.layout in ("int-quantized", *TERNARY_LAYOUTS):
        if not stored.symmetric or group % MIN_INT8_GROUP:
            return None
        rounded = ("group" if group else "token") if stored.quantize_activations else "float"
        return WeightKind("int8", group, activations=rounded, ordered=ordered)
    offsets: Literal["", "zeros", "minima"] = "" if stored.symmetric else "zeros"
    offsets = "minima" if stored.minima else offsets
    width = group or inputs
    # Large groups are split into small groups with the same scale.
    for part in (width, *INT4_GROUPS):
        if part <= INT4_GROUPS[0] and width % part == 0 and part % MIN_INT4_GROUP == 0:
            return WeightKind("int4", part, offsets, ordered=ordered)
    return None


def matrix_kind(
    quantization: str, inputs: int, stored: Sequence[StoredScheme | None], *, head: bool
) -> WeightKind | None:
    """Return the kind of a matrix made of several layers with the same inputs; None: floats.

    A matrix has one kind, so layers of different kinds become floats. A scheme that no kernel
    supports is quantised as if it were stored as floats.
    """
    kinds = {
        (loaded_kind(part, inputs) if part else None) or layer_kind(quantization, inputs, head=head)
        for part in stored
    }
    return kinds.pop() if len(kinds) == 1 else None
