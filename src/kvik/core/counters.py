"""What the scheduler counts, as totals since the start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest

MAX_SIZES = 32


@dataclass(slots=True)
class SchedulerCounters:
    """Attributes:
    step_sizes: [i] steps of more than 2^(i - 1) and up to 2^i tokens.
    """

    steps: int = 0
    scheduled_tokens: int = 0
    delivered_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    step_sizes: list[int] = field(default_factory=lambda: [0] * MAX_SIZES)


@dataclass(slots=True)
class DraftCounts:
    """How many drafts were computed, and how many of them were right.

    A draft's place is how many drafts stand before it: in a tree, on the path to it, so that drafts
    of one depth have one place.

    Attributes:
        rows: one request's part of a step, with drafts.
        drafts: computed in them.
        accepted: of these, found right.
        at: [i] rows with a draft at place i, or, in a tree, with several. accepted_at: [i] rows
            with a right one there, which those before it are, too.
    """

    rows: int = 0
    drafts: int = 0
    accepted: int = 0
    at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: int, places: int | None = None) -> None:
        """One row.

        Args:
            places: of its drafts, if they form a tree; None: each has a place of its own.
        """
        if places is None:
            places = drafts
        self.rows += 1
        self.drafts += drafts
        self.accepted += accepted
        missing = places - len(self.at)
        if missing > 0:
            self.at += [0] * missing
            self.accepted_at += [0] * missing
        for i in range(places):
            self.at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.rows + other.rows,
            self.drafts + other.drafts,
            self.accepted + other.accepted,
            [sum(pair) for pair in zip_longest(self.at, other.at, fillvalue=0)],
            [sum(pair) for pair in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)],
        )

    def copy(self) -> DraftCounts:
        return replace(self, at=self.at[:], accepted_at=self.accepted_at[:])

    @property
    def mean_length(self) -> float:
        """Tokens that a row with drafts yields, the model's own included; 0.0 without rows."""
        return (self.accepted + self.rows) / self.rows if self.rows else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafts that were right."""
        return self.accepted / self.drafts if self.drafts else 0.0


@dataclass(slots=True)
class RequestSpeculation:
    """How guessing ahead fared for one completion, or a few together.

    The times are of its decoding steps, those without drafts included, as far as it is known what
    they would have taken without drafts. Not so of steps that held chunks of prompts, nor of drafts
    before a step without any was measured. A step counts in full for each completion that decodes
    in it, since each of them waits for all of it.

    Attributes:
        drafts: how many were computed, how many were right, and where.
        seconds: that the steps took, making drafts included.
        plain_seconds: that steps without drafts would have taken for the completion's tokens of
            them, one token a step: what steps without drafts, of as many requests, were measured
            to take lately. See `DraftTimes`.
    """

    drafts: DraftCounts = field(default_factory=DraftCounts)
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def speedup(self) -> float | None:
        """How much faster its tokens came than they would have without drafts, as estimated; None
        if no step of it tells. Drafts for others alone make a step longer, so it may be below 1."""
        return self.plain_seconds / self.seconds if self.seconds else None

    def __add__(self, other: RequestSpeculation) -> RequestSpeculation:
        return RequestSpeculation(
            self.drafts + other.drafts,
            self.seconds + other.seconds,
            self.plain_seconds + other.plain_seconds,
        )
