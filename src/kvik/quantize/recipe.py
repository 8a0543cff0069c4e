"""The user's settings: the method, the grid, and the layers that stay floats.

This module does not import torch, so that a command line is checked at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, get_args

from kvik.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

    from kvik.kernels.fp8 import Block

Method = Literal["rtn", "gptq", "awq", "smoothquant", "fp8"]
Layout = Literal["awq", "gptq", "compressed-tensors", "fp8"]
ActivationScheme = Literal["dynamic", "static"]
Fp8Format = Literal["e4m3", "e5m2"]

METHODS: tuple[Method, ...] = get_args(Method)
SCHEMES: tuple[ActivationScheme, ...] = get_args(ActivationScheme)
FP8_FORMATS: tuple[Fp8Format, ...] = get_args(Fp8Format)
BITS: Mapping[Method, tuple[int, ...]] = {
    "rtn": (2, 3, 4, 8),
    "gptq": (2, 3, 4, 8),
    "awq": (2, 3, 4, 8),
    "smoothquant": (8,),
    "fp8": (8,),
}
ROW = -1  # `group_size`: a scale for each output
TENSOR = 0  # `group_size` of fp8: one scale
SQUARE = 128  # `group_size` of fp8: a scale for each block of this many outputs and inputs
GROUPS = (128, 64, 32)  # "auto" chooses one of these
DAMPING, SMOOTHING = 0.01, 0.5  # defaults
MANY = 8  # with a budget: bits of the most sensitive layers


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the linear layers of all blocks are quantised; head and embedding never are.

    Raises:
        ConfigError: a field has a value that is not allowed, or not with this method.
    """

    method: Method
    bits: int = 4  # of a code; fp8 and smoothquant have 8
    # Inputs that share a scale; -1: all of them. With fp8 128 means blocks of 128 x 128, and 0 one
    # scale for the layer.
    group_size: int = 128
    symmetric: bool = True  # no zero points
    act_order: bool = False  # GPTQ rounds the columns with the largest inputs first
    static_groups: bool = False  # with `act_order`: groups stay contiguous in the layer
    damping: float = DAMPING  # of GPTQ, a share of the mean diagonal
    smoothing: float = SMOOTHING  # alpha of SmoothQuant
    # Of fp8: "dynamic", a scale for each token (and block of inputs); or "static", one for each
    # layer, from calibration.
    activation_scheme: ActivationScheme = "dynamic"
    # Of the weights. Activations are E4M3; with weights in E5M2 they stay floats.
    fp8_format: Fp8Format = "e4m3"
    # Name patterns of layers that stay floats; * matches any characters, ? any one.
    skip: tuple[str, ...] = ()
    # Mean bits of a code over all quantised weights: each layer has `bits` or 8; the most sensitive
    # ones have 8. None: all have `bits`.
    average_bits: float | None = None
    # The result of `average_bits`: layers whose bits differ from `bits`. Layers that the engine
    # multiplies as one matrix (q, k and v; gate and up) have equal bits, or it would run them as
    # floats.
    layer_bits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                "method", f"must be one of {', '.join(METHODS)}, not {shown(self.method)}"
            )
        allowed = BITS[self.method]
        if self.bits not in allowed:
            listed = ", ".join(map(str, allowed))
            raise ConfigError(
                "bits", f"must be one of {listed} with {self.method}, not {self.bits}"
            )
        self._check_fp8()
        self._check_group()
        if self.method in ("smoothquant", "fp8") and not self.symmetric:
            raise ConfigError("sym", f"must be true with {self.method}")
        if self.act_order and self.method != "gptq":
            raise ConfigError("act_order", f"is for gptq; {self.method} has no order")
        if self.static_groups and not self.act_order:
            raise ConfigError("static_groups", "needs act_order")
        if not (math.isfinite(self.damping) and 0 < self.damping <= 1):
            raise ConfigError("damping", f"must be in (0, 1], not {self.damping}")
        if not 0 <= self.smoothing <= 1:
            raise ConfigError("smoothing", f"must be in [0, 1], not {self.smoothing}")
        for name, chosen, method in (
            ("damping", self.damping != DAMPING, "gptq"),
            ("smoothing", self.smoothing != SMOOTHING, "smoothquant"),
        ):
            if chosen and self.method != method:
                raise ConfigError(name, f"is for {method}, not for {self.method}")
        if self.average_bits is not None:
            if self.act_order and not self.static_groups:
                raise ConfigError(
                    "static_groups",
                    "must be true with act_order and a budget: the layout has no order",
                )
            if self.method not in ("rtn", "gptq", "awq"):
                raise ConfigError(
                    "budget_bits", f"is not for {self.method}, which has 8 bits everywhere"
                )
            if not self.bits <= self.average_bits <= MANY:
                raise ConfigError(
                    "budget_bits",
                    f"must be in [{self.bits}, {MANY}] (from bits up), not {self.average_bits}",
                )

    def _check_fp8(self) -> None:
        for field_name, value, allowed in (
            ("activation_scheme", self.activation_scheme, SCHEMES),
            ("fp8_format", self.fp8_format, FP8_FORMATS),
        ):
            if value not in allowed:
                raise ConfigError(field_name, f"must be {' or '.join(allowed)}, not {shown(value)}")
            if value != allowed[0] and self.method != "fp8":
                raise ConfigError(field_name, f"{value} is for fp8, not for {self.method}")
        wide, static = self.fp8_format == "e5m2", self.activation_scheme == "static"
        if static and (wide or self.group_size == SQUARE):
            setting = "e5m2, whose activations stay floats" if wide else "blocks of 128 x 128"
            raise ConfigError("activation_scheme", f"must be dynamic with {setting}")
        if wide and self.group_size == ROW:
            raise ConfigError(
                "group_size",
                f"must be {TENSOR} (one scale) or {SQUARE} (blocks) with e5m2: no layout has a "
                "scale for each output",
            )

    def _check_group(self) -> None:
        size = self.group_size
        if self.method == "fp8":
            if size not in (ROW, TENSOR, SQUARE):
                raise ConfigError(
                    "group_size",
                    f"must be {ROW} (a scale for each output), {TENSOR} (one) or {SQUARE} (blocks "
                    f"of {SQUARE} x {SQUARE}) with fp8, not {size}",
                )
        elif self.method == "smoothquant":
            if size != ROW:
                raise ConfigError("group_size", f"must be {ROW} with smoothquant, not {size}")
        elif size != ROW and (size < 8 or size % 8):
            raise ConfigError(
                "group_size",
                f"must be {ROW} (a scale for each output) or a multiple of 8, not {size}",
            )

    @property
    def needs_data(self) -> bool:
        """Whether the method needs calibration text."""
        if self.method in ("gptq", "awq", "smoothquant") or self.average_bits is not None:
            return True
        return self.activation_scheme == "static"

    @property
    def rounds_activations(self) -> bool:
        """Whether the engine rounds the inputs of quantised layers to 8 bits."""
        return self.method in ("smoothquant", "fp8") and self.fp8_format == "e4m3"

    @property
    def layout(self) -> Layout:
        """Layout of the checkpoint. In AWQ's and GPTQ's layouts all layers have the same bits, in
        AWQ's always 4."""
        if self.method == "fp8":
            wide = self.fp8_format == "e5m2"
            return "fp8" if self.group_size == SQUARE or wide else "compressed-tensors"
        if self.average_bits is not None:
            return "compressed-tensors"
        if self.method == "gptq":
            return "gptq"
        return "awq" if self.method == "awq" and self.bits == 4 else "compressed-tensors"

    def quantises(self, layer: str) -> bool:
        """Whether a linear layer, by its name in the checkpoint, is quantised."""
        return not any(fnmatchcase(layer, pattern) for pattern in self.skip)

    def bits_of(self, layer: str) -> int:
        return self.layer_bits.get(layer, self.bits)

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored scales in a model of `dtype`, to which scales are rounded
        before weights are rounded with them. AWQ and GPTQ store fp16, compressed-tensors the
        model's dtype."""
        import torch

        if self.layout == "fp8":
            return torch.float32
        if self.method == "fp8":  # absmax / 448 can be too small for fp16
            return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        # the native kernels keep fp16 precision, so fp32 scales would be rounded anyway
        narrow = self.layout == "compressed-tensors" and dtype == torch.bfloat16
        return torch.bfloat16 if narrow else torch.float16

    @property
    def block(self) -> Block:
        """The outputs and inputs that share a scale with fp8, in the form of `kernels/fp8.py`."""
        if self.group_size == SQUARE:
            return SQUARE, SQUARE
        return (1, 0) if self.group_size == ROW else (0, 0)

    def with_layer_bits(self, layer_bits: Mapping[str, int]) -> Recipe:
        """Return the recipe with bits for the layers that differ from `bits`."""
        return replace(self, layer_bits=dict(layer_bits))


def check_groups(recipe: Recipe, inputs: Mapping[str, int]) -> None:
    """Check that groups divide the inputs of all quantised layers.

    Args:
        inputs: of each linear layer of all blocks.

    Raises:
        ConfigError: they do not; the message names sizes that would.
    """
    size = recipe.group_size
    if recipe.method == "fp8" or size <= 0:
        return
    for layer, width in inputs.items():
        if recipe.quantises(layer) and width % size:
            fit = dividing(n for name, n in inputs.items() if recipe.quantises(name))
            advice = f"take {' or '.join(map(str, (*fit, ROW)))}, or skip such layers"
            raise ConfigError(
                "group_size",
                f"{size} does not divide the {width} inputs of {shown(layer)}: {advice}",
            )


def dividing(inputs: Iterable[int]) -> tuple[int, ...]:
    """Return the usual group sizes that divide all these numbers of inputs, the largest first."""
    common = math.gcd(*inputs)
    return tuple(size for size in GROUPS if common % size == 0)
