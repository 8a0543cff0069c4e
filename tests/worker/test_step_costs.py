from __future__ import annotations

import numpy as np
import pytest

from kvik.worker.draft_estimates import StepCosts


def test_steps_without_drafts_are_known_by_the_number_of_requests() -> None:
    costs = StepCosts(5, 64)
    assert costs.plain(4) is None and costs.num_plain(4) == 0
    for seconds in (1.0, 1.2, 90.0, 1.1, 1.3):  # single steps may be very slow
        costs.observe_plain(4, seconds)
    costs.observe_plain(8, 2.2)
    assert costs.plain(4) == 1.2 and costs.num_plain(4) == 5
    assert costs.plain(6) == pytest.approx(1.7) and costs.num_plain(6) == 0
    assert costs.plain(1) == 1.2 and costs.plain(100) == 2.2
    for _ in range(8):
        costs.observe_plain(4, 2.0)  # the texts have grown
    assert costs.plain(4) == 2.0


def judged(costs: StepCosts, requests: int, drafts: int, ratio: float, times: int = 1) -> float:
    """Return the cost of the last of some steps, with free drafts."""
    for _ in range(times):
        counted = costs.observe_drafts(requests, drafts, ratio, 1, 0.0)
    return counted


def test_checks_are_free_until_they_are_measured() -> None:
    assert StepCosts(5, 64).judging(2).upto(10).tolist() == [1.0] * 11


def test_the_cost_of_checks_is_interpolated_by_number_of_drafts() -> None:
    costs = StepCosts(5, 64)
    for _ in range(100):
        judged(costs, 2, 4, 1.5)
        judged(costs, 2, 8, 2.0)
    ratios = costs.judging(2).upto(16)
    assert ratios[0] == 1.0 and ratios[4] == pytest.approx(1.5, abs=0.02)
    assert ratios[8] == pytest.approx(2.0, abs=0.03) and ratios[6] == pytest.approx(1.75, abs=0.02)
    assert ratios[8] < ratios[16] < 3.0  # more drafts cost more, but less than linearly
    assert costs.judging(20).upto(4).tolist() == [1.0] * 5  # nothing is known of other batch sizes


@pytest.mark.parametrize("most", [1, 5, 64])
def test_each_cost_is_the_last_of_the_costs_up_to_it(most: int) -> None:
    costs = StepCosts(most, most)
    for drafts, ratio in ((1, 1.2), (most, 2.5), (most // 2 + 1, 1.9)):
        costs.observe_drafts(3, drafts, ratio, drafts, ratio - 1.0)
        costs.observe_plain(3, 1.0)
        for n in range(most + 3):  # beyond the last point the cost is that of the last
            assert costs.judging(3).at(n) == pytest.approx(costs.judging(3).upto(n)[-1])
            assert costs.making(3).at(n) == pytest.approx(costs.making(3).upto(n)[-1])


def test_between_two_points_both_are_measured() -> None:
    costs = StepCosts(5, 64)
    judged(costs, 1, 5, 1.4, times=100)
    assert costs.judging(1).upto(5)[5] == pytest.approx(1.4, abs=0.02)


def test_more_drafts_never_cost_less() -> None:
    costs = StepCosts(5, 64)
    judged(costs, 1, 1, 1.5, times=20)
    judged(costs, 1, 4, 0.5, times=20)
    assert (np.diff(costs.judging(1).upto(8)) >= 0).all() and costs.judging(1).upto(8).min() == 1.0


def test_one_long_step_counts_little() -> None:
    costs = StepCosts(5, 64)
    judged(costs, 1, 4, 1.2, times=30)
    assert judged(costs, 1, 4, 30.0) < 3.0
    assert costs.judging(1).upto(4)[4] < 1.4
    counted = costs.observe_drafts(1, 4, 1.2, 4, 10.0)
    assert counted < 2.0 and costs.making(1).upto(4)[4] < 0.3


def test_old_measurements_decay() -> None:
    costs = StepCosts(5, 64)
    judged(costs, 1, 8, 5.0, times=30)
    assert costs.judging(1).upto(8)[-1] > 4.0
    for _ in range(1500):  # it looks so expensive that it is never tried again
        costs.observe_plain(1, 1.0)
    assert costs.judging(1).upto(8)[-1] < 1.5


def test_numbers_of_drafts_are_tried_step_by_step() -> None:
    costs = StepCosts(5, 1000)
    assert costs.reach(1) == 1 and costs.reach(12) == 12
    for drafts in (1, 2, 4):
        judged(costs, 1, drafts, 1.0)
        assert costs.reach(1) == 2 * drafts


def test_drafting_costs_by_depth() -> None:
    costs = StepCosts(8, 64)
    assert costs.making(3).upto(2).tolist() == [0.0] * 3
    for _ in range(30):
        for depth in (1, 2, 4, 8):
            costs.observe_drafts(3, 8, 1.0, depth, 0.1 * depth)
    assert costs.making(3).upto(8) == pytest.approx(np.arange(9) / 10, abs=0.05)


def test_a_cost_that_is_the_same_for_all_depths_is_not_charged_per_draft() -> None:
    costs = StepCosts(8, 64)
    for _ in range(30):
        for depth in (1, 2):
            costs.observe_drafts(3, 8, 1.0, depth, 0.1)
    assert costs.making(3).upto(8)[8] == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("most", [1, 5, 40, 4096])
def test_every_number_of_drafts_has_a_cost(most: int) -> None:
    costs = StepCosts(most, most)
    costs.observe_drafts(300, most, 1.5, most, 0.5)
    for ratios in (costs.judging(300).upto(most), costs.making(300).upto(most)):
        assert len(ratios) == most + 1 and (np.diff(ratios) >= 0).all() and ratios[-1] > ratios[0]


def test_a_stopped_clock_does_no_harm() -> None:
    costs = StepCosts(5, 8)
    costs.observe_plain(1, 0.0)
    plain = costs.plain(1)
    assert plain > 0
    judged(costs, 1, 2, 0.0)
    assert costs.judging(1).upto(2).tolist() == [1.0, 1.0, 1.0]
