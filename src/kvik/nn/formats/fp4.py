"""Four-bit floats (E2M1): MXFP4 of the OCP Microscaling Formats, in groups of 32 that share a power
of two (E8M0), in the layouts of compressed-tensors and gpt-oss; and NVFP4, in groups of 16 with
scales in E4M3, in those of compressed-tensors and ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, mxfp4_weight, nvfp4_weight
from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor, TensorError
from kvik.nn.formats.compressed_tensors import ACTIVATIONS, INPUT_SCALE, PACKED, SCALE, WEIGHT
from kvik.nn.formats.integers import GroupedFormat, finite
from kvik.spec.stored_weights import NVFP4_MODELOPT, StoredScheme
from kvik.spec.weight_kind import MX_GROUP

E8M0_NAN = 255
BLOCKS, SCALES = "blocks", "scales"


class Mxfp4Packed(GroupedFormat):
    """weight_packed [outputs, inputs / 2] uint8, the even input in the low half of a byte, and
    weight_scale [outputs, inputs / 32] uint8."""

    unread = ACTIVATIONS

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        outputs, widths = self.shape.outputs, {PACKED: self.shape.inputs // 2, SCALE: self.groups}
        return {
            name: self.stored((outputs, width), torch.uint8, OutputAxis())
            for name, width in widths.items()
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        return mxfp4_weight(tensors[PACKED][rows], powers_of_two(SCALE, tensors[SCALE][rows]))


class Mxfp4Blocks(GroupedFormat):
    """An expert of gpt-oss: blocks [outputs, inputs / 32, 16] uint8, the even input in the low half
    of a byte, and scales [outputs, inputs / 32] uint8."""

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        scales = self.shape.outputs, self.groups
        return {
            BLOCKS: self.stored((*scales, MX_GROUP // 2), torch.uint8, OutputAxis()),
            SCALES: self.stored(scales, torch.uint8, OutputAxis()),
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        scales = powers_of_two(SCALES, tensors[SCALES][rows])
        return mxfp4_weight(tensors[BLOCKS][rows].flatten(1), scales)


class Nvfp4(GroupedFormat):
    """weight_packed [outputs, inputs / 2] uint8, the even input in the low half of a byte,
    weight_scale [outputs, inputs / 16] E4M3 and their divisor, weight_global_scale, [1] or []; in
    ModelOpt's layout weight, weight_scale and their factor, weight_scale_2."""

    unread = (INPUT_SCALE, "input_global_scale")

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        super().__init__(scheme, shape, stored)
        self.packed, self.common = PACKED, "weight_global_scale"
        if scheme.layout == NVFP4_MODELOPT:
            self.packed, self.common = WEIGHT, "weight_scale_2"
        self.common_shape = () if stored.get(self.common) == () else (1,)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        codes, scales = (self.shape.outputs, self.shape.inputs // 2), self.groups
        return {
            self.packed: self.stored(codes, torch.uint8, OutputAxis()),
            SCALE: self.stored((codes[0], scales), torch.float8_e4m3fn, OutputAxis()),
            self.common: self.stored(self.common_shape, torch.float32, None),
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        common = finite(self.common, tensors[self.common]).float()
        if bool(common <= 0):
            raise TensorError(self.common, f"must be positive, not {float(common):g}")
        scales = finite(SCALE, tensors[SCALE][rows].float())
        scales = scales * common if self.packed == WEIGHT else scales / common
        return nvfp4_weight(tensors[self.packed][rows], scales, self.scheme.group)


def powers_of_two(name: str, scales: Tensor) -> Tensor:
    """Return scales [outputs, groups] uint8, none of them NaN.

    Args:
        name: of the tensor, for errors.

    Raises:
        TensorError: a scale is NaN.
    """
    if bool((scales == E8M0_NAN).any()):
        raise TensorError(name, "holds NaN")
    return scales
