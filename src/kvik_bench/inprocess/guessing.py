"""What guessing ahead did in a run, beside the same requests without it.

The formula is that of `planner/speculation.py`. Its costs are measured: of a step and of making its
drafts, both over a step of the engine without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvik.core.types import DraftCounts
from kvik.engine.stats import SpeculationStats
from kvik.planner.speculation import expected_tokens
from kvik_bench.inprocess.inproc import Run
from kvik_bench.inprocess.measures import decode_seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work in one round, without and with speculation."""

    plain: Run
    guessing: Run
    trees: bool  # drafts of a request form a tree

    @property
    def drafts(self) -> DraftCounts:
        return _since(self._stats[0].drafts, self._stats[1].drafts)

    @property
    def decoded(self) -> int:
        """A request's part of a step, counted for all: one for each token that was no draft."""
        requests = len(self.guessing.answers)
        tokens = sum(map(len, self.guessing.answers)) - requests
        return tokens - self.drafts.accepted

    @property
    def share(self) -> float:
        """Of these, with drafts."""
        return min(1.0, self.drafts.rows / self.decoded)

    @property
    def depth(self) -> float:
        """Drafts of a check that could all be right: K."""
        if self.trees:
            return float(self.num_places)
        return self.drafts.drafts / max(1, self.drafts.rows)

    @property
    def acceptance(self) -> float:
        """How likely a draft is right if those before it were. Of checks with more drafts, as many
        are taken to have come so far as of all."""
        drafts = self.drafts
        tried, before = 0.0, 0
        for i in range(self.num_places):
            count, right = drafts.at[i], drafts.accepted_at[i]
            tried += count if i == 0 else before * count / drafts.at[i - 1]
            before = right
        return drafts.accepted / tried if tried else 0.0

    @property
    def num_places(self) -> int:
        """Drafts one after another that were checked, or, of a tree, right."""
        places = self.drafts.accepted_at if self.trees else self.drafts.at
        return sum(1 for count in places if count)

    @property
    def draft_cost(self) -> float:
        """Time of one draft in depth, for all requests, over that of a plain step."""
        drafted = self._steps * self.share * self.depth
        return self._making / self._plain_step / drafted if drafted else 0.0

    @property
    def step_cost(self) -> float:
        """Time of a step over that of a plain one, without making drafts."""
        return (decode_seconds(self.guessing) - self._making) / self._steps / self._plain_step

    @property
    def predicted(self) -> float:
        """With all costs as they were measured."""
        return self._expected(self.step_cost)

    @property
    def if_free(self) -> float:
        """As in theorem 3.8, which takes a check to cost no more than a step without drafts."""
        return self._expected(1.0)

    def _expected(self, step_cost: float) -> float:
        tokens = 1.0 + self.share * (self._tokens_of_check - 1.0)
        return tokens / (step_cost + self.share * self.depth * self.draft_cost)

    @property
    def _tokens_of_check(self) -> float:
        """By the formula, in the mean of the checks, each with its own number of drafts."""
        if self.trees:
            return expected_tokens(self.acceptance, self.num_places)
        at = [*self.drafts.at, 0]
        checks = [at[i] - at[i + 1] for i in range(len(at) - 1)]  # with i + 1 drafts
        tokens = [expected_tokens(self.acceptance, i + 1) for i in range(len(checks))]
        pairs = zip(checks, tokens, strict=True)
        return sum(count * of for count, of in pairs) / max(1, self.drafts.rows)

    @property
    def own_estimate(self) -> float | None:
        """By the engine, which knows what its steps without drafts take."""
        before, after = self._stats
        seconds = after.seconds - before.seconds
        return (after.plain_seconds - before.plain_seconds) / seconds if seconds else None

    @property
    def equal(self) -> float:
        pairs = zip(self.plain.answers, self.guessing.answers, strict=True)
        tokens = [a == b for one, other in pairs for a, b in zip(one, other, strict=True)]
        return sum(tokens) / len(tokens)

    @property
    def _stats(self) -> tuple[SpeculationStats, SpeculationStats]:
        before, after = self.guessing.before.speculation, self.guessing.after.speculation
        assert before is not None and after is not None
        return before, after

    @property
    def _plain_steps(self) -> int:
        """That did not read prompts."""
        return max(map(len, self.plain.answers)) - 1

    @property
    def _plain_step(self) -> float:
        return decode_seconds(self.plain) / self._plain_steps

    @property
    def _steps(self) -> int:
        plain = self.plain.after.steps - self.plain.before.steps
        steps = self.guessing.after.steps - self.guessing.before.steps
        return max(1, steps - (plain - self._plain_steps))

    @property
    def _making(self) -> float:
        """Seconds of making drafts."""
        before, after = self._stats
        return after.proposing - before.proposing


def _since(before: DraftCounts, after: DraftCounts) -> DraftCounts:
    def places(now: list[int], then: list[int]) -> list[int]:
        return [count - (then[i] if i < len(then) else 0) for i, count in enumerate(now)]

    return DraftCounts(
        after.rows - before.rows,
        after.drafts - before.drafts,
        after.accepted - before.accepted,
        places(after.at, before.at),
        places(after.accepted_at, before.accepted_at),
    )
