"""What the sampler must do for the rows of one step; everything no row asks for is None."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvik.kernels.draws import Draws
from kvik.worker.logits_rules import Edits, Penalties


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that draw a token instead of taking the most likely one.

    Attributes:
        rows: [n] int64; None: all rows of the batch.
        draws: of these rows.
    """

    rows: Tensor | None
    draws: Draws


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """A greedy batch without rules is `SamplingBatch()`.

    Attributes:
        logprobs: row -> how many of the most likely tokens to report beside the sampled one.
    """

    edits: Edits | None = None
    penalties: Penalties | None = None
    random: RandomRows | None = None
    logprobs: dict[int, int] = field(default_factory=dict)
