"""The gain of speculative decoding, where one step of the target checks K drafted tokens.

With acceptance rate a, the target emits (1 - a^(K+1)) / (1 - a) tokens per step on average
(Leviathan et al. 2023, arXiv 2211.17192). Their speed-up (theorem 3.8) assumes that checking K + 1
rows costs as much as one row, which holds while a step is bound by reading weights; here the
roofline gives the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvik.planner.devices import Setting
from kvik.planner.roofline import step_time, verify
from kvik.planner.shape import ModelShape

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
DRAFTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """The gain at one acceptance rate."""

    acceptance: float
    tokens: tuple[float, ...]  # expected tokens per step, for each number of drafts of the curve
    speed_ups: tuple[float, ...]  # tokens/s with speculation over tokens/s without, likewise
    best_drafts: int  # number of drafts with the largest speed-up; 0 if none is above 1
    best: float  # that speed-up; 1 if none is above 1


@dataclass(frozen=True, slots=True)
class SpeculationCurve:
    """The gain by acceptance rate (rows) and number of drafts (columns)."""

    batch: int  # requests that decode together
    drafts: tuple[int, ...]  # number of drafts (K) of each column
    draft_cost: float  # time of a draft step over that of a target step
    # Time of a step with K + 1 rows per request over that with one row.
    verify_costs: tuple[float, ...]
    rows: tuple[SpeculationRow, ...]


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return the expected tokens per target step: accepted drafts and one of its own."""
    if acceptance == 1.0:
        return drafts + 1.0
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance)


def speed_up(acceptance: float, drafts: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Return the speed-up over one token per step. Costs are in target steps of one row."""
    return expected_tokens(acceptance, drafts) / (verify_cost + drafts * draft_cost)


def verify_cost(shape: ModelShape, at: Setting, drafts: int) -> float:
    """Return the time of a step with `drafts` + 1 rows per request over that with one row."""

    def seconds(count: int) -> float:
        return step_time(shape, at, verify(at.group, at.context, count)).expected

    return seconds(drafts) / seconds(0)


def speculation_curve(
    batch: int,
    draft_cost: float,
    check: Callable[[int], float],
    acceptances: tuple[float, ...] = ACCEPTANCES,
    drafts: tuple[int, ...] = DRAFTS,
) -> SpeculationCurve:
    """Return the table of speed-ups.

    Args:
        check: maps K to the cost of checking K drafts.
    """
    costs = tuple(check(count) for count in drafts)
    rows = []
    for acceptance in acceptances:
        gains = tuple(
            speed_up(acceptance, count, draft_cost, cost)
            for count, cost in zip(drafts, costs, strict=True)
        )
        best = max(gains)
        rows.append(
            SpeculationRow(
                acceptance=acceptance,
                tokens=tuple(expected_tokens(acceptance, count) for count in drafts),
                speed_ups=gains,
                best_drafts=drafts[gains.index(best)] if best > 1.0 else 0,
                best=max(best, 1.0),
            )
        )
    return SpeculationCurve(batch, drafts, draft_cost, costs, tuple(rows))
