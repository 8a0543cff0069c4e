"""Rotary positions of a GGUF file, as config.json says them.

Files hold the stretching of Llama 3.x ("llama3" in config.json) as a divisor for each frequency.
Its kind is smooth: with s = (original / wavelength - low) / (high - low), cut to [0, 1], a
frequency is divided by 1 / ((1 - s) / factor + s). The divisors decide `factor` and s, and s is a
straight line over the frequency, so two of its points give all there is to know.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from kvik.errors import ModelError
from kvik.gguf.types import Metadata
from kvik.spec.rope import MAX_POSITIONS

MAX_FACTORS_BYTES = 1 << 16
TOLERANCE = 1e-4  # relative; neighbours differ by far more
USUAL = (1.0, 4.0, 8192)  # low, high and original of all models of Meta


def rope_scaling(
    metadata: Metadata, architecture: str, context: int
) -> Mapping[str, object] | None:
    """`rope_scaling` of config.json by the metadata; None: positions are not stretched.

    Raises:
        ModelError: a kind that is not known, or numbers that make no sense.
    """
    at = f"{architecture}.rope"
    factor_key = f"{at}.scaling.factor"
    if factor_key not in metadata and f"{at}.scale_linear" in metadata:
        factor_key = f"{at}.scale_linear"  # of old files
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
    return scaling


def llama3_scaling(data: bytes, theta: float, head_dim: int) -> Mapping[str, object] | None:
    """`rope_scaling` of config.json by the divisors of the frequencies; None: all are 1.

    Args:
        data: [head_dim / 2] fp32, as they lie in the file.

    Raises:
        ModelError: they are not of the kind "llama3".
    """
    divisors = struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4])
    good = len(divisors) == head_dim // 2
    if not good or not all(math.isfinite(d) and d > 1 - TOLERANCE for d in divisors):
        raise ModelError("rope_freqs.weight", f"must hold {head_dim // 2} divisors of at least 1")
    factor = max(divisors)
    if factor < 1 + TOLERANCE:
        return None
    frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    candidates = [USUAL]
    if (line := _through(frequencies, divisors, factor)) is not None:
        candidates.append(line)
    for low, high, original in candidates:
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


def llama3_divisors(scaling: Mapping[str, float], theta: float, head_dim: int) -> list[float]:
    """The divisors [head_dim / 2] of a "llama3" `rope_scaling` of config.json."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    return [
        _divisor(theta ** (-2 * i / head_dim), scaling["factor"], low, high, original)
        for i in range(head_dim // 2)
    ]


def _divisor(frequency: float, factor: float, low: float, high: float, original: float) -> float:
    s = (original * frequency / (2 * math.pi) - low) / (high - low)
    s = min(1.0, max(0.0, s))
    return 1 / ((1 - s) / factor + s)


def _through(
    frequencies: Sequence[float], divisors: Sequence[float], factor: float
) -> tuple[float, float, int] | None:
    """low, high and original by two points of s, low being 1: only ratios are known."""
    points = [
        (f, (1 / d - 1 / factor) / (1 - 1 / factor))
        for f, d in zip(frequencies, divisors, strict=True)
        if 1 + TOLERANCE < d < factor * (1 - TOLERANCE)
    ]
    if len(points) < 2:
        return None
    (f0, s0), (f1, s1) = points[0], points[-1]  # far apart, for the sake of rounding
    slope = (s1 - s0) / (f1 - f0)
    offset = s0 - slope * f0  # -low / (high - low)
    if not (slope > 0 > offset):
        return None
    high = 1 - 1 / offset
    original = slope * (high - 1) * 2 * math.pi
    return (1.0, high, round(original)) if 1 <= original < MAX_POSITIONS else None
