"""Measurements of steps, and predictions from them."""

from __future__ import annotations

import pytest

from kvik.core.step_clock import SAMPLES, StepClock


def measured(*steps: tuple[int, float], times: int = SAMPLES) -> StepClock:
    """Measure steps of these tokens and seconds in turn, `times` times."""
    clock, now = StepClock(), 0.0
    for _ in range(times):
        for tokens, seconds in steps:
            clock.note(now, now + seconds, tokens, prefill=tokens > 8)
            now += seconds + 5.0  # idle time between steps
    return clock


def test_predictions_need_measurements() -> None:
    clock = StepClock()
    assert clock.seconds_per_step is None
    assert clock.prefill_tokens_per_second is None
    assert clock.at_least(1000) == 0.0


def test_means_are_of_steps_and_not_of_idle_time() -> None:
    clock = measured((1, 0.5), (100, 2.0))
    assert clock.seconds_per_step == pytest.approx(1.25, rel=0.05)
    assert clock.prefill_tokens_per_second == pytest.approx(50.0)


def test_means_follow_a_change_of_speed() -> None:
    clock = measured((100, 2.0), times=200)
    for step in range(100):
        clock.note(1e6 + step, 1e6 + step + 0.5, 100, prefill=True)
    assert clock.prefill_tokens_per_second == pytest.approx(200.0, rel=0.05)


def test_steps_in_flight_together_are_not_counted_twice() -> None:
    clock = StepClock()
    for step in range(SAMPLES):
        # Planned while the previous step was running, which took as long.
        clock.note(max(0.0, step - 1.0), step + 1.0, 4, prefill=False)
    assert clock.seconds_per_step == pytest.approx(1.0)
    assert clock.at_least(4) == 1.0


def test_at_least_is_the_fastest_step_of_that_size() -> None:
    clock = measured((1, 0.5), (100, 2.0))
    clock.note(1e6, 1e6 + 1.5, 100, prefill=True)
    assert clock.at_least(1) == clock.at_least(99) == 0.5
    assert clock.at_least(100) == clock.at_least(5000) == 1.5


def test_a_few_steps_are_not_enough() -> None:
    clock = measured((1, 0.5), times=SAMPLES - 1)
    assert clock.at_least(1) == 0.0
    clock.note(1e6, 1e6 + 0.5, 1, prefill=False)
    assert clock.at_least(1) == 0.5


def test_old_slow_steps_are_dropped() -> None:
    clock = measured((1, 30.0))  # caches were cold
    for step in range(SAMPLES):
        clock.note(1e6 + step, 1e6 + step + 0.1, 1, prefill=False)
    assert clock.at_least(1) == pytest.approx(0.1)
