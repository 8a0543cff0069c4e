"""Which layers are quantised at load, how, and what they then weigh.

The memory plan and the loader both ask here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvik.config.model_spec import DTYPE_BYTES, ModelSpec

# What `EngineConfig.quantization` may be, and what it means in words.
SCHEMES: Mapping[str, str] = {
    "none": "weights as the checkpoint stores them",
    "int8": "weights and activations in 8 bits, a scale for each output and each token",
    "int8-weight-only": "weights in 8 bits, a scale for each output",
    "int4": "weights in 4 bits in groups of up to 128 inputs; the head in 8 bits",
}
INT4_GROUPS = (128, 64, 32)  # of inputs; the first that divides them is taken

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """How a linear layer is quantised.

    Attributes:
        group: inputs that share a scale; 0: all of them.
        quantize_activations: its inputs are rounded to 8 bits too.
    """

    bits: Literal[4, 8]
    group: int = 0
    quantize_activations: bool = False

    def weight_bytes(self, inputs: int, outputs: int) -> int:
        """Scales and zero points included."""
        values = inputs * outputs * self.bits // 8
        if not self.group:
            return values + outputs * SCALE_BYTES
        return values + inputs // self.group * outputs * (SCALE_BYTES + 1)


def layer_scheme(quantization: str, inputs: int, *, head: bool) -> LayerScheme | None:
    """How a layer with `inputs` is quantised; None: as stored.

    The head, whose errors nothing behind it evens out, and layers that no group divides keep eight
    bits under "int4".
    """
    if quantization == "none":
        return None
    if quantization == "int4" and not head:
        for group in INT4_GROUPS:
            if inputs % group == 0:
                return LayerScheme(4, group)
    return LayerScheme(8, quantize_activations=quantization != "int8-weight-only")


def weight_bytes(spec: ModelSpec, dtype: str, quantization: str) -> int:
    """Bytes of all weights: of linear layers as they are quantised, of the rest in `dtype`."""
    item = DTYPE_BYTES[dtype]
    total = spec.weight_bytes(dtype)
    for count, inputs, outputs, head in _linear_layers(spec):
        scheme = layer_scheme(quantization, inputs, head=head)
        if scheme is not None:
            saved = inputs * outputs * item - scheme.weight_bytes(inputs, outputs)
            total -= count * saved
    return total


def _linear_layers(spec: ModelSpec) -> Iterator[tuple[int, int, int, bool]]:
    """How many of each, inputs, outputs, and whether it is the head (or the tied embedding)."""
    hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield layers, hidden, queries + 2 * keys, False
    yield layers, queries, hidden, False
    yield layers, hidden, (2 if spec.gated_mlp else 1) * inner, False
    yield layers, inner, hidden, False
    yield 1, hidden, spec.vocab_size, True
