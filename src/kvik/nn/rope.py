"""Rotary position embedding (Su et al. 2021) and the ways to stretch it over longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.spec.rope import RopeSpec


class Rope:
    """By what each pair (i, i + head_dim / 2) of q and k is turned: position * frequency i."""

    def __init__(
        self, ops: Ops, spec: RopeSpec, head_dim: int, max_model_len: int, device: torch.device
    ) -> None:
        self.ops = ops
        # [max_model_len, head_dim] fp32, for each position cosines and then sines
        self.table = _table(spec, head_dim, max_model_len, device)

    def at(self, positions: Tensor) -> Tensor:
        """Cosines and sines, [tokens, head_dim] fp32; the same for all layers of a step.

        Args:
            positions: [tokens] int64, below max_model_len.
        """
        return self.ops.gather_rows(self.table, positions)


def _table(spec: RopeSpec, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    positions = torch.arange(max_model_len, device=device)
    angles = positions[:, None] * frequencies(spec, head_dim, max_model_len).to(device)
    table = torch.empty(max_model_len, head_dim, dtype=torch.float32, device=device)
    torch.cos(angles, out=table[:, : head_dim // 2])
    torch.sin(angles, out=table[:, head_dim // 2 :])
    return table.mul_(attention_factor(spec))


def frequencies(spec: RopeSpec, head_dim: int, max_model_len: int) -> Tensor:
    """Angle per position of each pair, [head_dim / 2] fp32.

    `max_model_len` matters to "dynamic" alone: its base is that of a sequence of this length, for
    every sequence, so that a token's K does not depend on what is computed beside it. Engines that
    recompute the base as a sequence grows leave older keys in the cache turned by another base.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if spec.kind == "dynamic":
        return 1.0 / _ntk_base(spec, head_dim, max_model_len) ** exponents
    plain = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "yarn":
        return _yarn(plain, spec, head_dim)
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    return plain


def attention_factor(spec: RopeSpec) -> float:
    """Return what cosine and sine are multiplied with: YaRN's temperature (its section 3.4), else
    1."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(spec.factor) + 1.0 if spec.factor > 1.0 else 1.0

    if spec.mscale and spec.mscale_all_dim:
        return mscale(spec.mscale) / mscale(spec.mscale_all_dim)
    return mscale(1.0)


def _ntk_base(spec: RopeSpec, head_dim: int, max_model_len: int) -> float:
    """Return the base that keeps the fastest pair and slows the slowest one down by the stretch."""
    if head_dim == 2:  # a single pair, and it is the fastest one
        return spec.theta
    length = max(max_model_len, spec.original_max_position)
    stretch = spec.factor * length / spec.original_max_position - (spec.factor - 1.0)
    return spec.theta * stretch ** (head_dim / (head_dim - 2))


def _yarn(plain: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn often in the original context keep
    their frequency, pairs that turn rarely are interpolated, a ramp lies between."""

    def pair_turning(turns: float) -> float:
        """Index of the pair that makes this many turns within the original context."""
        wavelength = spec.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched, short ones are kept."""
    turns = spec.original_max_position * plain / (2 * math.pi)  # within the original context
    keep = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    keep = keep.clamp(0, 1)
    return plain / spec.factor * (1 - keep) + plain * keep
