from __future__ import annotations

import numpy as np
import pytest

from kvik.worker.draft_estimates import START, Acceptance

CHAIN = range(-1, 3)
# Two drafts for the next token, two after the first, one after the other.
TREE = (-1, 0, 0, 1, 1, 2)


def paths(acceptance_of: list[list[int]], drafts: int) -> np.ndarray:
    """Return [rows, drafts] from the numbers of the accepted drafts."""
    found = np.zeros((len(acceptance_of), drafts), np.bool_)
    for row, numbers in enumerate(acceptance_of):
        found[row, numbers] = True
    return found


def test_initially_each_draft_is_accepted_with_the_same_probability() -> None:
    gains = Acceptance(2, CHAIN).gains(np.array([1]))[0]
    assert gains == pytest.approx([START, START**2, START**3])
    gains = Acceptance(2, TREE).gains(np.array([0]))[0]
    half = START / 2
    assert gains == pytest.approx([START, half, half, half * START, half * START], abs=0.15)
    assert (np.diff(gains) <= 0).all()


@pytest.mark.parametrize("parents", [CHAIN, TREE])
def test_gains_converge_to_acceptance_rates(parents) -> None:
    """Steps accept in turn: nothing, the first, the first two of a path, the whole path."""
    drafts = len(parents) - 1
    acceptance = Acceptance(1, parents)
    slots, judged = np.array([0]), np.array([drafts])
    whole = [0, 1, 2] if drafts == 3 else [0, 2]
    cycle = [[], whole[:1], whole, whole[:2]] * 30
    gains = []
    for step in cycle:
        acceptance.observe(slots, judged, paths([step], drafts))
        gains.append(acceptance.gains(slots)[0])
    found = np.mean(gains[-4:], axis=0)
    expected = np.mean([paths([step], drafts)[0] for step in cycle[:4]], axis=0)
    assert found[0] == pytest.approx(expected[0], abs=0.08)
    if drafts == 3:
        assert found == pytest.approx(expected, abs=0.12)
    else:  # never rising, although the second draft is worse than the third
        assert found[1] < 0.2 and found[2] <= found[1]


def test_a_chain_gains_the_same_as_a_tree_with_one_path() -> None:
    chain, tree = Acceptance(3, CHAIN), Acceptance(3, CHAIN)
    tree._is_chain = False  # the general formula for paths
    rng, slots = np.random.default_rng(0), np.arange(3)
    for _ in range(30):
        drafts = rng.integers(1, 4, 3)
        accepted = np.arange(3) < np.minimum(rng.integers(0, 4, 3), drafts)[:, None]
        for each in (chain, tree):
            each.observe(slots, drafts, accepted)
        assert chain.gains(slots) == pytest.approx(tree.gains(slots))


def test_an_unchecked_draft_does_not_count() -> None:
    acceptance = Acceptance(2, CHAIN)
    for _ in range(20):
        acceptance.observe(np.array([0]), np.array([1]), paths([[0]], 3))
    gains = acceptance.gains(np.array([0]))[0]
    assert gains[0] > 0.9 and gains[2] > 0.7  # deeper drafts share the evidence of the first


def test_acceptance_is_per_request_with_the_mean_as_prior() -> None:
    acceptance = Acceptance(3, CHAIN)
    for _ in range(20):
        acceptance.observe(np.array([0, 1]), np.array([3, 3]), paths([[0, 1, 2], []], 3))
    good, bad, new = acceptance.gains(np.array([0, 1, 2]))[:, 0]
    assert good > 0.8 and bad < 0.2 and bad < new < good
    acceptance.forget(0)
    assert acceptance.gains(np.array([0]))[0, 0] == pytest.approx(new)


def test_acceptance_of_a_request_decays() -> None:
    acceptance = Acceptance(2, CHAIN)
    for _ in range(20):
        acceptance.observe(np.array([0, 1]), np.array([3, 3]), paths([[0, 1, 2], []], 3))
    before = acceptance.gains(np.array([1]))[0, 0]
    for _ in range(80):  # steps without drafts
        acceptance.observe(np.array([0, 1]), np.array([0, 0]), paths([[], []], 3))
    after = acceptance.gains(np.array([1]))[0, 0]
    assert before < 0.2 and after == pytest.approx(acceptance.gains(np.array([0]))[0, 0], abs=0.05)


@pytest.mark.parametrize("parents", [CHAIN, TREE])
def test_steps_counted_together_equal_steps_counted_one_by_one(parents, monkeypatch) -> None:
    drafts = len(parents) - 1
    together, single = Acceptance(4, parents), Acceptance(4, parents)
    monkeypatch.setattr("kvik.worker.draft_estimates._HEAVIEST", 2.0)
    rng = np.random.default_rng(1)
    for step in range(60):
        slots = rng.permutation(4)[: rng.integers(1, 5)]
        judged = rng.integers(0, drafts + 1, len(slots))
        right = np.logical_and.accumulate(rng.random((len(slots), drafts)) < 0.7, axis=1)
        right &= np.arange(drafts) < judged[:, None]
        for each in (together, single):
            each.observe(slots, judged, right)
            if step % 7 == 3:
                each.passed()
            if step % 20 == 19:
                each.forget(2)
        single.gains(slots)
    everyone = np.arange(4)
    assert together.gains(everyone) == pytest.approx(single.gains(everyone), rel=1e-9)
