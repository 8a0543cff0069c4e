"""A quantised linear layer, the result of every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.kernels.fp8 import Block, fp8_scale, fp8_scales, round_activations, round_fp8, unround_fp8
from kvik.nn.formats.integers import Codes
from kvik.quantize.recipe import ROW, TENSOR, Recipe

# The quantiser of all methods but FP8: the scales of groups, and the codes of weights.
#
# w = (q - zero) * scale, with q an unsigned code of a few bits. Groups run along the inputs of one
# row, never across rows.


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales and zero points of a layer."""

    scales: Tensor  # [outputs, groups] fp32; [1, 1] for a whole tensor
    zeros: Tensor | None  # like `scales`, uint8: the code of 0. None: 2^(bits-1) everywhere.


@dataclass(frozen=True, slots=True)
class Grid:
    """How weights are rounded."""

    bits: int  # 2..8
    group: int  # inputs of a row that share a scale; -1: the whole row; 0: the whole tensor
    # Steps from -(2^(bits-1) - 1) to 2^(bits-1) - 1 about zero, so that the code 0 is not used.
    # Otherwise the range, which always includes 0, is spread over all codes, and 0 is represented
    # exactly.
    symmetric: bool
    # Dtypes that must all represent a scale exactly; empty: it stays in fp32. Weights are rounded
    # with the scale that the kernels will use, not with a finer one. Checkpoints store fp16, or
    # bf16 (compressed-tensors of a bf16 model); the native kernels keep fp16 precision.
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float16,)

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"a grid has 2 to 8 bits, not {self.bits}")
        if self.group < ROW:
            raise ValueError(f"a group is -1, 0 or a number of inputs, not {self.group}")

    @property
    def lowest(self) -> int:
        return 1 if self.symmetric else 0

    @property
    def highest(self) -> int:
        return 2**self.bits - 1

    @property
    def middle(self) -> int:
        """The code of 0 in a symmetric grid."""
        return 2 ** (self.bits - 1)

    def width(self, inputs: int) -> int:
        """Return the number of `inputs` that share a scale.

        Raises:
            ValueError: groups do not divide the inputs.
        """
        if self.group <= TENSOR:
            return inputs
        if inputs % self.group:
            raise ValueError(f"groups of {self.group} do not divide {inputs} inputs")
        return self.group

    def fit(self, w: Tensor) -> Scales:
        """Return the scales that cover all weights of w [outputs, inputs].

        Raises:
            ValueError: a weight is NaN or infinite, or too large for a scale in `scale_dtypes`;
                groups do not divide the inputs.
        """
        grouped = w.float().reshape(len(w), -1, self.width(w.shape[1]))
        low, high = grouped.amin(-1), grouped.amax(-1)  # [outputs, groups]
        if self.group == TENSOR:
            low, high = low.amin().view(1, 1), high.amax().view(1, 1)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ValueError("its weights hold NaN or infinity, which cannot be quantised")
        if self.symmetric:
            scale = self._stored(torch.maximum(high, -low) / (self.middle - 1))
            return Scales(scale, None)
        low, high = low.clamp(max=0), high.clamp(min=0)
        # divided first: the difference of two finite numbers may be infinite
        scale = self._stored(high / self.highest - low / self.highest)
        zero = (-low / scale).round_().clamp_(0, self.highest)
        return Scales(scale, zero.to(torch.uint8))

    def codes(self, w: Tensor, scale: Tensor, zero: Tensor | int) -> Tensor:
        """Return the nearest code of each weight, in w's float dtype. All shapes broadcast."""
        return (w / scale).round_().add_(zero).clamp_(self.lowest, self.highest)

    def _stored(self, scale: Tensor) -> Tensor:
        """Round scales to the stored dtypes; 0 becomes 1.

        Raises:
            ValueError: a scale is too large for a dtype.
        """
        for dtype in self.scale_dtypes:
            scale = scale.to(dtype).float()
        if not bool(scale.isfinite().all()):
            raise ValueError(f"its weights are too large for scales in {self.scale_dtypes}")
        return scale.masked_fill(scale == 0, 1.0)  # nothing to scale


def recipe_grid(recipe: Recipe, layer: str, dtype: torch.dtype) -> Grid:
    """Return the grid of a layer in a model of `dtype`; not for FP8, which has `Recipe.block`."""
    scales = (recipe.scale_dtype(dtype),)
    return Grid(recipe.bits_of(layer), recipe.group_size, recipe.symmetric, scales)


def quantise(w: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """w [outputs, inputs] -> codes, uint8."""
    grouped = w.float().reshape(len(w), -1, grid.width(w.shape[1]))
    zero = grid.middle if scales.zeros is None else scales.zeros[:, :, None]
    return grid.codes(grouped, scales.scales[:, :, None], zero).to(torch.uint8).view(w.shape)


def dequantise(q: Tensor, scales: Scales, grid: Grid) -> Tensor:
    """Codes [outputs, inputs] -> weights, fp32."""
    grouped = q.reshape(len(q), -1, grid.width(q.shape[1])).float()
    grouped -= grid.middle if scales.zeros is None else scales.zeros[:, :, None]
    return grouped.mul_(scales.scales[:, :, None]).view(q.shape)


# FP8 by rounding to nearest: a linear layer in E4M3 or E5M2 with its scales.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True)
class Float8:
    """A layer in eight-bit floats: w = value * scale."""

    values: Tensor  # [outputs, inputs] E4M3 or E5M2
    scales: Tensor  # [blocks of outputs, blocks of inputs] fp32
    block: Block  # outputs and inputs that share a scale; 0: all of them
    # [1] fp32, static scale of its inputs; None: each token has its own.
    input_scale: Tensor | None = None

    def dequantised(self) -> Tensor:
        """[outputs, inputs] fp32."""
        return unround_fp8(self.values, self.scales, self.block)

    def kernel_inputs(self, x: Tensor) -> Tensor:
        """Return x [tokens, inputs] as the kernels round it, fp32; with E5M2 it is not rounded."""
        if self.values.dtype != E4M3:
            return x.float()
        return round_activations(x, self.block[1], self.input_scale)


def float8(
    w: Tensor,
    block: Block,
    scale_dtype: torch.dtype = torch.float32,
    *,
    dtype: torch.dtype = E4M3,
    input_absmax: Tensor | None = None,
) -> Float8:
    """Round a layer to the nearest eight-bit floats.

    Args:
        w: [outputs, inputs], any float dtype.
        scale_dtype: dtype of the stored scales, which weights are rounded with.
        dtype: E4M3 or E5M2.
        input_absmax: [inputs] or [], from calibration, for a static scale of the inputs.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    scales = fp8_scales(w, dtype, block).to(scale_dtype).float()
    input_scale = None
    if input_absmax is not None:
        input_scale = fp8_scale(input_absmax.amax().reshape(1), E4M3).to(scale_dtype).float()
    return Float8(round_fp8(w, scales, dtype, block), scales, block, input_scale)


@dataclass(frozen=True, slots=True)
class Quantised:
    """A layer in codes: w[o, i] = (q[o, i] - zeros[o, g]) * scales[o, g]; g is the group of i."""

    q: Tensor  # [outputs, inputs] uint8 codes
    scales: Scales
    grid: Grid
    # [inputs] int64, the group of each input; None: inputs // group size.
    order: Tensor | None = None

    def dequantised(self) -> Tensor:
        """[outputs, inputs] fp32, inputs in the order of the layer."""
        if self.order is None:
            return dequantise(self.q, self.scales, self.grid)
        scales, zeros = self.scales.scales, self.scales.zeros
        zero = self.grid.middle if zeros is None else zeros[:, self.order]
        return (self.q.float() - zero) * scales[:, self.order]

    def codes(self) -> Codes:
        """Return codes for checkpoint layouts, with scales always [outputs, groups]."""
        outputs = len(self.q)
        scales, zeros = self.scales.scales, self.scales.zeros
        zeros = None if zeros is None else zeros.expand(outputs, -1)
        return Codes(self.q, scales.expand(outputs, -1), zeros, self.grid.bits, self.order)


# Results of a pass over a model, block by block, and its progress.

# Called with what is being worked on (a layer's name, "block 3: inputs", ...) and the share of the
# whole pass that is done, from 0 to 1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LayerResult:
    """The result for one linear layer."""

    name: str  # in the checkpoint, "model.layers.0.self_attn.q_proj"
    # None: it is not quantised (see also `BlockResult.changed`).
    quantised: Quantised | Float8 | None
    # || (W - Q) X || / || W X || on calibration inputs; || W - Q || / || W || without any; 0 if it
    # is not quantised.
    error: float
    on_inputs: bool  # whether `error` is the first of the two


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The result for one decoder block."""

    index: int  # of the block
    layers: tuple[LayerResult, ...]  # all linear layers, in the order of the model
    # Other tensors into which factors were folded (norms, biases, weights of layers that stay
    # floats), by name, in the shape and dtype of the checkpoint. Tensors in neither are unchanged.
    changed: Mapping[str, Tensor]
