"""How tokens are drawn from logits: the arguments of `Ops.draw`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rules that drop unlikely tokens, applied in this order. Of [n] rows each; None where no row
    uses the rule.

    Attributes:
        top_k: int64 from 1, the vocabulary size where off.
        top_p, typical_p: float64 in (0, 1], 1 where off.
        min_p: float32 in [0, 1], 0 where off.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    typical_p: Tensor | None = None

    def of(self, rows: Tensor) -> Truncation:
        """Those of some rows: [m] int64."""

        def pick(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return Truncation(
            pick(self.top_k), pick(self.top_p), pick(self.min_p), pick(self.typical_p)
        )


@dataclass(frozen=True, slots=True)
class Draws:
    """One draw for each of n rows.

    Attributes:
        temperature: [n] float32, above 0.
        uniforms: [n] float64 in [0, 1), multiples of 2^-53. The number picks the token.
    """

    temperature: Tensor
    uniforms: Tensor
    truncation: Truncation = field(default_factory=Truncation)

    def of(self, rows: Tensor) -> Draws:
        """Those of some rows: [m] int64."""
        return Draws(self.temperature[rows], self.uniforms[rows], self.truncation.of(rows))
