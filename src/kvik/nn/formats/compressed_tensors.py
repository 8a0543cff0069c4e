"""Integer weights in the formats of compressed-tensors (the compressors of version 0.20)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor, TensorError
from kvik.nn.formats.bits import WORD, pack_stream, unpack_stream, words_of
from kvik.nn.formats.integers import (
    SIGN,
    Codes,
    GroupedFormat,
    check_group,
    finite,
    group_index,
    word_axis,
)
from kvik.spec.stored_weights import StoredScheme

WEIGHT, PACKED, SCALE, ZERO = "weight", "weight_packed", "weight_scale", "weight_zero_point"
SHAPE, INDEX = "weight_shape", "weight_g_idx"
INPUT_SCALE = "input_scale"
# Calibrated scales of activations, not used: for integers the engine computes a scale for each
# token. The output scales are older names of scales of the KV cache.
ACTIVATIONS = (INPUT_SCALE, "input_zero_point", "output_scale", "output_zero_point")
BYTE = 8


def scale_shape(
    scheme: StoredScheme, shape: LinearShape, stored: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return the shape of `weight_scale`. A single scale is [1] or [], a scale for each output
    [outputs, 1] or [outputs].

    Args:
        stored: the shape in the checkpoint.

    Raises:
        ValueError: groups do not divide the inputs.
    """
    outputs = shape.outputs
    if not scheme.band:
        return () if stored == () else (1,)
    if not scheme.group:
        return (outputs,) if stored == (outputs,) else (outputs, 1)
    return outputs, check_group(scheme, shape)


class PackQuantized(GroupedFormat):
    """weight_packed [outputs, inputs * bits / 32], weight_scale [outputs, groups] and weight_shape
    [2]; asymmetric weights also have weight_zero_point [outputs * bits / 32, groups], act-order
    adds weight_g_idx [inputs]."""

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        super().__init__(scheme, shape, stored)
        self.scale = scale_shape(scheme, shape, stored.get(SCALE))
        self.unread = (*ACTIVATIONS, ZERO) if scheme.symmetric else ACTIVATIONS
        self.has_index = scheme.ordered or INDEX in stored

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        outputs, bits = self.shape.outputs, self.scheme.bits
        words = words_of(self.shape.inputs, bits)
        tensors = {
            PACKED: self.stored((outputs, words), torch.int32, OutputAxis()),
            SCALE: self.stored(self.scale, dtype, _scale_axis(self.scheme)),
            SHAPE: StoredTensor((2,), torch.int64),
        }
        if not self.scheme.symmetric:
            zeros = (words_of(outputs, bits), self.groups)
            tensors[ZERO] = self.stored(zeros, torch.int32, word_axis(0, bits))
        if self.has_index:
            tensors[INDEX] = StoredTensor((self.shape.inputs,), torch.int64)
        return tensors

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        shape, bits = self.shape, self.scheme.bits
        if tensors[SHAPE].tolist() != [shape.outputs, shape.inputs]:
            message = f"must be [{shape.outputs}, {shape.inputs}], not {tensors[SHAPE].tolist()}"
            raise TensorError(SHAPE, message)
        q = unpack_stream(tensors[PACKED][rows], bits, shape.inputs)
        zeros = None
        if not self.scheme.symmetric:
            first = rows.start // WORD
            words = tensors[ZERO][first * bits : -(-rows.stop // WORD) * bits]
            zeros = unpack_stream(words.t(), bits, rows.stop - first * WORD)
            zeros = zeros[:, rows.start - first * WORD :].t().contiguous()
        scales = _scales(tensors[SCALE], rows)
        groups = None
        if self.has_index and bool((tensors[INDEX] != -1).any()):  # -1: they are contiguous
            groups = group_index(
                INDEX, tensors[INDEX], self.groups, self.scheme.ordered, "actorder is not group"
            )
        return Codes(q, scales, zeros, bits, groups)

    def save(self, codes: Codes) -> dict[str, Tensor]:
        """Return the tensors of a whole layer."""
        tensors = {
            PACKED: pack_stream(codes.q, codes.bits),
            SCALE: codes.scales.reshape(self.scale).contiguous(),
            SHAPE: torch.tensor([self.shape.outputs, self.shape.inputs]),
        }
        if codes.zeros is not None:
            tensors[ZERO] = pack_stream(codes.zeros.t(), codes.bits).t().contiguous()
        if codes.groups is not None:
            tensors[INDEX] = codes.groups.to(torch.int32)
        return tensors


class IntQuantized(GroupedFormat):
    """weight [outputs, inputs] int8 and weight_scale; asymmetric weights also have
    weight_zero_point int8."""

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        super().__init__(scheme, shape, stored)
        self.scale = scale_shape(scheme, shape, stored.get(SCALE))
        self.unread = (*ACTIVATIONS, ZERO) if scheme.symmetric else ACTIVATIONS

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        weight = self.shape.outputs, self.shape.inputs
        tensors = {
            WEIGHT: self.stored(weight, torch.int8, OutputAxis()),
            SCALE: self.stored(self.scale, dtype, _scale_axis(self.scheme)),
        }
        if not self.scheme.symmetric:
            tensors[ZERO] = self.stored(self.scale, torch.int8, _scale_axis(self.scheme))
        return tensors

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        q = tensors[WEIGHT][rows].view(torch.uint8) ^ SIGN
        zeros = None
        if not self.scheme.symmetric:
            zeros = _spread(tensors[ZERO], rows).contiguous().view(torch.uint8) ^ SIGN
        return Codes(q, _scales(tensors[SCALE], rows), zeros, BYTE)

    def save(self, codes: Codes) -> dict[str, Tensor]:
        """Return the tensors of a whole layer; codes have eight bits."""
        tensors = {
            WEIGHT: (codes.q ^ SIGN).view(torch.int8),
            SCALE: _gathered(codes.scales, self.scale),
        }
        if codes.zeros is not None:
            tensors[ZERO] = _gathered((codes.zeros ^ SIGN).view(torch.int8), self.scale)
        return tensors


def _scale_axis(scheme: StoredScheme) -> OutputAxis | None:
    return OutputAxis() if scheme.band else None


def _scales(scales: Tensor, rows: slice) -> Tensor:
    return finite(SCALE, _spread(scales, rows))


def _spread(values: Tensor, rows: slice) -> Tensor:
    """Expand one value, a value per output, or a value per group to [rows, groups]."""
    wide = values.reshape(-1, 1) if values.dim() < 2 else values
    return wide[rows] if len(wide) > 1 else wide.expand(rows.stop - rows.start, -1)


def _gathered(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo `_spread`."""
    return (values if len(shape) == 2 else values[: shape[0] if shape else 1, 0]).reshape(shape)
