"""Weights of linear layers: what a checkpoint means, and what an implementation makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

# "silu_and_mul": the first half of the outputs is the gate, the second half is multiplied with it.
Activation = Literal["silu_and_mul", "gelu_tanh"]

# How x meets weights in E4M3: as it is, or rounded to E4M3 too, by a scale for each token, for each
# token and group of the weight's inputs, or by one that calibration has found. Else
# scale = absmax / 448, and 1 where all is 0 (`kernels/fp8.py`, `round_activations`).
Fp8Activations = Literal["float", "token", "group", "static"]

SYMMETRIC_ZERO = 8  # of four bits without zero points


@dataclass(frozen=True, slots=True)
class FloatKind:
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Int8Kind:
    quantize_activations: bool
    group: int = 0


@dataclass(frozen=True, slots=True)
class Int4Kind:
    group: int
    zeros: bool


@dataclass(frozen=True, slots=True)
class Int4MinKind:
    group: int


@dataclass(frozen=True, slots=True)
class Fp8Kind:
    group: int = 0
    activations: Fp8Activations = "float"


PlainKind = FloatKind | Int8Kind | Int4Kind | Int4MinKind | Fp8Kind


@dataclass(frozen=True, slots=True)
class OrderedKind:
    plain: PlainKind


# What is known of a weight before its values are.
WeightKind = PlainKind | OrderedKind


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """values: [outputs, inputs], any float dtype."""

    values: Tensor

    @property
    def kind(self) -> FloatKind:
        return FloatKind(self.values.dtype)

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    def rows(self, index: slice | Tensor) -> FloatWeight:
        """Some outputs: a range, or ids [n]."""
        return FloatWeight(self.values[index])

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return self.values.float()


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """w = value * scale, a scale for each output, or for each `group` neighbouring inputs of it.

    Attributes:
        values: [outputs, inputs] int8.
        scales: fp32; [outputs] if group is 0, else [outputs, ceil(inputs / group)].
        quantize_activations: x is rounded to eight bits too, with a scale for each token and group.
        group: 0: all inputs.
    """

    values: Tensor
    scales: Tensor
    quantize_activations: bool
    group: int = 0

    @property
    def kind(self) -> Int8Kind:
        return Int8Kind(self.quantize_activations, self.group)

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    def rows(self, index: slice | Tensor) -> Int8Weight:
        """Some outputs: a range, or ids [n]."""
        return Int8Weight(
            self.values[index], self.scales[index], self.quantize_activations, self.group
        )

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return self.values * _spread(self.scales, self.group, self.inputs)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w = (q - zero) * scale, a scale for each `group` neighbouring inputs of an output.

    Attributes:
        values: [outputs, inputs / 2] uint8, two q to a byte; the low half is the even input.
        scales: [outputs, inputs / group] fp32. The native kernels keep eleven binary digits of
            them: all of fp16 numbers, as of bfloat16 ones.
        zeros: [outputs, inputs / group] uint8, in 0..15; None: 8 everywhere.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def kind(self) -> Int4Kind:
        return Int4Kind(self.group, self.zeros is not None)

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return 2 * self.values.shape[1]

    def rows(self, index: slice | Tensor) -> Int4Weight:
        """Some outputs: a range, or ids [n]."""
        zeros = None if self.zeros is None else self.zeros[index]
        return Int4Weight(self.values[index], self.scales[index], zeros, self.group)

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        q = _grouped(self.values, self.group)
        q -= SYMMETRIC_ZERO if self.zeros is None else self.zeros[:, :, None].float()
        return q.mul_(self.scales[:, :, None]).view(self.outputs, self.inputs)


@dataclass(frozen=True, slots=True)
class Int4MinWeight:
    """w = q * scale - minimum, both for each `group` neighbouring inputs of an output.

    Attributes:
        values, scales: as of `Int4Weight`.
        minima: [outputs, inputs / group] fp32, kept as the scales are. A zero point that is no
            integer is one: zero * scale.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor
    group: int

    @property
    def kind(self) -> Int4MinKind:
        return Int4MinKind(self.group)

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return 2 * self.values.shape[1]

    def rows(self, index: slice | Tensor) -> Int4MinWeight:
        """Some outputs: a range, or ids [n]."""
        return Int4MinWeight(self.values[index], self.scales[index], self.minima[index], self.group)

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        q = _grouped(self.values, self.group).mul_(self.scales[:, :, None])
        return q.sub_(self.minima[:, :, None]).view(self.outputs, self.inputs)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """w = value * scale, a scale for each output, or for each `group` neighbouring inputs of it.

    Scales of a tensor or of square blocks are repeated for each output.

    Attributes:
        values: [outputs, inputs] float8_e4m3fn. With the native kernels a NaN makes all of its
            output NaN.
        scales: fp32; [outputs] if group is 0, else [outputs, ceil(inputs / group)].
        group: 0: all inputs.
        activations: how x is rounded; "group" needs a group.
        input_scale: [1] fp32, with "static" alone: x / input_scale is rounded. Layers that become
            rows of one matrix share the largest of theirs.
    """

    values: Tensor
    scales: Tensor
    group: int = 0
    activations: Fp8Activations = "float"
    input_scale: Tensor | None = None

    @property
    def kind(self) -> Fp8Kind:
        return Fp8Kind(self.group, self.activations)

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    def rows(self, index: slice | Tensor) -> Fp8Weight:
        """Some outputs: a range, or ids [n]."""
        return replace(self, values=self.values[index], scales=self.scales[index])

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return self.values.float() * _spread(self.scales, self.group, self.inputs)


PlainWeight = FloatWeight | Int8Weight | Int4Weight | Int4MinWeight | Fp8Weight


@dataclass(frozen=True, slots=True)
class OrderedWeight:
    """A weight whose inputs were put into another order, so that those of a group are neighbours
    (act-order of GPTQ): input i of `plain` is input order[i] of the layer.

    Attributes:
        order: [inputs] int32, a permutation.
    """

    plain: PlainWeight
    order: Tensor

    @property
    def kind(self) -> OrderedKind:
        return OrderedKind(self.plain.kind)

    @property
    def outputs(self) -> int:
        return self.plain.outputs

    @property
    def inputs(self) -> int:
        return self.plain.inputs

    def rows(self, index: slice | Tensor) -> OrderedWeight:
        """Some outputs: a range, or ids [n]."""
        return OrderedWeight(self.plain.rows(index), self.order)

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32, inputs as the layer has them."""
        ordered = self.plain.dequantized()
        return torch.empty_like(ordered).index_copy_(1, self.order.long(), ordered)


def _spread(scales: Tensor, group: int, inputs: int) -> Tensor:
    """The scale of each weight, or of each output: [outputs, inputs or 1]."""
    if not group:
        return scales[:, None]
    return scales.repeat_interleave(group, dim=1)[:, :inputs]


def _grouped(values: Tensor, group: int) -> Tensor:
    """[outputs, inputs / 2] bytes -> [outputs, inputs / group, group] fp32."""
    halves = torch.stack((values & 15, values >> 4), dim=-1)
    return halves.view(len(values), -1, group).float()


Weight = PlainWeight | OrderedWeight


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A matrix before its values are there: a weight, and what follows the product.

    Attributes:
        kind, rows, inputs: of the weight.
        bias: whether there is one.
    """

    kind: WeightKind
    rows: int
    inputs: int
    bias: bool
    activation: Activation | None
    out_dtype: torch.dtype
    device: torch.device

    @property
    def outputs(self) -> int:
        """Width of y."""
        return self.rows // 2 if self.activation == "silu_and_mul" else self.rows


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as one implementation of `Ops` stores it.

    Attributes:
        bias: [rows], in a dtype of the implementation's choice.
        data: the implementation's own.
    """

    spec: MatrixSpec
    bias: Tensor | None
    data: object
