"""Reads rotary positions from config.json, with the older or the newer keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvik.spec.fields import Fields

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
_OLD_KINDS = {"su": "longrope"}
MAX_POSITIONS = 2**31 - 1
# Rotations are looked up by the quotient and the remainder of a position and this. Two tables for a
# million positions have 2,048 rows; at half or twice this value, 2,560.
LOW_POSITIONS = 1024
MAX_FACTOR = 1e6


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) and its extension to longer contexts."""

    # "default", "linear" (position interpolation), "dynamic" (NTK-aware), "yarn" (Peng et al.
    # 2023), "llama3", "longrope" (Ding et al. 2024) or "proportional" (Gemma 4), where only the
    # first pairs of a head are rotated, with a whole head's frequencies.
    kind: str = "default"
    theta: float = 10000.0  # base of the frequencies
    factor: float = 1.0  # of the extension; unused by "default"
    original_max_position: int = 0  # context length of training before the extension
    fraction: float = 1.0  # fraction of a head's channels that is rotated, the first ones
    interleaved: bool = False  # checkpoints store the pairs as neighbours, else in halves
    then_normed: bool = False  # heads are normalised after the rotation, else before
    backward: bool = False  # rotated by minus the angle: the second halves take the first's places
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: derived from the factor
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the pairs' frequencies up to the
    long_factors: tuple[float, ...] = ()  # original context, and beyond it
    mscale: float | None = None  # yarn, DeepSeek's variant
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the correction range to integers
    # Queries at position p are multiplied by 1 + query_beta * log(1 + p // original_max_position).
    query_beta: float = 0.0
    most_keys: int = 0  # largest number a query sees, if less than max_model_len; 0: all

    @property
    def of_token(self) -> int:
        """Number of rotations per token: queries have a separate one if they are scaled."""
        return 2 if self.query_beta else 1

    def split(self, max_model_len: int, *, of_queries: bool = False) -> tuple[int, int]:
        """Return the numbers of rows of the two tables of rotations: for quotients and remainders
        of positions and the second number. The scale of queries depends only on the quotient."""
        low = math.gcd(LOW_POSITIONS, self.original_max_position) if of_queries else LOW_POSITIONS
        low = min(low, max_model_len)
        return -(-max_model_len // low), low

    def table_rows(self, max_model_len: int) -> int:
        """Return the number of rows of all tables."""
        splits = (self.split(max_model_len, of_queries=bool(i)) for i in range(self.of_token))
        return sum(high + low for high, low in splits)

    def temperature(self, weight: float) -> float:
        """Return YaRN's scale of q or k for this factor (its section 3.4)."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    def width(self, head_dim: int) -> int:
        """Return the number of rotated channels of a head."""
        if self.kind == "proportional":
            return 2 * int(head_dim * self.fraction / 2)
        return int(head_dim * self.fraction)

    def check(self, config: Fields, head_dim: int) -> None:
        """Raise `ModelError` if the spec does not fit heads of this size."""
        width = self.width(head_dim)
        if not width or width % 2:
            reason = f"must leave an even number of the {head_dim} channels of a head, not {width}"
            raise config.error("partial_rotary_factor", reason)
        for name, factors in (("short", self.short_factors), ("long", self.long_factors)):
            if factors and len(factors) != width // 2:
                reason = f"must have {width // 2} numbers in {name}_factor, not {len(factors)}"
                raise config.error("rope_scaling", reason)

    def rows(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the stored channel at each place of a head, so that channel i is paired with
        i + head_dim / 2; channels that are not rotated fill both halves. None: the stored order."""
        width, half = self.width(head_dim), head_dim // 2
        stored = width == head_dim and not self.interleaved and not self.backward
        if self.kind == "proportional" or stored:
            return None
        pairs = range(width // 2)
        first = [2 * i if self.interleaved else i for i in pairs]
        second = [2 * i + 1 if self.interleaved else width // 2 + i for i in pairs]
        if self.backward:
            first, second = second, first
        rest = list(range(width, head_dim))
        num_first = half - width // 2
        return tuple(first + rest[:num_first] + second + rest[num_first:])


def read_rope(
    config: Fields,
    max_position_embeddings: int,
    *,
    layer_type: str = "",
    fraction: float | None = None,
    interleaved: bool = False,
    scaled_queries: bool = False,
) -> RopeSpec:
    """Read the rotary positions of a config.json.

    Args:
        layer_type: key of the entry in `rope_parameters`; "": all layers have the same.
        fraction: default of `partial_rotary_factor`; None: it must be 1.
        interleaved: see `RopeSpec`.
        scaled_queries: whether `llama_4_scaling_beta` is used.

    Older files have `rope_theta` and an optional `rope_scaling` ("type" or "rope_type"); files of
    transformers 5 have both in `rope_parameters`. A theta inside the object takes precedence.

    Raises:
        ModelError: an unknown kind, or invalid numbers for the kind.
    """
    key = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    rope = config.inside(key)
    if layer_type:
        rope = rope.inside(layer_type)
    kind_key = "rope_type" if "rope_type" in rope else "type"
    kind = rope.choice(kind_key, (*ROPE_KINDS, *_OLD_KINDS), "default")
    kind = _OLD_KINDS.get(kind, kind)
    if kind == "proportional" and interleaved:
        raise rope.error(kind_key, "must not be proportional for this architecture")
    place = rope if "rope_theta" in rope else config
    theta = place.number("rope_theta", 1.0, 1e12, 10000.0)
    if theta == 1.0:
        raise place.error("rope_theta", "must be greater than 1")
    share = 1.0 if fraction is None else fraction
    for place in (config, rope):
        share = place.number("partial_rotary_factor", 1e-3, 1.0, share)
        if share != 1.0 and fraction is None and kind != "proportional":
            raise place.error("partial_rotary_factor", "must be 1 for this architecture")
    spec = _stretched(config, rope, kind, theta, max_position_embeddings)
    beta = 0.0
    if scaled_queries:
        beta = rope.number("llama_4_scaling_beta", 0.0, MAX_FACTOR, 0.0)
    return replace(spec, fraction=share, interleaved=interleaved, query_beta=beta)


def _stretched(
    config: Fields, rope: Fields, kind: str, theta: float, max_position_embeddings: int
) -> RopeSpec:
    if kind == "default":
        return RopeSpec(theta=theta, original_max_position=max_position_embeddings)
    if kind == "proportional":
        factor = rope.number("factor", 1.0, MAX_FACTOR, 1.0)
        return RopeSpec(kind, theta, factor, max_position_embeddings)
    if kind in ("linear", "dynamic"):
        factor = rope.number("factor", 1.0, MAX_FACTOR)
        return RopeSpec(kind, theta, factor, max_position_embeddings)

    # A value outside the object takes precedence over the one inside it.
    place = config if "original_max_position_embeddings" in config else rope
    original = place.integer(
        "original_max_position_embeddings", 1, MAX_POSITIONS, max_position_embeddings
    )
    if kind == "llama3":
        return _llama3(rope, theta, original)
    if kind == "longrope":
        return _longrope(rope, theta, original, max_position_embeddings)
    return _yarn(rope, theta, original, max_position_embeddings)


def _llama3(rope: Fields, theta: float, original: int) -> RopeSpec:
    low = rope.number("low_freq_factor", 1e-6, MAX_FACTOR)
    high = rope.number("high_freq_factor", 1e-6, MAX_FACTOR)
    if high < low:
        raise rope.error("high_freq_factor", f"must be at least low_freq_factor ({low:g})")
    return RopeSpec(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor", 1.0, MAX_FACTOR),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(rope: Fields, theta: float, original: int, max_positions: int) -> RopeSpec:
    return RopeSpec(
        kind="longrope",
        theta=theta,
        factor=rope.number("factor", 1.0, MAX_FACTOR, max(1.0, max_positions / original)),
        original_max_position=original,
        attention_factor=_optional(rope, "attention_factor"),
        short_factors=rope.numbers("short_factor", 1e-3, MAX_FACTOR),
        long_factors=rope.numbers("long_factor", 1e-3, MAX_FACTOR),
    )


def _yarn(rope: Fields, theta: float, original: int, max_positions: int) -> RopeSpec:
    fast = rope.number("beta_fast", 1e-6, MAX_FACTOR, 32.0)
    slow = rope.number("beta_slow", 1e-6, MAX_FACTOR, 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"must be at least beta_slow ({slow:g}), not {fast:g}")
    return RopeSpec(
        kind="yarn",
        theta=theta,
        factor=rope.number("factor", 1.0, MAX_FACTOR, max(1.0, max_positions / original)),
        original_max_position=original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_optional(rope, "attention_factor"),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _optional(rope: Fields, key: str) -> float | None:
    return rope.number(key, 0.0, MAX_FACTOR) if key in rope else None
