"""Four-bit floats (E2M1): MXFP4 of the OCP Microscaling Formats, in groups of 32 that share a power
of two (E8M0), in the layouts of compressed-tensors, gpt-oss and DeepSeek-V4; and NVFP4, in groups
of 16 with scales in E4M3, in those of compressed-tensors and ModelOpt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.weights import Weight, mxfp4_weight, nvfp4_weight
from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor, TensorError
from kvik.nn.formats.compressed_tensors import ACTIVATIONS, INPUT_SCALE, PACKED, SCALE, WEIGHT
from kvik.nn.formats.fp8 import POWERS
from kvik.nn.formats.integers import GroupedFormat, finite
from kvik.spec.stored_weights import MXFP4_DEEPSEEK, NVFP4_MODELOPT, StoredScheme
from kvik.spec.weight_kind import MX_GROUP

E8M0_NAN = 255
BLOCKS, SCALES = "blocks", "scales"


class Mxfp4Packed(GroupedFormat):
    """weight_packed [outputs, inputs / 2] uint8, the even input in the low half of a byte, and
    weight_scale [outputs, inputs / 32] uint8; in DeepSeek-V4's layout weight, int8, and scale,
    E8M0."""

    unread = ACTIVATIONS

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        super().__init__(scheme, shape, stored)
        self.packed, self.scale, self.dtypes = PACKED, SCALE, (torch.uint8, torch.uint8)
        if scheme.layout == MXFP4_DEEPSEEK:
            self.packed, self.scale = WEIGHT, POWERS
            self.dtypes = torch.int8, torch.float8_e8m0fnu

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        outputs, (codes, scales) = self.shape.outputs, self.dtypes
        return {
            self.packed: self.stored((outputs, self.shape.inputs // 2), codes, OutputAxis()),
            self.scale: self.stored((outputs, self.groups), scales, OutputAxis()),
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        scales = powers_of_two(self.scale, tensors[self.scale][rows])
        return mxfp4_weight(tensors[self.packed][rows].view(torch.uint8), scales)


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
    """Return scales [outputs, groups] as uint8, none of them NaN.

    Args:
        name: of the tensor, for errors.
        scales: exponents in bytes, E8M0, or floats that are powers of two.

    Raises:
        TensorError: a scale is NaN, or no power of two.
    """
    powers = scales
    if scales.dtype != torch.uint8:
        powers = scales.to(torch.float8_e8m0fnu).view(torch.uint8)
    if bool((powers == E8M0_NAN).any()):
        raise TensorError(name, "holds NaN")
    if powers.dtype != scales.dtype and not torch.equal(
        powers.view(torch.float8_e8m0fnu).float(), scales.float()
    ):
        raise TensorError(name, "holds a number that is no power of two")
    return powers
