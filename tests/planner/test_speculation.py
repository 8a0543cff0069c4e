"""Speculative decoding: the published table, and the cost of checking drafts."""

from __future__ import annotations

import pytest
from helpers.public_configs import public_shape

from kvik.planner.devices import Device, Setting
from kvik.planner.speculation import expected_tokens, speculation_curve, speed_up, verify_cost

# Leviathan et al., arXiv 2211.17192, table 1: acceptance, drafts, tokens per step.
PAPER = [
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]
BIG = Device("big", "cuda", 1 << 40, 1e12, {"bf16": 1e14, "fp32": 1e13})


@pytest.mark.parametrize(("acceptance", "drafts", "tokens"), PAPER)
def test_the_published_table(acceptance: float, drafts: int, tokens: float) -> None:
    assert expected_tokens(acceptance, drafts) == pytest.approx(tokens, abs=0.005)
    assert speed_up(acceptance, drafts, 0.0) == pytest.approx(tokens, abs=0.005)


def test_extreme_acceptance() -> None:
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(1.0 - 1e-9, 5) == pytest.approx(6.0, abs=1e-6)


def test_drafts_cost_time() -> None:
    # 3.6893 tokens in the time of 1 + 5 * 0.1 steps.
    assert speed_up(0.8, 5, 0.1) == pytest.approx(3.6893 / 1.5, abs=1e-3)
    # The same if checking six rows takes twice the time of one.
    assert speed_up(0.8, 5, 0.1, 2.0) == pytest.approx(3.6893 / 2.5, abs=1e-3)


def test_the_best_number_of_drafts() -> None:
    curve = speculation_curve(1, 0.2, lambda drafts: 1.0, (0.1, 0.8), (1, 2, 3, 4, 5, 6))
    hopeless, good = curve.rows
    assert (hopeless.best_drafts, hopeless.best) == (0, 1.0)  # 1.1 tokens for 1.2 steps
    by_hand = {k: sum(0.8**i for i in range(k + 1)) / (1 + 0.2 * k) for k in range(1, 7)}
    assert good.best_drafts == max(by_hand, key=by_hand.__getitem__) == 4
    assert good.best == pytest.approx(by_hand[4])
    assert good.speed_ups == pytest.approx(tuple(by_hand.values()))
    assert good.tokens == pytest.approx([sum(0.8**i for i in range(k + 1)) for k in range(1, 7)])


def test_checking_is_free_only_while_reading_takes_longest() -> None:
    shape = public_shape("llama-3-8b")

    def cost(batch: int, drafts: int) -> float:
        return verify_cost(shape, Setting(BIG, "bf16", "bf16", batch=batch), drafts)

    assert cost(1, 4) == pytest.approx(1.0, abs=0.01)  # 5 rows; the ridge is at 100
    assert cost(1000, 4) == pytest.approx(5.0, rel=0.1)  # all of it is arithmetic
    assert 1.0 < cost(50, 4) < cost(100, 4) < 5.0
