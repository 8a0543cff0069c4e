"""The order of measurements."""

from __future__ import annotations

import pytest

from kvik_bench.inprocess import rounds
from kvik_bench.inprocess.rounds import Rounds, Watch, undisturbed


def test_subjects_alternate_in_each_round() -> None:
    order: list[tuple[int, str]] = []

    def measure(number: int, subject: str) -> int:
        order.append((number, subject))
        return number

    assert Rounds(2, 1).runs(["a", "b"], measure) == {"a": [0, 1], "b": [0, 1]}
    assert order == [(-1, "a"), (-1, "b"), (0, "a"), (0, "b"), (1, "a"), (1, "b")]


@pytest.mark.parametrize(("share", "words"), [(0.02, ""), (0.4, "40% of the cores")])
def test_load_of_other_processes_is_reported(
    share: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "others", lambda watch: share)
    one = Rounds(1, 0)
    one.runs(["a"], lambda number, subject: None)
    assert words in " ".join(one.remarks) and bool(words) == bool(one.remarks)


# Detection of other processes, and samples without them.


def test_the_faster_half_counts() -> None:
    assert undisturbed([3.0]) == 3.0
    assert undisturbed([1.0, 9.0]) == 1.0
    assert undisturbed([1.0, 2.0, 3.0, 50.0, 60.0]) == 2.0


@pytest.mark.parametrize(("busy", "own", "share"), [(5.0, 5.0, 0.0), (9.0, 5.0, 0.2)])
def test_the_share_of_other_processes(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, share: float
) -> None:
    """In 10 seconds on 2 cores."""
    now, taken, mine = [100.0], [50.0], [20.0]
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(rounds, "busy_seconds", lambda: taken[0])
    monkeypatch.setattr(rounds, "own_seconds", lambda: mine[0])
    watch = Watch()
    now[0], taken[0], mine[0] = 110.0, 50.0 + busy, 20.0 + own
    assert watch.others() == pytest.approx(share, abs=rounds.TICK)


def test_the_clocks_advance() -> None:
    assert 0 < rounds.own_seconds() <= rounds.busy_seconds() + 1
