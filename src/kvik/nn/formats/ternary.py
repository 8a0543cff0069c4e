"""Weights of -1, 0 and 1, as transformers stores those of BitNet (`integrations/bitnet.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, int8_weight
from kvik.nn.formats.base import LinearShape, OutputAxis, StoredTensor, TensorError
from kvik.nn.formats.integers import finite
from kvik.spec.stored_weights import DIVIDED, StoredScheme

WEIGHT, SCALE = "weight", "weight_scale"
PER_BYTE = 4


class Ternary:
    """weight [outputs / 4, inputs] uint8, two bits for each number plus 1; weight_scale [1]. Byte
    r has the numbers of outputs r, r + outputs / 4, and so on, the lowest bits first; the scale
    multiplies the numbers, or divides them (`DIVIDED`)."""

    unread = ()

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        """See `GroupedFormat`."""
        if shape.outputs % PER_BYTE:
            raise ValueError(f"its {shape.outputs} outputs do not fill bytes of {PER_BYTE}")
        self.scheme, self.shape = scheme, shape
        self.bytes = shape.outputs // PER_BYTE  # in a column

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        every = OutputAxis(0, self.shape.outputs, self.bytes)  # a byte has outputs of all quarters
        packed = StoredTensor((self.bytes, self.shape.inputs), torch.uint8, every)
        return {WEIGHT: packed, SCALE: StoredTensor((1,), dtype)}

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        packed = tensors[WEIGHT]
        outputs = torch.arange(rows.start, rows.stop, device=packed.device)
        codes = packed[outputs % self.bytes] >> 2 * (outputs // self.bytes)[:, None] & 3
        if bool((codes == 3).any()):
            raise TensorError(WEIGHT, "must hold numbers from 0 to 2")
        scale = tensors[SCALE].float()
        scale = finite(SCALE, 1 / scale if self.scheme.layout == DIVIDED else scale)
        values = codes.to(torch.int8) - 1
        return int8_weight(values, scale.expand(len(outputs)), quantize_activations=True)
