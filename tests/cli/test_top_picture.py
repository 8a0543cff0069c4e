"""The picture that `kvik top` makes of an answer of the server."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from helpers.engine_frames import engine_frame, live_request
from rich.console import Console, RenderableType

from kvik.cli.top_picture import (
    BAR_WIDTH,
    duration,
    header,
    kv_use,
    picture,
    plain,
    queue,
    sparkline,
    steps,
    waterfall,
)


def shown(picture: RenderableType, width: int = 120) -> str:
    file = StringIO()
    Console(file=file, width=width, height=40).print(picture)
    return file.getvalue()


def test_everything_is_told() -> None:
    text = shown(picture(engine_frame(), 120))
    for part in (
        "kvik stories  ready  up 64.0 s",
        "1,234 steps",
        "decode 321 tok/s",
        "prefill 2,048 tok/s",
        "running 1  waiting 0",
        "prefix hits 25%",
        "preemptions 3",
        "50%: 256 of 512 blocks, 99 cached",
        "up to 16 a step",
        "up to 4 a step",
        "queue: empty",
    ):
        assert part in text
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["7"]]
    assert row.split()[:9] == ["7", "decode", "17+5", "2.0", "s", "3.0", "s", "5.0", "s"]


@pytest.mark.parametrize("width", [20, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    frame = engine_frame(steps={"prefill_tokens": [9] * 200, "decode_tokens": [1] * 200})
    assert max(map(len, shown(picture(frame, width), width).splitlines())) <= width


def test_a_terminal_of_80_letters_cuts_nothing() -> None:
    frame = engine_frame(running=[live_request(12345, phase="preempted", prompt_tokens=99999)])
    assert "…" not in shown(picture(frame, 80), 80)


def test_an_engine_that_does_not_answer() -> None:
    frame = engine_frame() | {"state": "restarting", "reason": "it crashed", "live": None}
    text = shown(picture(frame, 80))
    assert "restarting" in text and "it crashed" in text and "does not answer" in text


def test_a_lost_server_is_said_over_its_last_figures() -> None:
    text = shown(picture(engine_frame(), 120, trouble="url: no server answers"))
    assert "lost" in text and "url: no server answers" in text and "ready" not in text
    assert "decode 321 tok/s" in text


def test_only_so_many_requests() -> None:
    frame = engine_frame(running=[live_request(1000 + i) for i in range(50)])
    text = shown(picture(frame, 120, rows=4))
    assert "1003" in text and "1004" not in text


def test_no_request_at_all() -> None:
    empty = engine_frame(running=[], steps={"prefill_tokens": [], "decode_tokens": []})
    empty["live"]["stats"] |= {"prefix_queries": 0, "kv_usage": 0.0}
    text = shown(picture(empty, 120))
    assert "prefix hits -" in text and "0%:" in text


def test_the_queue() -> None:
    live = engine_frame(waiting=[live_request(i, arrival=98.0) for i in range(20)])["live"]
    live["stats"]["num_waiting"] = 30
    text = queue(live).plain
    assert text.startswith("queue: 0 (2.0 s), 1 (2.0 s), ") and text.endswith("and 22 more")


def test_a_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "  "
    assert sparkline([0, 1, 50, 100]) == " ▁▄█"


def test_the_newest_steps_are_kept() -> None:
    prefill, decode = steps({"prefill_tokens": [0] * 99 + [5], "decode_tokens": [0] * 100}, 60)
    assert "█ up to 5 a step" in prefill.plain and len(prefill.plain) <= 60
    assert "up to 0 a step" in decode.plain


@pytest.mark.parametrize(
    ("fields", "bar"),
    [
        ({}, "░" * 5 + "▒" * 7 + "█" * 12),
        ({"arrival": 95.0, "first_scheduled": None, "first_token": None}, " " * 12 + "░" * 12),
        ({"first_token": None}, "░" * 5 + "▒" * 19),
        ({"first_scheduled": 90.0, "first_token": 90.1}, "▒" + "█" * 23),
        # what has just begun is seen
        ({"first_scheduled": 90.0, "first_token": 100.0 - 1e-6}, "▒" * 24),
        ({"arrival": 99.999, "first_scheduled": None, "first_token": None}, " " * 23 + "░"),
    ],
)
def test_a_waterfall(fields: dict[str, Any], bar: str) -> None:
    assert waterfall(live_request(0, **fields), 90.0, 100.0).plain == bar
    assert len(bar) == BAR_WIDTH


def test_a_waterfall_of_no_time() -> None:
    now = {"arrival": 100.0, "first_scheduled": None, "first_token": None}
    assert waterfall(live_request(0, **now), 100.0, 100.0).plain == ""


@pytest.mark.parametrize(
    ("usage", "full"), [(0.0, 0), (0.001, 1), (0.5, BAR_WIDTH // 2), (1.0, BAR_WIDTH)]
)
def test_a_bar_of_the_cache(usage: float, full: int) -> None:
    live = engine_frame()["live"]
    live["stats"]["kv_usage"] = usage
    text = kv_use(live).plain
    assert (text.count("█"), text.count("░")) == (full, BAR_WIDTH - full)


def test_times_are_short() -> None:
    given = (-1.0, 0.0, 0.25, 1.0, 64.0, 100.0, 3599.0, 3600.0, 90000.0)
    assert [duration(seconds) for seconds in given] == [
        "0 ms", "0 ms", "250 ms", "1.0 s", "64.0 s", "1 m 40 s", "59 m 59 s",
        "1 h 00 m", "25 h 00 m",
    ]  # fmt: skip


def test_a_server_does_not_command_the_terminal() -> None:
    frame = engine_frame() | {"model": "a\x1b[2Jb\n[red]c", "reason": "x\x9b1m"}
    text = header(frame).plain
    assert r"a\x1b[2Jb [red]c" in text and "\x1b" not in text and "\x9b" not in text
    assert len(plain("x" * 10_000)) == 200
