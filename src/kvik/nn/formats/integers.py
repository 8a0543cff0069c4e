"""Integer layouts: GPTQ and AWQ, and the part that all layouts share: codes with scales and zero
points, and their conversion to the engine's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.weights import (
    SYMMETRIC_ZERO,
    Weight,
    float_weight,
    int4_weight,
    int8_weight,
    ordered_weight,
)
from kvik.nn.formats.base import LinearShape, OutputAxis, Shapes, StoredTensor, TensorError
from kvik.nn.formats.bits import (
    AWQ_BITS,
    AWQ_ORDER,
    WORD,
    add_one,
    pack_awq,
    pack_nibbles,
    pack_stream,
    subtract_one,
    unpack_awq,
    unpack_stream,
)
from kvik.spec.stored_weights import StoredScheme
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import loaded_kind

# The part that all integer layouts share.


class GroupedFormat:
    """A format of codes whose scales groups of inputs share; integers with zero points, unless
    `weight` is overridden."""

    unread: tuple[str, ...] = ()

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """
        Args:
            stored: shapes of the tensors that the layer has in the checkpoint, by name.

        Raises:
            ValueError: the layer cannot be stored like this.
        """
        self.scheme, self.shape = scheme, shape
        self.groups = check_group(scheme, shape)

    def stored(
        self, shape: tuple[int, ...], dtype: torch.dtype, axis: OutputAxis | None
    ) -> StoredTensor:
        """Return a tensor whose shape the fields of quantization_config decide."""
        reason = f"{self.scheme.bits} bits"
        reason += f" in groups of {self.scheme.group}" if self.scheme.group else ""
        return StoredTensor(shape, dtype, axis, because=reason)

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        """Return the codes of some outputs; see `WeightFormat.weight`."""
        raise NotImplementedError

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        return weight_of(self.codes(tensors, rows), self.scheme)


# GPTQ's layout, as AutoGPTQ and GPTQModel write it (their `QuantLinear.pack`).

INDEX = "g_idx"


class Gptq(GroupedFormat):
    """qweight [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32], scales
    [groups, outputs], g_idx [inputs], which may be absent if groups are contiguous."""

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        for name, count in (("inputs", shape.inputs), ("outputs", shape.outputs)):
            if count * scheme.bits % WORD:
                raise ValueError(
                    f"its {count} {name} of {scheme.bits} bits do not fill words of {WORD}"
                )
        super().__init__(scheme, shape, stored)
        self.has_index = scheme.ordered or INDEX in stored

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        inputs, outputs, bits = self.shape.inputs, self.shape.outputs, self.scheme.bits
        words, zeros = (inputs * bits // WORD, outputs), (self.groups, outputs * bits // WORD)
        tensors = {
            "qweight": self.stored(words, torch.int32, OutputAxis(1)),
            "qzeros": self.stored(zeros, torch.int32, word_axis(1, bits)),
            "scales": self.stored((self.groups, outputs), torch.float16, OutputAxis(1)),
        }
        if self.has_index:
            tensors[INDEX] = StoredTensor((inputs,), torch.int64)
        return tensors

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        bits = self.scheme.bits
        q = unpack_stream(tensors["qweight"][:, rows].t(), bits, self.shape.inputs)
        scales = finite("scales", tensors["scales"][:, rows]).t()
        zeros: Tensor | None = self._zeros(tensors["qzeros"], rows)
        if self.scheme.symmetric:
            if bool((zeros != 2 ** (bits - 1)).any()):
                message = f"must be {2 ** (bits - 1)} everywhere, because sym is true"
                raise TensorError("qzeros", message)
            zeros = None
        groups = None
        if self.has_index:
            groups = group_index(
                INDEX, tensors[INDEX], self.groups, self.scheme.ordered, "desc_act is false"
            )
        return Codes(q, scales, zeros, bits, groups)

    def _zeros(self, words: Tensor, rows: slice) -> Tensor:
        """Return [rows, groups]."""
        first = rows.start // WORD  # this many outputs fill words with codes of any bits
        bits = self.scheme.bits
        part = words[:, first * bits : -(-rows.stop // WORD) * bits]
        part = add_one(part, bits) if self.scheme.zeros_less_one else part
        zeros = unpack_stream(part, bits, rows.stop - first * WORD)
        return zeros[:, rows.start - first * WORD :].t().contiguous()

    def save(self, codes: Codes) -> dict[str, Tensor]:
        """Return the tensors of a whole layer."""
        bits = codes.bits
        zeros = codes.zeros
        if zeros is None:
            zeros = torch.full(codes.scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
        words = pack_stream(zeros.t(), bits)
        index = codes.groups
        if index is None:
            inputs = torch.arange(self.shape.inputs, device=codes.q.device)
            index = inputs // (self.shape.inputs // self.groups)
        return {
            "qweight": pack_stream(codes.q, bits).t().contiguous(),
            "qzeros": subtract_one(words, bits) if self.scheme.zeros_less_one else words,
            "scales": codes.scales.t().to(torch.float16).contiguous(),
            INDEX: index.to(torch.int32),
        }


# AutoAWQ's GEMM layout (awq/modules/linear/gemm.py of AutoAWQ 0.2).

PER_WORD = len(AWQ_ORDER)  # outputs in a word


class Awq(GroupedFormat):
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""

    def __init__(self, scheme: StoredScheme, shape: LinearShape, stored: Shapes) -> None:
        """See `GroupedFormat`."""
        if shape.outputs % PER_WORD:
            raise ValueError(f"its {shape.outputs} outputs do not fill words of {PER_WORD}")
        super().__init__(scheme, shape, stored)

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        outputs, words = self.shape.outputs, self.shape.outputs // PER_WORD
        axis = OutputAxis(1, PER_WORD)
        return {
            "qweight": self.stored((self.shape.inputs, words), torch.int32, axis),
            "qzeros": self.stored((self.groups, words), torch.int32, axis),
            "scales": self.stored((self.groups, outputs), torch.float16, OutputAxis(1)),
        }

    def codes(self, tensors: Mapping[str, Tensor], rows: slice) -> Codes:
        first = rows.start // PER_WORD
        words = slice(first, -(-rows.stop // PER_WORD))
        local_rows = slice(rows.start - first * PER_WORD, rows.stop - first * PER_WORD)
        q = unpack_awq(tensors["qweight"][:, words])[local_rows]
        zeros = unpack_awq(tensors["qzeros"][:, words])[local_rows]
        scales = finite("scales", tensors["scales"][:, rows]).t()
        return Codes(q, scales, zeros, AWQ_BITS)

    def save(self, codes: Codes) -> dict[str, Tensor]:
        """Return the tensors of a whole layer, which has zero points."""
        assert codes.zeros is not None
        return {
            "qweight": pack_awq(codes.q),
            "qzeros": pack_awq(codes.zeros),
            "scales": codes.scales.t().to(torch.float16).contiguous(),
        }


SIGN = 0x80  # XOR with it converts between uint8 codes and int8 values


@dataclass(frozen=True, slots=True)
class Codes:
    """w[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g], where g is the group of input i."""

    q: Tensor  # [outputs, inputs] uint8
    scales: Tensor  # [outputs, groups], any float dtype
    zeros: Tensor | None  # [outputs, groups] uint8; None: 2^(bits-1) everywhere
    bits: int  # number of bits of a code
    # [inputs] integers, the group of each input; None: i // group size.
    groups: Tensor | None = None


def weight_of(codes: Codes, scheme: StoredScheme) -> Weight:
    """Return the engine's weight of some outputs, of the kind that `loaded_kind` chooses."""
    inputs = codes.q.shape[1]
    loaded = loaded_kind(scheme, inputs)
    order = None if codes.groups is None else codes.groups.argsort(stable=True)
    q = codes.q if order is None else codes.q[:, order]
    if loaded is None:
        values = _multiplied_out(q, codes)
        if order is not None:
            values = torch.empty_like(values).index_copy_(1, order, values)
        return float_weight(values)
    plain = _plain(q, codes, loaded)
    if not loaded.ordered:
        return plain
    if order is None:
        order = torch.arange(inputs, device=q.device)
    return ordered_weight(plain, order.to(torch.int32))


def _plain(q: Tensor, codes: Codes, loaded: WeightKind) -> Weight:
    scales = codes.scales.float()
    if loaded.bits == 8:
        values = (q ^ SIGN).view(torch.int8)
        scales = scales if loaded.group else scales[:, 0]
        return int8_weight(values, scales, loaded.activations != "float", loaded.group)
    parts = q.shape[1] // loaded.group // scales.shape[1]  # of a group
    scales = scales.repeat_interleave(parts, dim=1)
    if codes.zeros is None:
        shifted = q + (SYMMETRIC_ZERO - 2 ** (codes.bits - 1))
        return int4_weight(pack_nibbles(shifted), scales, None, loaded.group)
    zeros = codes.zeros.repeat_interleave(parts, dim=1)
    return int4_weight(pack_nibbles(q), scales, zeros, loaded.group)


def _multiplied_out(q: Tensor, codes: Codes) -> Tensor:
    """Dequantise q, whose groups are contiguous -> [outputs, inputs] fp32."""
    wide = q.float().view(len(q), codes.scales.shape[1], -1)
    wide -= 2 ** (codes.bits - 1) if codes.zeros is None else codes.zeros[:, :, None].float()
    return wide.mul_(codes.scales.float()[:, :, None]).view(q.shape)


def check_group(scheme: StoredScheme, shape: LinearShape) -> int:
    """Return the number of groups of a layer's inputs.

    Raises:
        ValueError: the group size does not divide the inputs.
    """
    group = scheme.group or shape.inputs
    if shape.inputs % group:
        raise ValueError(f"groups of {group} do not divide its {shape.inputs} inputs")
    return shape.inputs // group


def word_axis(axis: int, bits: int) -> OutputAxis:
    """Return the places of outputs whose codes are one stream of bits along a dimension."""
    shared = math.gcd(WORD, bits)
    return OutputAxis(axis, WORD // shared, bits // shared)


def finite(name: str, scales: Tensor) -> Tensor:
    """Return the scales, all of them finite.

    A scale may be negative: tools that use the whole range of codes write negative scales.

    Raises:
        TensorError: a scale is NaN or infinite.
    """
    if not bool(scales.isfinite().all()):
        raise TensorError(name, "holds NaN or infinity")
    return scales


def group_index(
    name: str, index: Tensor, groups: int, ordered: bool, unordered_because: str
) -> Tensor | None:
    """Return the group of each input, checked; None: groups are contiguous, as they must be unless
    `ordered`.

    Raises:
        TensorError: a group does not exist, groups differ in size, or are in another order.
    """
    if bool(((index < 0) | (index >= groups)).any()):
        raise TensorError(name, f"must hold groups from 0 to {groups - 1}")
    if bool((index.bincount(minlength=groups) != len(index) // groups).any()):
        raise TensorError(name, f"must give all {groups} groups the same number of inputs")
    if ordered:
        return index
    if bool((index.diff() < 0).any()):
        raise TensorError(name, f"must count up, because {unordered_because}")
    return None
