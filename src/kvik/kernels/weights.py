"""Weights of linear layers: as a checkpoint defines them, and as an implementation stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvik.spec.shares import Between
from kvik.spec.weight_kind import MX_GROUP, Rounding, WeightKind

# For "..._and_mul" the first half of the outputs is the gate, which multiplies the second half.
# "clamped_swiglu": gate * sigmoid(SWIGLU_SLOPE * gate) * (up + 1), with gate <= SWIGLU_LIMIT and
# |up| <= SWIGLU_LIMIT. "limited_swiglu": silu(gate) * up, with gate <= SILU_LIMIT and |up| <=
# SILU_LIMIT. "clipped_swiglu": silu(gate) * up, with silu(gate) <= SWIGLU_LIMIT and |up| <=
# SWIGLU_LIMIT.
Activation = Literal[
    "silu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu",
    "gelu_and_mul",
    "relu",
    "relu_squared",
    "clamped_swiglu",
    "tanh",
    "limited_swiglu",
    "clipped_swiglu",
]
PAIRED: frozenset[Activation | None] = frozenset(
    {
        *("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul"),
        *("clamped_swiglu", "limited_swiglu", "clipped_swiglu"),
    }
)
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
SILU_LIMIT = 10.0
XIELU_SLOPE = 0.5  # at 0
# Numbers in the kernels: odd ones are paired.
ACTIVATIONS: Mapping[Activation | None, int] = {
    None: 0,
    "silu_and_mul": 1,
    "gelu_tanh": 2,
    "gelu_tanh_and_mul": 3,
    "gelu": 4,
    "gelu_and_mul": 5,
    "relu": 6,
    "relu_squared": 8,
    "clamped_swiglu": 9,
    "tanh": 10,
    "limited_swiglu": 11,
    "clipped_swiglu": 13,
}

SYMMETRIC_ZERO = 8  # for four bits without zero points
# Parts of a weight that have a row for each output, and parts that all rows share.
PER_OUTPUT, SHARED = ("values", "scales", "zeros", "minima"), ("order", "input_scale")


@dataclass(frozen=True, slots=True)
class Weight:
    """Some outputs of a linear layer, stored according to its kind."""

    kind: WeightKind
    # [outputs, inputs], floats, int8 or float8_e4m3fn; for four bits [outputs, inputs / 2] uint8,
    # two per byte, the low half the even input. With the native kernels a NaN of E4M3 makes its
    # whole output NaN.
    values: Tensor
    # fp32; [outputs] if the group is 0, else [outputs, ceil(inputs / group)]; None for floats. For
    # int4 the native kernels keep eleven binary digits: all digits of fp16 and bfloat16 numbers.
    # For E4M3 the scales of a tensor or of square blocks are repeated for each output. For mxfp4
    # uint8: s in 0..254 (E8M0) is 2^(s - 127).
    scales: Tensor | None = None
    zeros: Tensor | None = None  # [outputs, groups] uint8, in 0..15, if the kind has them
    # [outputs, groups] fp32, if the kind has them, stored like the scales. A zero point that is not
    # an integer becomes a minimum: zero * scale.
    minima: Tensor | None = None
    # [inputs] int32, a permutation, if the kind is ordered: input i of `values` is input order[i]
    # of the layer.
    order: Tensor | None = None
    # [1] fp32, if activations are "static": x / input_scale is rounded. Layers that become rows of
    # one matrix share the largest of their scales.
    input_scale: Tensor | None = None

    @staticmethod
    def empty(kind: WeightKind, rows: int, inputs: int, device: torch.device) -> Weight:
        """Return a weight to be filled. Parts that all rows share are 0."""

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        groups = (rows, -(-inputs // kind.group)) if kind.group else (rows,)
        return Weight(
            kind,
            new(rows, inputs // 2 if in_nibbles(kind) else inputs, dtype=DTYPES[kind.codes]),
            None if kind.floats else new(*groups, dtype=scale_dtype(kind)),
            new(*groups, dtype=torch.uint8) if kind.offsets == "zeros" else None,
            new(*groups, dtype=torch.float32) if kind.offsets == "minima" else None,
            torch.zeros(inputs, dtype=torch.int32, device=device) if kind.ordered else None,
            torch.zeros(1, device=device) if kind.activations == "static" else None,
        )

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * (2 if in_nibbles(self.kind) else 1)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parts that it has, by name."""
        parts = {name: getattr(self, name) for name in (*PER_OUTPUT, *SHARED)}
        return {name: part for name, part in parts.items() if part is not None}

    def rows(self, index: slice | Tensor) -> Weight:
        """Return some outputs: a range, or ids [n]."""
        parts = {name: part[index] for name, part in self.tensors.items() if name in PER_OUTPUT}
        return Weight(self.kind, **(self.tensors | parts))

    def columns(self, first: int, end: int) -> Weight:
        """Return some inputs of all outputs: whole groups, in stored order."""
        group, parts = self.kind.group, dict(self.tensors)
        per = 2 if in_nibbles(self.kind) else 1
        parts["values"] = self.values[:, first // per : end // per]
        for name in PER_OUTPUT[1:] if group else ():
            if name in parts:
                parts[name] = parts[name][:, first // group : -(-end // group)]
        return Weight(self.kind, **parts)

    def plain(self) -> Weight:
        """Return the weight with its inputs in stored order."""
        return replace(self, kind=replace(self.kind, ordered=False), order=None)

    def dequantized(self) -> Tensor:
        """Return [outputs, inputs] fp32, with inputs in the order of the layer."""
        scales = self.scales
        if scales is None:
            wide = self.values.float()
        elif self.kind.codes in NUMBERS:
            numbers = torch.tensor(NUMBERS[self.kind.codes], device=self.values.device)
            codes = _grouped(self.values, self.kind.group).int()
            factors = _powers(scales) if self.kind.codes == "mxfp4" else scales
            wide = numbers[codes].mul_(factors[:, :, None])
            wide = wide.view(self.outputs, self.inputs)
        elif self.kind.codes == "int4":
            wide = _grouped(self.values, self.kind.group)
            if self.minima is None:
                zeros = SYMMETRIC_ZERO if self.zeros is None else self.zeros[:, :, None].float()
                wide = (wide - zeros).mul_(scales[:, :, None])
            else:
                wide = wide.mul_(scales[:, :, None]).sub_(self.minima[:, :, None])
            wide = wide.view(self.outputs, self.inputs)
        else:
            wide = self.values.float() * _spread(scales, self.kind.group, self.inputs)
        if self.order is None:
            return wide
        return torch.empty_like(wide).index_copy_(1, self.order.long(), wide)


def float_kind(dtype: torch.dtype) -> WeightKind:
    """Return the kind of weights that are stored as floats."""
    return WeightKind(str(dtype).removeprefix("torch."))


def float_weight(values: Tensor) -> Weight:
    """Return a weight of floats. values: [outputs, inputs], any float dtype."""
    return Weight(float_kind(values.dtype), values)


def int8_weight(
    values: Tensor, scales: Tensor, quantize_activations: bool, group: int = 0
) -> Weight:
    """Return a weight of int8: w = value * scale.

    Args:
        quantize_activations: x is rounded to eight bits too, with a scale for each token and group.
    """
    rounding: Rounding = "group" if group else "token"
    rounding = rounding if quantize_activations else "float"
    return Weight(WeightKind("int8", group, activations=rounding), values, scales)


def int4_weight(values: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> Weight:
    """Return a weight of four bits: w = (q - zero) * scale; zeros None: 8 everywhere."""
    kind = WeightKind("int4", group, "" if zeros is None else "zeros")
    return Weight(kind, values, scales, zeros)


def int4_min_weight(values: Tensor, scales: Tensor, minima: Tensor, group: int) -> Weight:
    """Return a weight of four bits: w = q * scale - minimum."""
    return Weight(WeightKind("int4", group, "minima"), values, scales, minima=minima)


def fp8_weight(
    values: Tensor,
    scales: Tensor,
    group: int = 0,
    activations: Rounding = "float",
    input_scale: Tensor | None = None,
) -> Weight:
    """Return a weight of E4M3: w = value * scale.

    Args:
        activations: how x is rounded; "group" needs a group, "static" an `input_scale`.
    """
    kind = WeightKind("fp8", group, activations=activations)
    return Weight(kind, values, scales, input_scale=input_scale)


def mxfp4_weight(values: Tensor, scales: Tensor) -> Weight:
    """Return a weight of E2M1 in groups of 32: w = value * 2^(scale - 127)."""
    return Weight(WeightKind("mxfp4", MX_GROUP), values, scales)


def nvfp4_weight(values: Tensor, scales: Tensor, group: int) -> Weight:
    """Return a weight of E2M1 in groups: w = value * scale."""
    return Weight(WeightKind("nvfp4", group), values, scales)


def table_weight(codes: str, values: Tensor, scales: Tensor, group: int) -> Weight:
    """Return a weight of codes of the numbers of a table: w = number * scale.

    Args:
        codes: "iq4", "nf4" or "bnb_fp4".
    """
    return Weight(WeightKind(codes, group), values, scales)


def ordered_weight(plain: Weight, order: Tensor) -> Weight:
    """Return a weight whose inputs were permuted by an order, [inputs] int32."""
    return replace(plain, kind=replace(plain.kind, ordered=True), order=order)


DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "nvfp4": torch.uint8,
    "iq4": torch.uint8,
    "nf4": torch.uint8,
    "bnb_fp4": torch.uint8,
}
# The number of each code of E2M1.
E2M1 = tuple(
    sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
# The same of IQ4, of GGUF files (ggml's ggml-common.h).
IQ4 = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
# The same of NF4 (Dettmers et al. 2023, QLoRA, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# The same of bitsandbytes' FP4, which is not E2M1.
BNB_FP4 = tuple(
    sign * size / 192 for sign in (1.0, -1.0) for size in (0, 1, 128, 192, 64, 96, 32, 48)
)
NUMBERS = {"mxfp4": E2M1, "nvfp4": E2M1, "iq4": IQ4, "nf4": NF4, "bnb_fp4": BNB_FP4}
# Kernels that multiply integers round these multiples of the numbers, and divide the scales by
# them: docs/quantisation.md says how much that changes.
UNITS = {"nvfp4": 2, "iq4": 1, "nf4": 112, "bnb_fp4": 120}


def in_nibbles(kind: WeightKind) -> bool:
    """Return whether a byte holds two values."""
    return not kind.floats and kind.bits == 4


def scale_dtype(kind: WeightKind) -> torch.dtype:
    """Return the dtype of a quantised weight's scales."""
    return torch.uint8 if kind.codes == "mxfp4" else torch.float32


def _spread(scales: Tensor, group: int, inputs: int) -> Tensor:
    """Return the scale of each weight, or of each output: [outputs, inputs or 1]."""
    if not group:
        return scales[:, None]
    return scales.repeat_interleave(group, dim=1)[:, :inputs]


def _powers(scales: Tensor) -> Tensor:
    """Convert E8M0 to fp32 by its bits; the smallest is denormal in fp32."""
    return (scales.int() << 23).clamp_(min=1 << 22).view(torch.float32)


def _grouped(values: Tensor, group: int) -> Tensor:
    """Unpack [outputs, inputs / 2] bytes into [outputs, inputs / group, group] fp32."""
    halves = torch.stack((values & 15, values >> 4), dim=-1)
    return halves.view(len(values), -1, group).float()


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A matrix without its values: a weight, and the operations after the product."""

    # kind, rows, inputs: of the weight.
    kind: WeightKind
    rows: int
    inputs: int
    bias: bool  # whether there is one
    activation: Activation | None
    out_dtype: torch.dtype
    device: torch.device
    # Number of heads that share the rows in `Ops.linear_each`; 0: it is for `linear`.
    heads: int = 0
    # Number of the expert that it belongs to, and number of experts; None: no expert.
    expert: tuple[int, int] | None = None
    # The heads or channels that it computes or reads, if processes can divide them; None: they
    # cannot.
    between: Between | None = None
    replicable: bool = False  # it is so small that each process may have all of it

    @property
    def outputs(self) -> int:
        """Width of y."""
        return self.rows // 2 if self.paired else self.rows

    @property
    def paired(self) -> bool:
        """Whether the rows are gate and up, which the activation multiplies."""
        return self.activation in PAIRED


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as one implementation of `Ops` stores it."""

    spec: MatrixSpec
    bias: Tensor | None  # [rows], in a dtype of the implementation's choice
    data: object  # specific to the implementation


@dataclass(frozen=True, slots=True)
class ExpertSet:
    """The MLPs of a layer's experts."""

    # up, down: the two matrices of each expert; all of a list have one kind and size.
    up: tuple[Matrix, ...]
    down: tuple[Matrix, ...]
    data: object = None  # specific to the implementation
    weigh_inputs: bool = False  # the weight of an expert multiplies its inputs, not its outputs

    @property
    def outputs(self) -> int:
        """Width of an expert's result."""
        return self.down[0].spec.outputs
