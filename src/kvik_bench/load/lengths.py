"""How long prompts and answers are: drawn from a distribution, or taken from a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvik.errors import ParamError
from kvik_bench.load.arrivals import TraceRow

MAX_TOKENS = 1 << 22


class Lengths(Protocol):
    """How many tokens a request has; a function of its numbers alone, not of the time."""

    def of(self, index: int, turn: int) -> tuple[int, int]:
        """Tokens of the prompt and of the answer, in a turn of conversation `index`."""


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of token counts, never below 1.

    Attributes:
        kind: "fixed" (a), "uniform" (a to b, both included), "normal" (mean a, standard deviation
            b) or "lognormal" (median a, standard deviation b of the logarithm).
    """

    kind: str
    a: float
    b: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.kind == "normal":
            value = rng.normalvariate(self.a, self.b)
        else:
            value = self.a * rng.lognormvariate(0.0, self.b)
        return min(max(round(value), 1), MAX_TOKENS)


def parse_length(field: str, text: str) -> Length:
    """ "512", "100..200", "normal:512:64" or "lognormal:512:0.8" -> Length.

    Raises:
        ParamError: anything else, or counts outside 1 to 4,194,304.
    """
    name, *numbers = text.split(":")
    try:
        if name in ("normal", "lognormal"):
            a, b = map(float, numbers)
            length = Length(name, a, b)
        elif ".." in text:
            low, _, high = text.partition("..")
            length = Length("uniform", int(low), int(high))
        else:
            length = Length("fixed", int(text))
    except ValueError:
        length = Length("fixed", 0)
    in_range = 1 <= length.a <= MAX_TOKENS and 0 <= length.b <= MAX_TOKENS
    if not in_range or (length.kind == "uniform" and length.b < length.a):
        raise ParamError(
            field,
            f"must be like 512, 100..200, normal:512:64 (mean, deviation) or lognormal:512:0.8 "
            f"(median, deviation of the logarithm), not {text[:60]!r}",
        )
    return length


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Independent draws for each request."""

    prompt: Length
    output: Length
    seed: str

    def of(self, index: int, turn: int) -> tuple[int, int]:
        rng = random.Random(f"{self.seed}/lengths/{index}/{turn}")
        return self.prompt.draw(rng), self.output.draw(rng)


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Row after row of a trace."""

    rows: Sequence[TraceRow]

    def of(self, index: int, turn: int) -> tuple[int, int]:
        row = self.rows[index % len(self.rows)]
        return row.prompt_tokens, row.output_tokens
