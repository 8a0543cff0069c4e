"""Figures as people read them."""

from __future__ import annotations

import pytest

from kvik.planner.cost import columns, count, dollars, seconds, three


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1, "1.00"),
        (0.012345, "0.0123"),
        (1.2345, "1.23"),
        (9.996, "10.0"),
        (12.345, "12.3"),
        (999.6, "1,000"),
        (12345, "12,300"),
        (2.5e9, "2,500,000,000"),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert three(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(75, "75.0 s"), (1.5, "1.50 s"), (0.0123, "12.3 ms"), (4.2e-5, "42.0 µs"), (3e-9, "3.00 ns")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(999, "999"), (30_518.4, "30,518"), (4.95e6, "4.95 million"), (7.055e10, "70.5 billion")],
)
def test_counts(value: float, text: str) -> None:
    assert count(value) == text
    assert count(1.2e12) == "1.20 trillion"


def test_dollars() -> None:
    assert [dollars(x) for x in (0.01153, 1, 2016)] == ["$0.0115", "$1.00", "$2,016.00"]


def test_columns() -> None:
    assert columns([["a", "10"], ["long", "9"]], "<>") == ["  a     10", "  long   9"]
    assert columns([["x", ""]], "<<", indent=0) == ["x"]
