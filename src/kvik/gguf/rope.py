"""Translates the rotary positions of a GGUF file to the keys of config.json, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvik.errors import ModelError
from kvik.gguf.names import ROPE_FACTORS
from kvik.gguf.types import Metadata, shortest
from kvik.spec.rope import MAX_POSITIONS, RopeSpec

# Files store the scaling of Llama 3.x ("llama3" in config.json) as a divisor for each frequency.
# With s = (original / wavelength - low) / (high - low), clipped to [0, 1], a frequency is divided
# by 1 / ((1 - s) / factor + s). The divisors determine `factor` and s, and s is linear in the
# frequency, so two of its points determine the other parameters.

TOLERANCE = 1e-4  # relative; neighbours differ by far more
USUAL = ((1.0, 4.0, 8192), (1.0, 1.0, 8192))  # low, high, original of Meta's models
TEMPERATURE = "attention.temperature_scale"  # scale of queries, by their positions


def rope_scaling(
    metadata: Metadata, architecture: str, context: int, log_scale: float
) -> Mapping[str, object] | None:
    """Return `rope_scaling` of config.json from the metadata; None: positions are not scaled.

    Args:
        log_scale: `gguf_log_scale` of the architecture.

    Raises:
        ModelError: an unknown kind, or a number out of range.
    """
    at = f"{architecture}.rope"
    factor_key = f"{at}.scaling.factor"
    if factor_key not in metadata and f"{at}.scale_linear" in metadata:
        factor_key = f"{at}.scale_linear"  # in old files
    default = "linear" if factor_key.endswith("linear") else "none"
    kind = metadata.choice(f"{at}.scaling.type", ("none", "linear", "yarn"), default)
    if kind == "none":
        return None
    factor = metadata.number(factor_key, 1.0, 1e6)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.integer(f"{at}.scaling.original_context_length", 1, MAX_POSITIONS, context)
    scaling: dict[str, object] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": metadata.number(f"{at}.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
        "beta_slow": metadata.number(f"{at}.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
    }
    if f"{at}.scaling.yarn_attn_factor" in metadata:
        scaling["attention_factor"] = metadata.number(f"{at}.scaling.yarn_attn_factor", 0.0, 1e6)
    if log_scale and (key := f"{at}.scaling.yarn_log_multiplier") in metadata:
        scale = float(f"{metadata.number(key, 0.0, 1e6) / log_scale:.6g}")
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    if (key := f"{architecture}.{TEMPERATURE}") in metadata:
        scaling["llama_4_scaling_beta"] = metadata.number(key, 0.0, 1e6)
    return scaling


def llama3_scaling(
    divisors: Sequence[float], theta: float, head_dim: int
) -> Mapping[str, object] | None:
    """Return `rope_scaling` of config.json from the divisors [head_dim / 2] of the frequencies;
    None: all are 1.

    Raises:
        ModelError: the divisors are not of the kind "llama3".
    """
    good = len(divisors) == head_dim // 2
    if not good or not all(math.isfinite(d) and d > 1 - TOLERANCE for d in divisors):
        raise ModelError("rope_freqs.weight", f"must hold {head_dim // 2} divisors of at least 1")
    factor = max(divisors)
    if factor < 1 + TOLERANCE:
        return None
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    parts = [(1 / d - 1 / factor) / (1 - 1 / factor) for d in divisors]
    # As if there were a frequency more on either side, one kept and one stretched.
    outer = theta ** (2 / head_dim), frequencies[-1] * theta ** (-2 / head_dim)
    points = zip([outer[0], *frequencies, outer[1]], [1.0, *parts, 0.0], strict=True)
    line = _line(list(points), factor)
    for low, high, original in USUAL if line is None else (*USUAL, line):
        made = [_divisor(f, factor, low, high, original) for f in frequencies]
        if all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in zip(made, divisors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelError("rope_freqs.weight", "must hold divisors as Llama 3 has them")


def llama3_divisors(rope: RopeSpec, head_dim: int) -> list[float]:
    """Return the divisors [head_dim / 2] of the kind "llama3"."""
    scaling = rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    frequencies = (rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return [_divisor(frequency, *scaling) for frequency in frequencies]


def _divisor(frequency: float, factor: float, low: float, high: float, original: float) -> float:
    above = original * frequency / (2 * math.pi) - low
    s = min(1.0, max(0.0, above / (high - low))) if high > low else float(above >= 0)
    return 1 / ((1 - s) / factor + s)


def _line(points: Sequence[tuple[float, float]], factor: float) -> tuple[float, float, int] | None:
    """Return low, high and original, as in `_divisor`, from pairs of a frequency and its s. Only
    their ratios can be derived, so low is about 1."""
    inside = [(f, s) for f, s in points if TOLERANCE / factor < s < 1 - TOLERANCE]
    # The two points that are furthest apart, against rounding errors. With fewer points inside, any
    # line that clips the others is right, such as the steepest one between neighbours.
    ends = [(inside[0], inside[-1])] if len(inside) > 1 else list(pairwise(points))
    slopes = [((s1 - s0) / (f1 - f0) if f1 != f0 else 0.0, f0, s0) for (f0, s0), (f1, s1) in ends]
    slope, f0, s0 = max(slopes)
    if slope <= 0 or (lowest := f0 - s0 / slope) <= 0:
        return None
    original = min(max(1, round(2 * math.pi / lowest)), MAX_POSITIONS)
    low, high = (original * f / (2 * math.pi) for f in (lowest, lowest + 1 / slope))
    return low, high, original


NEVER = 1e30  # divisor of the frequencies of pairs that are not rotated


def proportional_divisors(rope: RopeSpec, head_dim: int) -> list[float]:
    """Return the divisors [head_dim / 2] of heads in which only the first pairs are rotated."""
    turned = rope.width(head_dim) // 2
    return [rope.factor] * turned + [NEVER] * (head_dim // 2 - turned)


def proportional_rope(divisors: Sequence[float], head_dim: int) -> Mapping[str, object]:
    """Return keys of `rope_parameters` of config.json from the divisors [head_dim / 2] of the
    frequencies.

    Raises:
        ModelError: the divisors are not of the kind "proportional".
    """
    half, turned = head_dim // 2, sum(divisor < NEVER / 2 for divisor in divisors)
    factor, *more = dict.fromkeys(divisors[:turned]) or (0.0,)
    if more or not 1 <= factor < NEVER / 2 or len(divisors) != half:
        reason = f"must hold {half} divisors: one repeated number of at least 1, then {NEVER:g}"
        raise ModelError(ROPE_FACTORS, reason)
    # Plus one half, so that rounding down gives the pairs despite rounding of the fraction.
    fraction = min(1.0, (turned + 0.5) / half)
    return {"partial_rotary_factor": fraction, "factor": shortest(factor)}
