"""Rotary position embedding (Su et al. 2021) and its extensions to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.spec.rope import RopeSpec


class Rope:
    """Computes the rotation of each pair (i, i + head_dim / 2) of q and k: by the angle position *
    frequency i."""

    def __init__(
        self,
        ops: Ops,
        spec: RopeSpec,
        head_dim: int,
        max_model_len: int,
        device: torch.device,
        *,
        of_queries: bool = False,
    ) -> None:
        """
        Args:
            of_queries: rotations also scale, by `RopeSpec.query_beta`.
        """
        if device.type == "meta":  # torch has no kernels for this there, and would import sympy
            device = torch.device("cpu")
        self.ops = ops
        self.end = max_model_len - 1
        self._last = min(spec.most_keys or max_model_len, max_model_len) - 1
        # The tables of `Ops.rotations`, computed in fp64: fp32 leaves no fractional digits to an
        # angle of a million radians.
        highs, lows = spec.split(max_model_len, of_queries=of_queries)
        angle = frequencies(spec, head_dim, self._last + 1).to(device)
        multiples = torch.arange(highs, device=device) * lows
        self.high = _table(multiples, angle, head_dim, 1.0)
        rests = torch.arange(lows, device=device)
        self.low = _table(rests, angle, head_dim, attention_factor(spec))
        if of_queries:
            steps = multiples // spec.original_max_position
            self.high *= 1.0 + spec.query_beta * torch.log1p(steps.float())[:, None]

    def at(self, positions: Tensor) -> Tensor:
        """Return cosines and sines, [tokens, head_dim] fp32; the same for all layers of a step.

        Args:
            positions: [tokens] int64, below max_model_len.
        """
        return self.ops.rotations(self.high, self.low, positions, self.end)

    def after_keys(self, positions: Tensor) -> Tensor:
        """Like `at`, for positions that count the keys a query sees (`RopeSpec.most_keys`)."""
        return self.ops.rotations(self.high, self.low, positions, self._last)


def _table(positions: Tensor, angle: Tensor, head_dim: int, factor: float) -> Tensor:
    """Return cosines and then sines, [positions, head_dim] fp32, times a factor for pairs that are
    rotated.

    Args:
        angle: [pairs] fp64, per position, of each rotated pair.
    """
    half, rotated = head_dim // 2, len(angle)
    angles = positions[:, None] * angle
    table = torch.zeros(len(positions), head_dim, dtype=torch.float32, device=angle.device)
    table[:, rotated:half] = 1.0  # pairs that are not rotated
    table[:, :rotated] = angles.cos() * factor
    table[:, half : half + rotated] = angles.sin() * factor
    return table


def frequencies(spec: RopeSpec, head_dim: int, max_model_len: int) -> Tensor:
    """Return the angle per position of each rotated pair, [width / 2] fp64.

    "dynamic" takes the base for a sequence of `max_model_len` for every sequence, so that a token's
    K does not depend on the length. Engines that recompute the base as a sequence grows leave older
    keys in the cache rotated by another base. For the same reason "longrope" takes the factors of
    long contexts if `max_model_len` allows such contexts.
    """
    width = spec.width(head_dim)
    head_dim = head_dim if spec.kind == "proportional" else width
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / head_dim
    if spec.kind == "dynamic":
        return 1.0 / _ntk_base(spec, head_dim, max_model_len) ** exponents
    plain = 1.0 / spec.theta**exponents
    if spec.kind in ("linear", "proportional"):
        return plain / spec.factor
    if spec.kind == "yarn":
        return _yarn(plain, spec, head_dim)
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "longrope":
        is_long = max_model_len > spec.original_max_position
        factors = spec.long_factors if is_long else spec.short_factors
        return plain / torch.tensor(factors, dtype=torch.float64)
    return plain


def attention_factor(spec: RopeSpec) -> float:
    """Return the factor of cosine and sine: YaRN's temperature (its section 3.4), LongRoPE's (its
    section 3.3), else 1."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope":
        log = math.log(max(spec.factor, 1.0)) / math.log(spec.original_max_position)
        return math.sqrt(1.0 + log)

    if spec.mscale and spec.mscale_all_dim:
        return spec.temperature(spec.mscale) / spec.temperature(spec.mscale_all_dim)
    return spec.temperature(1.0)


def _ntk_base(spec: RopeSpec, head_dim: int, max_model_len: int) -> float:
    """Return the base that keeps the fastest pair and slows the slowest one down by the stretch."""
    if head_dim == 2:  # a single pair, and it is the fastest one
        return spec.theta
    length = max(max_model_len, spec.original_max_position)
    stretch = spec.factor * length / spec.original_max_position - (spec.factor - 1.0)
    return spec.theta * stretch ** (head_dim / (head_dim - 2))


def _yarn(plain: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): pairs that turn often in the original context keep
    their frequency, pairs that turn rarely are interpolated, with a linear ramp in between."""

    def pair_turning(turns: float) -> float:
        """Return the index of the pair that makes this many turns within the original context."""
        wavelength = spec.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = pair_turning(spec.beta_fast), pair_turning(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain / spec.factor * ramp + plain * (1 - ramp)


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1: wavelengths beyond the original context are stretched, short ones are kept, with a
    ramp in between, except in Llama 4."""
    turns = spec.original_max_position * plain / (2 * math.pi)  # within the original context
    above, ramp = turns - spec.low_freq_factor, spec.high_freq_factor - spec.low_freq_factor
    keep = (above / ramp).clamp(0, 1) if ramp else (above >= 0).to(plain.dtype)
    return plain / spec.factor * (1 - keep) + plain * keep
