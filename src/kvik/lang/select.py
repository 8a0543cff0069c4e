"""Scores of choices, from the log probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, get_args

from kvik.lang.models import ProgramModel

Method = Literal["mean", "sum", "greedy", "unconditional"]
METHODS: tuple[str, ...] = get_args(Method)


def scores_of(
    model: ProgramModel, prefix: Sequence[int], rows: Sequence[Sequence[int]], method: Method
) -> list[float]:
    """Return the score of each choice, the best of them the largest.

    Only tokens count that differ from the prefix's: all rows are scored in one batch, and what
    they share comes from the prefix cache.

    Args:
        prefix: tokens before the choices. rows: the same with each choice behind it.
        method: "mean" or "sum" of a choice's log probabilities; "greedy" follows the likeliest
            token, place by place, where a choice that has ended counts with its mean;
            "unconditional" is the mean of what the prefix adds to the log probabilities that the
            tokens have without it.
    """
    start = min(_num_shared(prefix, row) for row in rows)
    found = [row[start:] for row in model.score(rows, start)]
    if method == "sum":
        return [sum(row) for row in found]
    means = [sum(row) / len(row) for row in found]
    if method == "mean":
        return means
    if method == "greedy":
        return _greedy(found, means)
    alone = model.score([row[start:] for row in rows], 0)
    return [
        sum(with_it - without for with_it, without in zip(row, other, strict=True)) / len(row)
        for row, other in zip(found, alone, strict=True)
    ]


def _num_shared(prefix: Sequence[int], row: Sequence[int]) -> int:
    pairs = zip(prefix, row, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _greedy(found: Sequence[Sequence[float]], means: Sequence[float]) -> list[float]:
    """How many places a choice stays in, and its log probability where it leaves: a fraction."""
    scores = [0.0] * len(found)
    left = set(range(len(found)))
    for place in range(max(map(len, found))):
        here = {i: found[i][place] if place < len(found[i]) else means[i] for i in left}
        best = max(here.values())
        for i in left:
            scores[i] = place + 1 / (1 - here[i])
        left = {i for i in left if here[i] == best}
        if len(left) == 1:
            break
    return scores
