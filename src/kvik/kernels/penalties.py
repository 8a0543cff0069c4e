"""What makes tokens that were seen before less likely: the arguments of `Ops.penalize`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of n rows of logits, each of which has what it saw in a row of two tables.

    Attributes:
        rows: [n] int64, each once.
        seen: [n] int64, their rows in the tables.
        repetition, frequency, presence: [n] float32; 1, 0 and 0 are off.
        in_prompt: [m, vocab] bool.
        counts: [m, vocab] int32, occurrences in the output.
    """

    rows: Tensor
    seen: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    in_prompt: Tensor
    counts: Tensor
