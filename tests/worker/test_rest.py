"""Steps that need no look: none had drafts, and nobody would get any."""

from __future__ import annotations

import numpy as np
import pytest

from kvik.worker.adaptive import SHARE, DraftControl, StepFigures

DRAFTS, PLAIN = 4, 0.01
SLOTS = np.array([0])
NONE = np.zeros(1, np.int64)
ROOM = np.array([DRAFTS])


def plain_step(control: DraftControl) -> np.ndarray:
    due = control.passed(1, PLAIN, pure=True)
    return control.limits(SLOTS, ROOM) if due else NONE


def draft_step(control: DraftControl, drafts: np.ndarray, seconds: float = PLAIN) -> np.ndarray:
    control.observe(StepFigures(SLOTS, drafts, NONE, seconds, 0.0, int(drafts.max()), True))
    return control.limits(SLOTS, ROOM)


def until_asleep(control: DraftControl) -> None:
    """Every draft is wrong, and each step that checks some takes three times as long."""
    limits = NONE
    for _ in range(200):
        limits = draft_step(control, limits, 3 * PLAIN) if limits.any() else plain_step(control)
        if control.budget.left <= 0:
            return
    pytest.fail("drafts that are always wrong go on")


def test_a_control_that_knows_nothing_learns_first_what_a_step_takes() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    due = [control.passed(1, PLAIN, pure=True) for _ in range(6)]
    assert due == [False] * 5 + [True]


def test_it_rests_until_what_was_lost_is_earned_and_wakes_again() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    until_asleep(control)
    lost, rests = -control.budget.left, 0
    while not control.passed(1, PLAIN, pure=True):
        rests += 1
        assert rests < 1000
    assert rests + 1 >= lost / (SHARE * PLAIN)
    for _ in range(1000):  # and tries drafts again
        if plain_step(control).any():
            return
    pytest.fail("drafts are never tried again")


def test_a_new_request_is_looked_at_as_soon_as_anything_may_be_spent() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    until_asleep(control)
    while control.budget.left <= 0:
        control.passed(1, PLAIN, pure=True)
    control.budget.needed = 1.0  # a trial would cost more than there is
    assert not control.passed(1, PLAIN, pure=True)
    control.enter(0)
    assert control.passed(1, PLAIN, pure=True)


def test_deciding_for_nothing_is_earned_as_well() -> None:
    """Nobody may have drafts: that is not found out again after every step."""
    control = DraftControl(1, DRAFTS, DRAFTS)
    looks = 0
    for _ in range(1000):
        if control.passed(1, PLAIN, pure=True):
            looks += 1
            assert not control.limits(SLOTS, np.zeros(1, np.int64)).any()
            control.decided(PLAIN)
    assert looks <= 2 + 1000 * SHARE
