"""What guessing ahead did for one answer, as the APIs tell it beside the counts of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

from msgspec import UNSET, Struct, UnsetType

from kvik.engine.output import RequestOutput


class Speculation(Struct, kw_only=True):
    """Tokens guessed ahead for an answer, of all its choices together. A check is a step that
    judged drafts of a choice. A draft's place is how many drafts stand before it; drafts of a tree
    have the place of their depth.

    Attributes:
        checks: how many there were.
        drafted_per_position: [i] checks with a draft at place i.
        accepted_per_position: [i] checks in which it was right, and those before it.
        mean_accepted_length: tokens that a check brought, the model's own included. null: none was
            made.
        speedup: how much faster the tokens came than they would have without speculation, as
            estimated from the times of steps with and without drafts. null: not known.
    """

    checks: int
    drafted_tokens: int
    accepted_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    mean_accepted_length: float | None
    speedup: float | None


def speculation_of(outputs: Sequence[RequestOutput]) -> Speculation | UnsetType:
    """Of finished requests together; unset if nobody guessed for any of them."""
    known = [one for output in outputs if (one := output.speculation) is not None]
    if not known:
        return UNSET
    found = reduce(add, known)
    drafts, speedup = found.drafts, found.speedup
    return Speculation(
        checks=drafts.rows,
        drafted_tokens=drafts.drafts,
        accepted_tokens=drafts.accepted,
        drafted_per_position=drafts.at,
        accepted_per_position=drafts.accepted_at,
        mean_accepted_length=round(drafts.mean_length, 4) if drafts.rows else None,
        speedup=None if speedup is None else round(speedup, 4),
    )
