"""One vector for a prompt, as a caller gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Attributes:
    embedding: [hidden].
    num_cached_tokens: of the prompt, found in the prefix cache.
    num_preemptions: how often it lost its blocks and began anew.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    embedding: list[float]
    num_cached_tokens: int
    num_preemptions: int


def normalise(vector: Sequence[float]) -> list[float]:
    """The same direction with length 1; a vector of zeros stays as it is."""
    length = sqrt(fsum(x * x for x in vector))
    return [x / length for x in vector] if length else list(vector)
