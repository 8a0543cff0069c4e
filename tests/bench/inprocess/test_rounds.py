"""The order of measurements."""

from __future__ import annotations

import pytest

from kvik.bench.inprocess.rounds import Rounds
from kvik.config.errors import ConfigError


def test_subjects_take_turns() -> None:
    with Rounds(2, 1) as rounds:
        order = list(rounds.over(["a", "b"]))
    assert order == [(-1, "a"), (-1, "b"), (0, "a"), (0, "b"), (1, "a"), (1, "b")]


@pytest.mark.parametrize(("repeats", "warmup", "field"), [(0, 0, "repeats"), (1, -1, "warmup")])
def test_out_of_range(repeats: int, warmup: int, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Rounds(repeats, warmup)
    assert error.value.field == field
