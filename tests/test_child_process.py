"""Supervision of child processes."""

from __future__ import annotations

import pytest

from kvik.child_process import (
    BEGIN_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    HeartbeatWatch,
    StallTimer,
)


def test_silence_counts_only_while_it_is_watched() -> None:
    still, now = StallTimer(), 100.0
    assert still.look(1, now) == 0.0
    assert still.look(1, now + 0.2) == pytest.approx(0.2)
    assert still.look(1, now + 1000) == pytest.approx(0.2 + 2 * LOOK_SECONDS)
    assert still.look(1, now + 1000.1, expected=False) == 0.0
    assert still.look(1, now + 1000.2) == pytest.approx(0.1)
    assert still.look(2, now + 1000.3) == 0.0


@pytest.mark.parametrize(
    ("beats", "begins", "limit"),
    [(0, True, BEGIN_SECONDS), (0, False, None), (7, True, SILENT_SECONDS), (7, False, 10.0)],
)
def test_how_long_a_process_may_be_silent(beats: int, begins: bool, limit: float | None) -> None:
    heartbeats, looks = HeartbeatWatch(begins=begins), 0
    while not (reason := heartbeats.look(beats, looks * LOOK_SECONDS)) and looks < 1000:
        looks += 1
    if limit is None:
        assert not reason
    else:
        assert looks * LOOK_SECONDS == limit
        assert reason == f"has been silent for {limit:.0f} s"
        assert not heartbeats.look(beats + 1, looks * LOOK_SECONDS)
