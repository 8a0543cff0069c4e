"""Weights of linear layers: what a checkpoint means, and what an implementation makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# "silu_and_mul": the first half of the outputs is the gate, the second half is multiplied with it.
Activation = Literal["silu_and_mul", "gelu_tanh"]

SYMMETRIC_ZERO = 8  # of four bits without zero points


@dataclass(frozen=True, slots=True)
class FloatKind:
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Int8Kind:
    quantize_activations: bool


@dataclass(frozen=True, slots=True)
class Int4Kind:
    group: int
    zeros: bool


# What is known of a weight before its values are.
WeightKind = FloatKind | Int8Kind | Int4Kind


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
    """w = value * scale, a scale for each output.

    Attributes:
        values: [outputs, inputs] int8, in -127..127.
        scales: [outputs] fp32.
        quantize_activations: x is rounded to eight bits too, with a scale for each token.
    """

    values: Tensor
    scales: Tensor
    quantize_activations: bool

    @property
    def kind(self) -> Int8Kind:
        return Int8Kind(self.quantize_activations)

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    def rows(self, index: slice | Tensor) -> Int8Weight:
        """Some outputs: a range, or ids [n]."""
        return Int8Weight(self.values[index], self.scales[index], self.quantize_activations)

    def dequantized(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return self.values * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w = (q - zero) * scale, a scale for each `group` neighbouring inputs of an output.

    Attributes:
        values: [outputs, inputs / 2] uint8, two q to a byte; the low half is the even input.
        scales: [outputs, inputs / group] fp32.
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
        halves = torch.stack((self.values & 15, self.values >> 4), dim=-1)
        q = halves.view(*self.scales.shape, self.group).float()
        q -= SYMMETRIC_ZERO if self.zeros is None else self.zeros[:, :, None].float()
        return q.mul_(self.scales[:, :, None]).view(self.outputs, self.inputs)


Weight = FloatWeight | Int8Weight | Int4Weight


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
