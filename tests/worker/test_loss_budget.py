"""Guessing ahead never costs more than its budget, whatever the world is like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvik.worker.adaptive import FIRST, LEAST, SHARE, DraftControl, LossBudget, StepFigures

DRAFTS, SLOTS, STEPS = 5, 6, 400


def test_a_loss_is_earned_back_before_the_next_trial() -> None:
    budget = LossBudget()
    budget.settle(1.0, 3.0, room=2.0)
    lost = 2.0 - SHARE
    assert budget.left == pytest.approx(-lost)
    assert SHARE * LEAST < budget.share < SHARE  # trials have brought less than they cost
    steps = 0
    while not budget.passed(1.0):
        steps += 1
    assert steps == pytest.approx(lost / budget.share, abs=2)
    budget.needed = 1.0  # what the next trial may lose
    steps = 0
    while not budget.passed(1.0):
        steps += 1
    assert steps == pytest.approx(1.0 / budget.share, abs=3)


def test_where_trials_never_gain_few_are_made_until_one_does() -> None:
    budget = LossBudget()
    for _ in range(100):
        budget.settle(1.0, 1.2, room=2.0)
    assert budget.share == pytest.approx(SHARE * LEAST)
    for _ in range(10):
        budget.settle(1.0, 0.5, room=2.0)
    assert budget.share == SHARE
    for _ in range(20_000):  # until nothing is left of what was lost
        budget.settle(1.0, 0.5, room=2.0)
    assert budget.share == SHARE
    for _ in range(200):  # half of what they cost comes back
        budget.settle(1.0, 1.2, room=2.0)
        budget.settle(1.0, 0.9, room=2.0)
    assert budget.share == pytest.approx(SHARE / 2, rel=0.1)


def test_gains_fill_the_budget_up_to_its_limit() -> None:
    budget = LossBudget()
    for _ in range(10):
        budget.settle(3.0, 1.0, room=2.5)
    assert budget.left == 2.5
    budget.settle(1.0, 1.5, room=2.5)
    assert budget.left == pytest.approx(2.0 + SHARE)
    budget.spend(3.0)
    assert not budget.passed(1.0)


@dataclass
class Phase:
    """How drafts fare for a while.

    Attributes:
        right: [slots], how often each draft is.
        judging: of one draft, making: of one in depth, looking: for any at all, reading: of the
            text of a request that had no drafts yet; in steps without drafts.
        found: how often there are drafts.
    """

    right: np.ndarray
    judging: float
    making: float
    looking: float
    reading: float
    found: float

    @staticmethod
    def draw(rng: np.random.Generator) -> Phase:
        return Phase(
            right=rng.choice([0.0, 0.2, 0.5, 0.8, 1.0], SLOTS),
            judging=rng.choice([0.0, 0.05, 0.3, 1.0, 3.0]),
            making=rng.choice([0.0, 0.05, 0.5]),
            looking=rng.choice([0.0, 0.2, 1.0]),
            reading=rng.choice([0.0, 0.0, 3.0]),
            found=rng.choice([0.0, 0.3, 1.0]),
        )


@pytest.mark.parametrize("seed", range(12))
def test_time_with_drafts_is_bounded_by_the_time_without(seed: int) -> None:
    """Requests come and go, prompts are read, and from time to time all that drafts cost and bring
    changes. The clock is a sum; the bound holds at every moment."""
    rng = np.random.default_rng(seed)
    control = DraftControl(SLOTS, DRAFTS, SLOTS * DRAFTS)
    deciding = rng.choice([0.0, 0.2, 1.0])
    phase = Phase.draw(rng)
    running = [0]
    limits = dict.fromkeys(range(SLOTS), 0)
    unread = set(range(SLOTS))
    total = without = worst = made = longest = 0.0
    asked = 0
    for _ in range(STEPS):
        if rng.random() < 0.01:
            phase = Phase.draw(rng)
        if rng.random() < 0.05:  # someone comes or goes
            slot = int(rng.integers(SLOTS))
            running = sorted({*running, slot} if slot not in running else {*running} - {slot})
            running = running or [slot]
            if slot in running:
                control.enter(slot)
            limits[slot] = 0
            unread.add(slot)
        slots = np.array(running)
        plain = 0.02 * (1 + 0.3 * len(slots))
        longest = max(longest, plain)
        wanted = np.array([limits[slot] for slot in running])
        drafts = np.where(rng.random(len(slots)) < phase.found, wanted, 0)
        accepted = np.zeros_like(drafts)
        for i, slot in enumerate(running):
            while accepted[i] < drafts[i] and rng.random() < phase.right[slot]:
                accepted[i] += 1
        pure = bool(rng.random() < 0.9)
        prompt = 0.0 if pure else 2 * plain
        seconds = plain * (1 + phase.judging * drafts.sum() / len(slots))
        took, would = seconds + made, plain * (1 + accepted.mean())
        if asked:
            figures = seconds + prompt, made, asked, pure
            control.observe(StepFigures(slots, drafts, accepted, *figures))
            due = True
        else:
            due = control.passed(len(slots), seconds + prompt, pure=pure)
        made, asked = 0.0, 0
        limits = dict.fromkeys(range(SLOTS), 0)
        if due:
            made = plain * deciding if control.budget.left > 0 else 0.0
            chosen = control.limits(slots, np.full(len(slots), DRAFTS))
            limits |= dict(zip(running, chosen.tolist(), strict=True))
            new = {slot for slot in running if limits[slot]} & unread
            unread -= new
            asked = int(chosen.max())
            if chosen.any():
                made += plain * (phase.looking + phase.making * int(chosen.max()))
                made += plain * phase.reading * len(new)
            else:
                control.decided(made)
                total += made
                made = 0.0
        total += took + prompt
        without += would + prompt
        worst = max(worst, took - would, plain * deciding)
        assert total <= without / 0.97 + FIRST * longest + 3 * worst  # see `LossBudget`
    assert control.budget.left < 1.0
