"""FP8 weights, E4M3 or E5M2, with the scales of compressed-tensors, DeepSeek and transformers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.kernels.fp8 import Block, unround_fp8
from kvik.kernels.weights import Weight, float_weight, fp8_weight
from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor, TensorError
from kvik.nn.formats.compressed_tensors import ACTIVATIONS, INPUT_SCALE, SCALE, WEIGHT, scale_shape
from kvik.nn.formats.integers import finite
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weights import loaded_kind

BLOCK_SCALE = "weight_scale_inv"  # the inverse of the factor that was applied to the weights
POWERS = "scale"  # the same in files of DeepSeek-V4, where they may be E8M0
# Bits that are all set only in values that are not finite: NaN of E4M3; NaN and infinity of E5M2.
NO_NUMBER = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


class Fp8:
    """weight [outputs, inputs] and weight_scale: one, one per output, or one per block, [blocks of
    outputs, blocks of inputs], where the last blocks may be partial. Static activation scales add
    input_scale [1]."""

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        self.scheme, self.shape = scheme, shape
        self.dtype = torch.float8_e5m2 if scheme.e5m2 else torch.float8_e4m3fn
        self.block: Block = (scheme.band, scheme.group)
        self.static = scheme.fp8_activations == "static"
        self.unread = tuple(name for name in ACTIVATIONS if name != INPUT_SCALE or scheme.e5m2)
        if INPUT_SCALE in stored and not self.static and not scheme.e5m2:
            raise ValueError(f"it has an {INPUT_SCALE}, and its activations have no static scale")
        self.input_scale = () if stored.get(INPUT_SCALE) == () else (1,)
        blocks = scheme.band > 1 and scheme.group > 0
        self.scale_name = next((n for n in (BLOCK_SCALE, POWERS) if n in stored), SCALE)
        self.scale_dtype = torch.float8_e8m0fnu if self.scale_name == POWERS else torch.float32
        if blocks:
            rows, columns = -(-shape.outputs // scheme.band), -(-shape.inputs // scheme.group)
            self.scale: tuple[int, ...] = (rows, columns)
        else:
            self.scale = scale_shape(scheme, shape, stored.get(self.scale_name))

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        block = self.block
        reason = f"fp8 in blocks of {block[0]} x {block[1]}" if block[1] else "fp8"
        weight = (self.shape.outputs, self.shape.inputs)
        bands = OutputAxis(0, self.scheme.band) if self.scheme.band else None
        tensors = {
            WEIGHT: StoredTensor(weight, self.dtype, OutputAxis(), because=reason),
            self.scale_name: StoredTensor(self.scale, self.scale_dtype, bands, because=reason),
        }
        if self.static:
            reason = "static activations"
            tensors[INPUT_SCALE] = StoredTensor(self.input_scale, torch.float32, because=reason)
        return tensors

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        values = tensors[WEIGHT][rows]
        bits = NO_NUMBER[self.dtype]
        if bool(((values.view(torch.uint8) & bits) == bits).any()):
            raise TensorError(WEIGHT, "holds NaN or infinity" if self.scheme.e5m2 else "holds NaN")
        scales = self._scales(tensors[self.scale_name], rows)
        loaded = loaded_kind(self.scheme, self.shape.inputs)
        if loaded is None:
            return float_weight(unround_fp8(values, scales, (1, self.scheme.group)))
        scales = scales if loaded.group else scales[:, 0]
        return fp8_weight(
            values, scales, loaded.group, loaded.activations, self._input_scale(tensors)
        )

    def _input_scale(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Return [1] fp32."""
        if not self.static:
            return None
        scale = finite(INPUT_SCALE, tensors[INPUT_SCALE]).float().reshape(1)
        if bool(scale <= 0):
            raise TensorError(INPUT_SCALE, f"must be positive, not {float(scale):g}")
        return scale

    def _scales(self, scales: Tensor, rows: slice) -> Tensor:
        """Return [rows, groups of inputs] fp32."""
        scales = finite(self.scale_name, scales.float())
        if bool((scales < 0).any()):
            raise TensorError(self.scale_name, "holds negative scales")
        wide = scales.reshape(-1, 1) if scales.dim() < 2 else scales
        band = self.scheme.band or self.shape.outputs
        return wide[torch.arange(rows.start, rows.stop, device=wide.device) // band]

    def save(
        self, values: Tensor, scales: Tensor, input_scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the tensors of a whole layer.

        Args:
            values: [outputs, inputs] of this format's dtype.
            scales: as `fp8_scales` returns them for the block size of this format.
            input_scale: [1], for static activations.
        """
        scales = scales.to(self.scale_dtype).reshape(self.scale)
        tensors = {WEIGHT: values, self.scale_name: scales}
        if input_scale is not None:
            tensors[INPUT_SCALE] = input_scale.float().reshape(self.input_scale)
        return tensors
