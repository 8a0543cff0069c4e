"""The order of measurements."""

from __future__ import annotations

import pytest

from kvik.errors import ConfigError
from kvik_bench.inprocess import rounds as disturbance
from kvik_bench.inprocess.rounds import Rounds


def test_subjects_take_turns() -> None:
    with Rounds(2, 1) as rounds:
        order = list(rounds.over(["a", "b"]))
    assert order == [(-1, "a"), (-1, "b"), (0, "a"), (0, "b"), (1, "a"), (1, "b")]


@pytest.mark.parametrize(("share", "words"), [(0.02, ""), (0.4, "40% of the cores")])
def test_other_processes_are_told_of(
    share: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disturbance.Watch, "others", lambda watch: share)
    with Rounds(1, 0) as rounds:
        list(rounds.over(["a"]))
    assert words in " ".join(rounds.remarks) and bool(words) == bool(rounds.remarks)


@pytest.mark.parametrize(("repeats", "warmup", "field"), [(0, 0, "repeats"), (1, -1, "warmup")])
def test_out_of_range(repeats: int, warmup: int, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Rounds(repeats, warmup)
    assert error.value.field == field
