"""What linear layers are in memory, as the checkpoint stores them or quantised at load, and what
they then weigh.

The memory plan and the loader both ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvik.spec.model import DTYPE_BYTES, LinearLayers
from kvik.spec.stored_weights import Fp8Activations, StoredScheme

# What `EngineConfig.quantization` may be, and what it means in words.
SCHEMES: Mapping[str, str] = {
    "none": "weights as the checkpoint stores them",
    "int8": "weights and activations in 8 bits, a scale for each output and each token",
    "int8-weight-only": "weights in 8 bits, a scale for each output",
    "int4": "weights in 4 bits in groups of up to 128 inputs; the head in 8 bits",
    "fp8": "weights in eight-bit floats (E4M3), a scale for each output",
}
INT4_GROUPS = (128, 64, 32)  # of inputs; the first that divides them is taken

MIN_INT4_GROUP, MIN_INT8_GROUP = (
    8,
    4,
)  # inputs that kernels multiply at a time; groups have whole ones

SCALE_BYTES = 4
# Of a group in the native kernels, which keep the size of an output's scales beside them.
NATIVE_GROUP_SCALE_BYTES = 2
ORDER_BYTES = 4
# Rows and inputs that a quantised matrix is filled up to on a GPU, and rows that share a counter.
GPU_TILE, GPU_COUNTED_ROWS = 128, 32


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """How a linear layer is quantised.

    Attributes:
        group: inputs that share a scale; 0: all of them.
        quantize_activations: inputs of integers are rounded to 8 bits too.
        zeros: groups of four bits have zero points, or minima.
        minima: they are minima: w = q * scale - minimum.
        float8: its 8 bits are E4M3 floats.
        fp8_activations: how their inputs are rounded.
        ordered: inputs are reordered, so that those of a group are neighbours.
    """

    bits: Literal[4, 8]
    group: int = 0
    quantize_activations: bool = False
    zeros: bool = True
    minima: bool = False
    float8: bool = False
    fp8_activations: Fp8Activations = "float"
    ordered: bool = False

    def weight_bytes(self, inputs: int, outputs: int, kernels: str = "torch") -> int:
        """Scales, zero points and the order of inputs included.

        Args:
            kernels: "torch", "native" or "triton", whose way it is kept in.
        """
        if kernels == "triton":
            return self._tiled_bytes(inputs, outputs)
        native = kernels == "native"
        values = inputs * outputs * self.bits // 8
        values += inputs * ORDER_BYTES if self.ordered else 0
        values += SCALE_BYTES if self.fp8_activations == "static" else 0
        if native or not self.group:
            values += outputs * SCALE_BYTES
        if not self.group:
            return values
        scale = NATIVE_GROUP_SCALE_BYTES if native and not self.float8 else SCALE_BYTES
        zero = (scale if self.minima else 1) if self.bits == 4 and self.zeros else 0
        return values + -(-inputs // self.group) * outputs * (scale + zero)

    def _tiled_bytes(self, inputs: int, outputs: int) -> int:
        """In whole tiles of GPU memory (kernels/triton/packed.py): a zero point lies within the
        scale of its group, and so does a minimum."""
        wide, rows = _up(inputs, GPU_TILE), _up(outputs, GPU_TILE)
        groups = -(-wide // self.group) if self.group else 1
        total = wide * rows * self.bits // 8 + groups * rows * SCALE_BYTES
        total += rows // GPU_COUNTED_ROWS * 4  # of splits that have arrived
        total += 2 * rows * SCALE_BYTES if self.minima else 0
        total += inputs * ORDER_BYTES if self.ordered else 0
        total += SCALE_BYTES if self.fp8_activations == "static" else 0
        if self.fp8_activations == "group" and self.group == GPU_TILE:  # scales of square blocks
            total += rows // GPU_TILE * _up(wide // GPU_TILE, 4) * SCALE_BYTES
        return total


def layer_scheme(quantization: str, inputs: int, *, head: bool) -> LayerScheme | None:
    """How a layer with `inputs` that is stored as floats is quantised; None: not at all.

    The head, whose errors nothing behind it evens out, and layers that no group divides keep eight
    bits under "int4".
    """
    if quantization == "none":
        return None
    if quantization == "int4" and not head:
        for group in INT4_GROUPS:
            if inputs % group == 0:
                return LayerScheme(4, group)
    if quantization == "fp8":
        return LayerScheme(8, float8=True)
    return LayerScheme(8, quantize_activations=quantization != "int8-weight-only")


def loaded_scheme(stored: StoredScheme, inputs: int) -> LayerScheme | None:
    """What a layer that the checkpoint stores quantised is in memory, without loss but for the last
    digits of scales; None: floats, because no kernel multiplies it."""
    group = stored.group if stored.group < inputs else 0
    if stored.layout == "fp8":
        if group % MIN_INT8_GROUP or stored.wide:
            return None
        rounded = stored.fp8_activations
        if rounded == "group" and not group:
            rounded = "token"
        return LayerScheme(8, group, float8=True, fp8_activations=rounded)
    ordered = stored.ordered and group > 0
    if stored.bits > 4 or stored.layout == "int-quantized":
        if not stored.symmetric or group % MIN_INT8_GROUP:
            return None
        return LayerScheme(8, group, stored.quantize_activations, ordered=ordered)
    zeros, width = not stored.symmetric, group or inputs
    # large groups are cut into small ones of the same scale
    for part in (width, *INT4_GROUPS):
        if part <= INT4_GROUPS[0] and width % part == 0 and part % MIN_INT4_GROUP == 0:
            return LayerScheme(4, part, zeros=zeros, minima=stored.minima, ordered=ordered)
    return None


def matrix_scheme(
    quantization: str, inputs: int, stored: Sequence[StoredScheme | None], *, head: bool
) -> LayerScheme | None:
    """Of a matrix made of several layers that have the same inputs; None: floats. A matrix has one
    scheme, so layers that differ become floats. What is stored in a way that no kernel multiplies
    is quantised as if it were stored as floats."""
    schemes = {
        (loaded_scheme(part, inputs) if part else None)
        or layer_scheme(quantization, inputs, head=head)
        for part in stored
    }
    return schemes.pop() if len(schemes) == 1 else None


class Weighed(Protocol):
    """What decides the weight of a model; a `ModelSpec` is one."""

    def weight_bytes(self, dtype: str) -> int: ...

    def linear_layers(self) -> Iterable[LinearLayers]: ...


def weight_bytes(model: Weighed, dtype: str, quantization: str, kernels: str = "torch") -> int:
    """Bytes of all weights: of linear layers as they are in memory, of the rest in `dtype`.

    Args:
        kernels: see `LayerScheme.weight_bytes`.
    """
    item = DTYPE_BYTES[dtype]
    total = model.weight_bytes(dtype)
    for like in model.linear_layers():
        scheme = matrix_scheme(quantization, like.inputs, like.stored, head=like.head)
        if scheme is not None:
            saved = like.inputs * like.outputs * item
            saved -= scheme.weight_bytes(like.inputs, like.outputs, kernels)
            total -= like.count * saved
    return total


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
