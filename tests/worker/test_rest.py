"""Steps that need no look: none had drafts, and nobody would get any."""

from __future__ import annotations

import numpy as np
import pytest

from kvik.worker.adaptive import ALLOWANCE, DraftControl, StepFigures

DRAFTS = 4
SLOTS = np.array([0])
NONE = np.zeros(1, np.int64)


def plain_step(control: DraftControl) -> np.ndarray:
    control.observe(StepFigures(SLOTS, NONE, NONE, 0.01, 0.0, 0, True))
    return control.limits(SLOTS, np.array([DRAFTS]))


def draft_step(control: DraftControl, drafts: np.ndarray, seconds: float = 0.01) -> np.ndarray:
    control.observe(StepFigures(SLOTS, drafts, NONE, seconds, 0.0, int(drafts.max()), True))
    return control.limits(SLOTS, np.array([DRAFTS]))


def until_asleep(control: DraftControl) -> None:
    """Every draft is wrong, and each step that checks some takes three times as long."""
    limits = NONE
    for _ in range(200):
        limits = draft_step(control, limits, 0.03) if limits.any() else plain_step(control)
        if not limits.any() and control.rest():
            return
    pytest.fail("drafts that are always wrong go on")


def test_a_control_that_knows_nothing_does_not_rest() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    assert not control.rest()
    plain_step(control)
    assert not control.rest()


def test_it_rests_while_drafts_do_not_pay_and_wakes_again() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    until_asleep(control)
    before, rests = control.account, 1
    while control.rest():
        rests += 1
        assert rests < 1000
    assert rests > 1
    assert control.account == pytest.approx(before + (rests - 1) * ALLOWANCE)
    assert control.account > 0
    for _ in range(1000):  # and tries drafts again
        if plain_step(control).any():
            return
    pytest.fail("drafts are never tried again")


def test_a_new_request_wakes_it() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    until_asleep(control)
    while control.account <= 0:
        control.rest()
    control.enter(0)
    assert not control.rest()


def test_a_step_with_drafts_is_always_looked_at() -> None:
    control = DraftControl(1, DRAFTS, DRAFTS)
    limits = NONE
    while not limits.any():
        limits = plain_step(control)
    draft_step(control, limits, 0.3)
    assert control.account < 0
    assert not control.rest()
    plain_step(control)
    assert control.rest()
