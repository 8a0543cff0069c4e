"""A speculating engine without a model, with drafts and times set by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from helpers.served_engine import FakeExecutor, tiny_config

from kvik.config.config import ResolvedConfig
from kvik.config.speculative import ResolvedSpeculation
from kvik.core.plan import DraftTimes, SchedulerOutput

DRAFTS = 4
# Seconds of a step without drafts, of one with drafts, and of drafting.
PLAIN, CHECK, MAKING = 2.0, 3.0, 1.0


def drafting_config(**scheduler: object) -> ResolvedConfig:
    """Return `tiny_config` with speculation, for `DraftingExecutor`."""
    speculation = ResolvedSpeculation("ngram", DRAFTS, 64, adaptive=False)
    return replace(tiny_config(**scheduler), speculation=speculation)


@dataclass
class DraftingExecutor(FakeExecutor):
    """Proposes `DRAFTS` for each row that samples, unless its request disables drafts.

    Attributes:
        right: number of right drafts by row of the step, at most as many as there are.
        places: see `ModelRunnerOutput.draft_places`.
        known: whether the time of a step without drafts is known.
    """

    right: Callable[[int], int] = lambda row: DRAFTS
    places: Sequence[int] | None = None
    known: bool = True
    without: set[int] = field(default_factory=set)  # slots of requests without drafts

    def submit(self, plan: SchedulerOutput) -> object:
        for new in plan.new_requests:
            (self.without.discard if new.params.speculation else self.without.add)(new.slot)
        done = super().submit(plan)
        drafts = plan.num_draft_tokens
        token_ids = [  # none of a row that does not sample
            tokens * (1 + min(drafts[row], self.right(row)))
            for row, tokens in enumerate(done.token_ids)
        ]
        scheduled = [1 + count for count in drafts]
        pure = all(plan.samples) and plan.num_scheduled_tokens == scheduled
        times = None
        if any(drafts):
            times = DraftTimes(MAKING)
            if pure and self.known:
                accepted = sum(map(len, token_ids)) / len(drafts)
                times = DraftTimes(MAKING, MAKING + CHECK, PLAIN * accepted)
        return replace(
            done,
            token_ids=token_ids,
            num_draft_tokens=[
                DRAFTS * (samples and slot not in self.without)
                for slot, samples in zip(plan.slots, plan.samples, strict=True)
            ],
            turn_seconds=CHECK if any(drafts) else PLAIN,
            draft_times=times,
            draft_places=self.places,
        )
