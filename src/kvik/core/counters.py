"""What the scheduler counts, as totals since the start."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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

    Attributes:
        rows: one request's part of a step, with drafts.
        drafts: computed in them.
        accepted: of these, found right.
        at: [i] rows with more than i drafts. accepted_at: [i] rows with more than i right ones.
    """

    rows: int = 0
    drafts: int = 0
    accepted: int = 0
    at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: int) -> None:
        """One row."""
        self.rows += 1
        self.drafts += drafts
        self.accepted += accepted
        missing = drafts - len(self.at)
        if missing > 0:
            self.at += [0] * missing
            self.accepted_at += [0] * missing
        for i in range(drafts):
            self.at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

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
