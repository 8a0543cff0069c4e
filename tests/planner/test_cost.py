"""Money, by hand."""

from __future__ import annotations

import pytest

from kvik.errors import ConfigError
from kvik.planner.cost import (
    DailyLoad,
    TokenRates,
    columns,
    cost,
    count,
    dollars,
    parse_load,
    seconds,
    three,
)


def test_a_million_tokens() -> None:
    # $3.60 an hour is a dollar for 1000 seconds: a million tokens at 1000 a second
    paid = cost(3.6, TokenRates(decode=100, prefill=1000), prompt=100, output=10)
    assert (paid.input, paid.output) == pytest.approx((1.0, 10.0))
    assert (paid.copies, paid.busy) == (1, None)
    # 110 tokens take 0.2 seconds of a thousandth of a dollar each
    assert paid.mixed == pytest.approx(0.2 * 1e-3 / 110 * 1000)
    assert (paid.per_hour, paid.per_day) == pytest.approx((3.6, 86.4))
    assert paid.per_month == pytest.approx(86.4 * 30.4375)


def test_a_measured_rate_has_the_prompts_in_it() -> None:
    paid = cost(3.6, TokenRates(decode=100), prompt=900, output=100)
    # a request takes a second: a thousandth of a dollar for its 1000 tokens
    assert paid.mixed == pytest.approx(1e-3)
    assert (paid.input, paid.output) == (None, None)
    busy = cost(3.6, TokenRates(decode=100), 900, 100, DailyLoad(2.5 * 86_400, 900, 100))
    assert busy.copies == 3 and busy.busy == pytest.approx(2.5 / 3)
    assert busy.per_day == pytest.approx(3 * 86.4)


@pytest.mark.parametrize(("a_second", "copies", "share"), [(1, 1, 0.2), (6, 2, 0.6)])
def test_a_day(a_second: int, copies: int, share: float) -> None:
    # One request takes 100 / 1000 + 10 / 100 = 0.2 seconds of one copy.
    paid = cost(
        3.6, TokenRates(100, 1000), 100, 10, DailyLoad(a_second * 86_400, prompt=100, output=10)
    )
    assert paid.copies == copies
    assert paid.busy == pytest.approx(share)
    assert paid.per_day == pytest.approx(copies * 86.4)


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


def test_a_copy_that_does_both_has_the_time_of_both() -> None:
    """A second for 1,000 tokens of prompt, two for 100 of output."""
    assert TokenRates(decode=50.0, prefill=1000.0).output_rate(1000, 100) == pytest.approx(100 / 3)
    assert TokenRates(decode=50.0).output_rate(1000, 100) == 50.0
