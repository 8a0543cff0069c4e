"""Costs computed by hand."""

from __future__ import annotations

import pytest

from kvik.errors import ConfigError
from kvik.planner.cost import DailyLoad, TokenRates, cost, parse_load


def test_a_million_tokens() -> None:
    # $3.60 per hour is a dollar per 1000 seconds: a million tokens at 1000 per second.
    paid = cost(3.6, TokenRates(decode=100, prefill=1000), prompt=100, output=10)
    assert (paid.input, paid.output) == pytest.approx((1.0, 10.0))
    assert (paid.copies, paid.busy) == (1, None)
    # 110 tokens take 0.2 seconds at a thousandth of a dollar each.
    assert paid.mixed == pytest.approx(0.2 * 1e-3 / 110 * 1000)
    assert (paid.per_hour, paid.per_day) == pytest.approx((3.6, 86.4))
    assert paid.per_month == pytest.approx(86.4 * 30.4375)


def test_a_measured_rate_includes_prompts() -> None:
    paid = cost(3.6, TokenRates(decode=100), prompt=900, output=100)
    # A request takes a second: a thousandth of a dollar for its 1000 tokens.
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


@pytest.mark.parametrize("text", ["", "M", "5/m", "/s", "0", "nan", "inf"])
def test_invalid_loads(text: str) -> None:
    with pytest.raises(ConfigError, match="load: must be tokens per day"):
        parse_load(text, 900, 100)


def test_a_copy_that_does_both_has_the_time_of_both() -> None:
    """A second per 1,000 prompt tokens, two per 100 output tokens."""
    assert TokenRates(decode=50.0, prefill=1000.0).output_rate(1000, 100) == pytest.approx(100 / 3)
    assert TokenRates(decode=50.0).output_rate(1000, 100) == 50.0
