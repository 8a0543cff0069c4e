"""Money, by hand."""

from __future__ import annotations

import pytest

from kvik.errors import ConfigError
from kvik.planner.cost import DailyLoad, columns, cost, count, dollars, parse_load, seconds, three


def test_a_million_tokens() -> None:
    # $3.60 an hour is a dollar for 1000 seconds: a million tokens at 1000 a second
    paid = cost(3.6, 1, prefill_rate=1000, decode_rate=100)
    assert (paid.input, paid.output) == pytest.approx((1.0, 10.0))
    assert (paid.copies, paid.busy, paid.per_day) == (None, None, None)


def test_every_device_is_paid() -> None:
    paid = cost(3.6, 8, prefill_rate=1000, decode_rate=100)
    assert (paid.price, paid.input, paid.output) == pytest.approx((28.8, 8.0, 80.0))


def test_a_day() -> None:
    # One request a second takes 100 / 1000 + 10 / 100 = 0.2 seconds of it.
    paid = cost(3.6, 1, 1000, 100, DailyLoad(86_400, prompt=100, output=10))
    assert paid.copies == 1
    assert paid.busy == pytest.approx(0.2)
    assert paid.per_day == pytest.approx(86.4)


def test_more_than_one_copy_can_do() -> None:
    paid = cost(3.6, 2, 1000, 100, DailyLoad(6 * 86_400, prompt=100, output=10))
    assert paid.copies == 2
    assert paid.busy == pytest.approx(0.6)
    assert paid.per_day == pytest.approx(2 * 2 * 86.4)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("5/s", 5 * 86_400),
        ("0.5/s", 43_200),
        ("1000000", 1000),
        ("1M", 1000),
        ("2k", 2),
        ("1.5G", 1_500_000),
        ("3e6", 3000),
    ],
)
def test_loads(text: str, requests: float) -> None:
    load = parse_load(text, prompt=900, output=100)
    assert load.requests == pytest.approx(requests)
    assert load.tokens == pytest.approx(requests * 1000)


@pytest.mark.parametrize("text", ["", "x", "M", "5/m", "/s", "0", "-1", "nan", "inf", "1e999"])
def test_what_is_no_load(text: str) -> None:
    with pytest.raises(ConfigError, match="load: must be tokens per day"):
        parse_load(text, 900, 100)


# Figures as people read them.


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
